# %% [markdown]
# # Sixty-four replicas on one device
#
# What happens with more replicas than you have machines? `jaxcomp.simulated_train_step` runs them
# all on one GPU or CPU, with `jax.vmap` over the axis of the collectives. A few minutes.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from train.config import Data
from train.data import texts
from train.models.decoder import Decoder, DecoderConfig
from train.models.losses import cross_entropy
from train.models.modules import PathRngs, split
from train.output import plots
from train.placement import devices

steps = 100
sizes = (1, 8, 64)
devices.start(replicas=8)  # for the comparison below: CPU devices, whatever else there is
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## A small model
#
# Each replica reads four sequences of 32 bytes in a step, so that more replicas read more.

# %%
config = DecoderConfig(layers=1, width=32, heads=2, context=32)
apply, _ = split(Decoder(config, rngs=PathRngs(0)))
text = texts.read(Data(), context=32)
held_out = texts.validation_batch(text.validation, 0, 1, batch_size=256, context=32)


def batch(step, replicas):
    return texts.batch(text.train, seed=0, step=step, batch_size=4 * replicas, context=32)


def loss_fn(params, tokens):
    return cross_entropy(apply(params, tokens[:, :-1]), tokens[:, 1:])


validate = jax.jit(loss_fn)
initial_params = lambda: split(Decoder(config, rngs=PathRngs(0)))[1]

# %% [markdown]
# ## The same numbers as on eight devices
#
# Two codes run on a mesh of eight CPU devices, with messages between them, and on one device. The
# programs add in another order, so they differ by rounding: by less than a millionth after twenty
# steps. The two runs at 4 bits are closer: a value that is rounded to one of 15 numbers mostly has
# the same code.

# %%
cpus = jax.devices("cpu")
mesh = Mesh(np.array(cpus), ("replica",))
rows, everywhere = NamedSharding(mesh, P("replica")), NamedSharding(mesh, P())


def follow(train_step, params, place):
    """The parameters after every step, as one vector each."""
    state, path = train_step.init(params), []
    for number in range(min(steps, 20) + 1):
        path.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)]))
        params, state, _ = train_step.step(params, state, jax.device_put(batch(number, 8), place))
    return np.stack(path)


figure, axes = plt.subplots()
codes = {"one entry\nof eight": jaxcomp.random_k(1 / 8), "4 bits": jaxcomp.quantize(4)}
for (name, code), color in zip(codes.items(), plots.COLORS[1:], strict=False):
    tx = optax.chain(jaxcomp.compressed_mean(code, "replica"), optax.sgd(0.3, momentum=0.9))
    on_mesh = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    on_one = jaxcomp.simulated_train_step(loss_fn, tx, 8, "replica")
    there = follow(on_mesh, jax.device_put(initial_params(), everywhere), rows)
    here = follow(on_one, jax.device_put(initial_params(), cpus[0]), cpus[0])
    moved = np.linalg.norm(there[1:] - there[0], axis=1)
    apart = np.linalg.norm(there[1:] - here[1:], axis=1) / moved
    axes.plot(range(1, len(there)), apart, color=color, label=name)
axes.axhline(2.0**-24, color=plots.COLORS[0], linestyle=":")
axes.text(0.9, 2.0**-24, "one rounding", color="#666666", va="bottom")
axes.set(
    xlabel="steps", ylabel="difference of the parameters,\nas a share of their way", yscale="log"
)
axes.set_ylim(1e-10, 1e-4)
axes.xaxis.get_major_locator().set_params(integer=True)
plots.label_ends(axes)
plt.show()

# %% [markdown]
# ## What happens as replicas grow
#
# The same steps and the same rate. For dense Adam more replicas are a larger batch, and the loss
# falls. 4 bits match it. CocktailSGD gains less: each replica's own Adam still sees a small
# batch.


# %%
def train(tx, replicas):
    init, step = jaxcomp.simulated_train_step(loss_fn, tx, replicas, "replica")
    params = initial_params()
    state = init(params)
    for number in range(steps):
        params, state, _ = step(params, state, batch(number, replicas))
    return float(validate(params, held_out))


rate = optax.linear_schedule(6e-3, 0, steps)
dense = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
four_bits = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica")
methods = {
    "dense Adam": optax.chain(dense, optax.adam(rate)),
    "4-bit Adam": optax.chain(four_bits, optax.adam(rate)),
    "CocktailSGD": jaxcomp.cocktail_sgd(optax.adam(rate), "replica"),
}
losses = {name: [train(tx, size) for size in sizes] for name, tx in methods.items()}

# %%
figure, axes = plt.subplots()
for name, found in losses.items():
    axes.plot(sizes, found, "o-", label=name)
axes.set_xscale("log", base=2)
axes.set_xticks(sizes, [str(size) for size in sizes])
axes.set(xlabel="replicas", ylabel=f"validation loss after {steps} steps\n(nats per byte)")
plots.label_ends(axes)
plt.show()
