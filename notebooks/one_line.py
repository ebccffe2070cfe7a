# %% [markdown]
# # Four replicas, and one line changed
#
# This is a usual training loop, on four devices that JAX makes of this CPU. Then one line changes,
# the optimizer, and the same model learns with a fraction of the bytes. A few minutes.

# %%
import jax
import matplotlib.pyplot as plt
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from train.config import Data
from train.data import texts
from train.models.decoder import Decoder, DecoderConfig
from train.models.losses import cross_entropy
from train.models.modules import PathRngs, split
from train.output import plots
from train.placement import counts, devices

steps = 400
jax.config.update("jax_platforms", "cpu")  # one GPU is one device; the CPU can be four
devices.start(replicas=4)  # before anything runs
mesh = devices.make_mesh(4)
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## Model and data
#
# A byte-level GPT on the source of Python's standard library. Each step reads 32 sequences, eight
# on each replica.

# %%
config = DecoderConfig(layers=2, width=64, heads=4, context=64)
apply, _ = split(Decoder(config, rngs=PathRngs(0)))
text = texts.read(Data(), context=64)
rows = NamedSharding(mesh, P("replica"))


def batch(step):
    tokens = texts.batch(text.train, seed=0, step=step, batch_size=32, context=64)
    return jax.device_put(tokens, rows)


def loss_fn(params, tokens):
    return cross_entropy(apply(params, tokens[:, :-1]), tokens[:, 1:])


def initial_params():
    _, params = split(Decoder(config, rngs=PathRngs(0)))
    return jax.device_put(params, NamedSharding(mesh, P()))


held_out = texts.validation_batch(text.validation, 0, 1, batch_size=128, context=64)
held_out = jax.device_put(held_out, rows)
validate = jax.jit(loss_fn)

# %% [markdown]
# ## The loop you know
#
# JAX sees that the batch is spread over the replicas and puts an all-reduce of all gradients into
# the step. `jaxcomp.report` reads from the compiled program what each replica sends, in every step.

# %%
adam = optax.adam(3e-3)


@jax.jit
def step(params, state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, state = adam.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


params = initial_params()
state = adam.init(params)
dense_program = step.lower(params, state, batch(0)).compile()
for number in range(3):
    params, state, loss = dense_program(params, state, batch(number))
    print(f"step {number}: loss {loss:.3f}")
print(f"one replica sends {jaxcomp.report.sent_bytes(dense_program, mesh):,.0f} bytes a step")

# %% [markdown]
# ## The same loop for any method
#
# `jaxcomp.train_step` keeps gradients where they were made, and leaves the exchange to the
# optimizer. Methods that skip rounds count in their state how often each part was sent.


# %%
def train(tx):
    init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    params = initial_params()
    state = init(params)
    program = step.lower(params, state, batch(0)).compile()
    parts = jaxcomp.report.sent_bytes_by_part(program, mesh)
    history = []
    for number in range(steps + 1):
        if number % max(1, steps // 20) == 0:
            rounds = optax.tree_utils.tree_get(state, "rounds") or {}
            sent = float(counts.total_bytes(parts, rounds, number))
            history.append((number, sent, float(validate(params, held_out))))
        params, state, metrics = program(params, state, batch(number))
    print(f"loss {history[-1][2]:.3f}, {history[-1][1]:,.0f} bytes")
    return history


rate = optax.warmup_cosine_decay_schedule(0, 6e-3, steps // 10, steps, 6e-4)

# %% [markdown]
# Dense: an exact mean, then Adam.

# %%
runs = {}
mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
runs["dense"] = train(optax.chain(mean, optax.adam(rate)))

# %% [markdown]
# 4 bits for each entry of the gradient:

# %%
mean = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica")
runs["4 bits"] = train(optax.chain(mean, optax.adam(rate)))

# %% [markdown]
# 0/1 Adam, which learns its variance in some steps, sends one bit in others, and skips rounds:

# %%
meet = jaxcomp.schedules.halving(rate, steps, after=steps // 10)
runs["0/1 Adam"] = train(jaxcomp.zero_one_adam(rate, "replica", sync_at=meet))

# %% [markdown]
# CocktailSGD, in which each replica takes its own steps and sends the largest of its changes, one
# step late:

# %%
runs["CocktailSGD"] = train(jaxcomp.cocktail_sgd(optax.adam(rate), "replica"))

# %% [markdown]
# ## Loss against steps, and against bytes
#
# Left: what a method costs in steps. Right: what it saves on the network. 4 bits and 0/1 Adam
# match dense Adam. CocktailSGD sends 167 times fewer bytes than dense and is behind at equal
# steps; at equal bytes it is far ahead.

# %%
figure, (by_step, by_bytes) = plt.subplots(1, 2, sharey=True, figsize=(7.6, 3.8))
for name, history in runs.items():
    number, sent, loss = zip(*history, strict=True)
    by_step.plot(number, loss, label=name)
    # Nothing was sent at step 0: a logarithmic axis has no place for it.
    by_bytes.plot([n / 1e6 for n in sent[1:]], loss[1:], label=name)
by_bytes.set_xscale("log")
by_step.set(xlabel="steps", ylabel="validation loss (nats per byte)", ylim=(None, 4))
by_bytes.set(xlabel="sent by one replica (MB)")
by_step.legend(frameon=False)
plt.show()
