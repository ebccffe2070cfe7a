# %% [markdown]
# # Sharded parameters, gathered as codes
#
# Four replicas usually hold the whole model four times. QSDP keeps a quarter on each, and sends 8
# bits instead of 32 when a layer is needed. That takes two lines around a Flax model. Two minutes.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
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
from train.placement import devices

steps = 40
layers, width = 4, 128
jax.config.update("jax_platforms", "cpu")  # one GPU is one device; the CPU can be four
devices.start(replicas=4)  # before anything runs
mesh = devices.make_mesh(4)
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## A Flax model and its loss

# %%
config = DecoderConfig(layers=layers, width=width, heads=4, context=64)
apply, params = split(Decoder(config, rngs=PathRngs(0)))
text = texts.read(Data(), context=64)
rows = NamedSharding(mesh, P("replica"))


def batch(step):
    tokens = texts.batch(text.train, seed=0, step=step, batch_size=8, context=64)
    return jax.device_put(tokens, rows)


def loss_fn(params, tokens, **options):
    return cross_entropy(apply(params, tokens[:, :-1], **options), tokens[:, 1:])


params = jax.tree.map(np.asarray, params)  # each run below puts its own copy on the devices
tx = optax.adam(optax.linear_schedule(2e-3, 0, steps))
print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")

# %% [markdown]
# ## Before: the whole model on each replica

# %%
found = {}


def train(name, init, step, params):
    """Trains, and notes the losses and what XLA plans for one device."""
    state = init(params)
    program = step.lower(params, state, batch(0)).compile()
    memory = program.memory_analysis()
    losses = []
    for number in range(steps):
        params, state, metrics = program(params, state, batch(number))
        losses.append(float(np.mean(metrics["loss"])))
    found[name] = {
        "held": memory.argument_size_in_bytes / 1e6,
        "more": memory.temp_size_in_bytes / 1e6,
        "sent": jaxcomp.report.sent_bytes(program, mesh) / 1e6,
        "losses": losses,
    }


mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
replicated = jax.device_put(params, NamedSharding(mesh, P()))
init_and_step = jaxcomp.train_step(loss_fn, optax.chain(mean, tx), mesh, "replica")
train("replicated", *init_and_step, replicated)

# %% [markdown]
# ## After: the two lines
#
# `fsdp.gather` inside the loss makes whole parameters of shards; `fsdp.shard` cuts them. In float32
# first, which is what sharded training sends everywhere, then in eight bits.

# %%
for name, code in {"shards, float32": jaxcomp.identity(), "QSDP, 8 bits": None}.items():
    fsdp = jaxcomp.qsdp("replica", code, code) if code else jaxcomp.qsdp("replica")
    sharded_loss = lambda shards, tokens, fsdp=fsdp: loss_fn(fsdp.gather(shards), tokens)
    init_and_step = jaxcomp.qsdp_train_step(sharded_loss, tx, mesh, fsdp)
    train(name, *init_and_step, fsdp.shard(params, mesh))

# %% [markdown]
# ## One block at a time
#
# Gathered all at once, the whole model is on every device again for a moment. With `fsdp.layers`
# around its block, as this GPT has it, a block is gathered when it is needed, forward and backward.


# %%
def sharded_loss(shards, tokens):
    return loss_fn(fsdp.gather(shards, but="^block_"), tokens, layers=fsdp.layers)


init_and_step = jaxcomp.qsdp_train_step(sharded_loss, tx, mesh, fsdp)
train("QSDP, block\nby block", *init_and_step, fsdp.shard(params, mesh))

# %% [markdown]
# ## Memory and bytes
#
# What one replica holds between steps (parameters, Adam's moments, its part of the batch), what XLA
# plans on top of it during a step, and what it sends. Block by block, weights are sent twice,
# forward and backward: three fifths of the bytes saved, and two thirds of the memory.

# %%
names = list(found)
column = lambda key: np.array([found[name][key] for name in names])
figure, (memory, sent) = plt.subplots(1, 2, sharey=True, figsize=(7, 3.4))
held, total = column("held"), column("held") + column("more")
memory.barh(names, held, color=plots.COLORS[1])
memory.barh(names, total - held, left=held, color=plots.COLORS[6])
memory.text(0, -0.62, "held", color=plots.COLORS[1], weight="bold")
memory.text(held[0], -0.62, "more during a step", color=plots.COLORS[6], weight="bold")
memory.set(xlabel="memory of one replica (MB)", ylim=(3.6, -0.9))
sent.barh(names, column("sent"), color=plots.COLORS[2])
sent.set(xlabel="sent by one replica in a step (MB)")
for axes, values in ((memory, total), (sent, column("sent"))):
    axes.bar_label(axes.containers[-1], [f" {value:.1f}" for value in values])
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
plt.show()

# %% [markdown]
# ## And the loss
#
# All four see the same batches from the same start; the peaks are of single batches, eight
# sequences each. Shards in float32 train as replicas do, and eight bits move the path a little.

# %%
figure, axes = plt.subplots()
for name, one in found.items():
    first = name == "replicated"
    axes.plot(one["losses"], linewidth=5 if first else 1.5, label=name.replace("\n", " "))
axes.set(xlabel="steps", ylabel="training loss (nats per byte)")
axes.legend(frameon=False)
plt.show()
