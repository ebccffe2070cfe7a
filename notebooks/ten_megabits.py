# %% [markdown]
# # A model over a 10 Mbit/s line
#
# Four machines in four homes share lines of 10 Mbit/s. A dense step of a model with 124 M
# parameters would send for ten minutes. With local steps each replica trains alone for sixteen
# steps. Then they exchange their changes at a few bits per value, or only the largest: a hundred
# times fewer bytes, or several hundred. About five minutes.

# %%
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

from train.config import Config, Data, Optimizer
from train.loop import run
from train.models.decoder import DecoderConfig
from train.output import plots
from train.placement import devices

steps = 2000
jax.config.update("jax_platforms", "cpu")  # one GPU is one device; the CPU can be four
devices.start(replicas=4)  # before anything runs
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## Three runs
#
# A small GPT learns Python's source, byte by byte. Only `update` and the learning rate differ:
#
# - Dense Adam sends each gradient in float32.
# - DiLoCo averages the change of sixteen Adam steps, at 4 bits per value, with Nesterov momentum.
# - SparseLoCo sends the largest of 32 values, at 2 bits, and keeps the rest for later.

# %%
updates = {
    "dense Adam": ("chain(compressed_mean(identity(), axis_name), adam(learning_rate))", 6e-3),
    "DiLoCo": ("diloco(adam(learning_rate), axis_name, every=16, code=quantize(4))", 3e-3),
    "SparseLoCo": ("sparse_loco(adam(learning_rate), axis_name, every=16)", 6e-3),
}
runs, folder = {}, tempfile.mkdtemp()
for name, (update, rate) in updates.items():
    config = Config(
        name=name,
        runs_dir=folder,
        steps=steps,
        optimizer=Optimizer(update=update, learning_rate=rate, warmup_steps=steps // 10),
        model=DecoderConfig(layers=2, width=64, heads=4, context=64),
        data=Data(batch=32),
        eval_every=max(1, steps // 10),
        checkpoint_every=steps,
    )
    runs[name] = [row for row in run(config) if "val_loss" in row]
for name, rows in runs.items():
    print(f"{name}: {rows[-1]['val_loss']:.2f} nats, {rows[-1]['sent_bytes'] / 1e6:,.1f} MB sent")

# %% [markdown]
# ## Loss after equal steps
#
# In a run as short as this one, local steps reach a higher loss than dense Adam. The gap shrinks
# with the length of the run: see the page on local steps for 8,000 steps.

# %%
figure, axes = plt.subplots()
for name, rows in runs.items():
    number, _, loss = plots.curve(name, rows)
    axes.plot(number, loss, label=name)
axes.set(xlabel="steps", ylabel="validation loss\n(nats per byte)")
plots.label_ends(axes)
plt.show()

# %% [markdown]
# ## Loss after equal bytes
#
# At home, bytes count. The same losses against what a replica has sent:

# %%
figure, axes = plt.subplots()
for name, rows in runs.items():
    _, sent, loss = plots.curve(name, rows)
    axes.plot(np.asarray(sent[1:]) / 1e6, loss[1:], marker="o", label=name)
axes.set(xscale="log", xlabel="MB sent by a replica", ylabel="validation loss\n(nats per byte)")
plots.label_ends(axes)
plt.show()

# %% [markdown]
# ## A model of 124 M parameters at home
#
# Bytes grow with the model. The bytes per parameter are those of the runs above; the gradient takes
# two seconds, which is a guess. Predicted seconds of a step at each rate:

# %%
small, large, compute = 120_000, 124e6, 2.0
rates = np.geomspace(1e6, 10e9, 60)
figure, axes = plt.subplots()
for name, rows in runs.items():
    sent = rows[-1]["sent_bytes"] / steps / small * large
    axes.plot(rates / 1e6, compute + 8 * sent / rates, label=name)
    print(f"{name}: {compute + 8 * sent / 10e6:,.1f} s a step at 10 Mbit/s")
axes.set(xscale="log", yscale="log", xlabel="link (Mbit/s)", ylabel="seconds a step")
plots.label_ends(axes)
plt.show()
