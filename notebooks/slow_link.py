# %% [markdown]
# # Fine-tuning over a slow link
#
# A model that knows Python learns C on four machines whose network is slow: dense Adam against
# CocktailSGD, which was made for this. How long does each take at 100 Mbit/s to 10 Gbit/s? A few
# minutes.

# %%
import dataclasses
import sysconfig
import tempfile

import jax
import matplotlib.pyplot as plt
import numpy as np

from train.config import Config, Data, Optimizer
from train.loop import run
from train.models.decoder import DecoderConfig
from train.output import plots
from train.placement import devices

steps = 200
jax.config.update("jax_platforms", "cpu")  # one GPU is one device; the CPU can be four
devices.start(replicas=4)  # before anything runs
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## First, a model that knows Python
#
# `train` is the program of the command line. A run is a frozen dataclass, and fine-tuning is a run
# that starts from another's parameters.

# %%
python = Config(
    name="python",
    runs_dir=tempfile.mkdtemp(),
    steps=2 * steps,
    optimizer=Optimizer(
        update="chain(compressed_mean(identity(), axis_name), adam(learning_rate))",
        learning_rate=6e-3,
        warmup_steps=steps // 10,
    ),
    model=DecoderConfig(layers=2, width=64, heads=4, context=64),
    eval_every=steps,
    checkpoint_every=2 * steps,
)
before = run(python)
print(f"loss on Python {before[0]['val_loss']:.2f} -> {before[-1]['val_loss']:.2f} nats per byte")

# %% [markdown]
# ## Then C, twice
#
# The text is the headers of this machine's own Python. Only `update` differs between the two runs.

# %%
updates = {
    "dense Adam": "chain(compressed_mean(identity(), axis_name), adam(learning_rate))",
    "CocktailSGD": "cocktail_sgd(adam(learning_rate), axis_name)",
}
runs, folder = {}, tempfile.mkdtemp()  # another folder each time this cell runs
for name, update in updates.items():
    optimizer = dataclasses.replace(python.optimizer, update=update)
    config = dataclasses.replace(
        python,
        name=name,
        runs_dir=folder,
        steps=steps,
        start_from=f"{python.runs_dir}/{python.name}",
        optimizer=optimizer,
        data=Data(path=sysconfig.get_path("include")),
        eval_every=max(1, steps // 15),
    )
    runs[name] = [row for row in run(config) if "val_loss" in row]

# %% [markdown]
# ## What it cost
#
# CocktailSGD sends under a hundredth of the bytes. In this short run it ends somewhat above dense
# Adam, step for step.

# %%
figure, axes = plt.subplots()
for name, rows in runs.items():
    label = f"{name}\n{rows[-1]['sent_bytes'] / steps / 1e3:,.0f} kB a step"
    number, _, loss = plots.curve(name, rows)
    axes.plot(number, loss, label=label)
axes.set(xlabel="steps", ylabel="validation loss on C\n(nats per byte)")
plots.label_ends(axes)
plt.show()

# %% [markdown]
# ## The same over time
#
# A step takes the time of its gradient plus the time of its bytes on the link. The first depends on
# your machine: here it is assumed to be a fiftieth of a second. A model this small gains at
# 100 Mbit/s; from 1 Gbit/s on dense Adam is the better choice.

# %%
compute = 0.02  # seconds of a step without the exchange
links = {"100 Mbit/s": 100e6, "500 Mbit/s": 500e6, "1 Gbit/s": 1e9, "10 Gbit/s": 10e9}
figure, panels = plt.subplots(1, len(links), sharey=True, sharex=True, figsize=(7.6, 3.4))
for axes, (link, rate) in zip(panels, links.items(), strict=True):
    for name, rows in runs.items():
        number, sent, loss = plots.curve(name, rows)
        axes.plot(number * compute + 8 * sent / rate, loss, label=name)
    axes.set_title(link, size=11)
panels[0].set_ylabel("validation loss on C\n(nats per byte)")
panels[-1].legend(frameon=False, fontsize=9)
figure.supxlabel(f"seconds for {steps} steps", size=11)
plt.show()

# %% [markdown]
# ## A model of the size that is fine-tuned
#
# The bytes grow with the model, and so does what they cost. The same two methods on 1.3 billion
# parameters: bytes of a step as `python -m train configs/shapes/opt_1_3b_cocktail.py --report`
# reads them from the compiled program, dense in float16, and a guess of ten seconds for the
# gradient.

# %%
compute, cocktail = 10.0, 45_023_784
bytes_a_step = {"dense float16": 88 * cocktail, "CocktailSGD": cocktail}
rates = np.geomspace(100e6, 10e9, 50)
figure, axes = plt.subplots()
for name, sent in bytes_a_step.items():
    axes.plot(rates / 1e6, (compute + 8 * sent / rates) * 1000 / 3600, label=name)
axes.set(xscale="log", yscale="log", xlabel="link (Mbit/s)", ylabel="hours for 1,000 steps")
axes.set_xticks([100, 500, 1000, 10000], ["100", "500", "1,000", "10,000"])
axes.set_yticks([3, 10, 30, 100], ["3", "10", "30", "100"])
axes.minorticks_off()
plots.label_ends(axes)
plt.show()
