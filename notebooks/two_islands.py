# %% [markdown]
# # Two islands and a folder
#
# Islands are programs that train one model and share nothing but a bucket or a folder. Here two
# take turns in one loop, so that you see both: one of them crashes, and returns. It takes a minute.

# %%
import importlib.util
import subprocess
import sys
import tempfile
import time

import jax
import matplotlib.pyplot as plt
import optax

from train.config import Data
from train.data import texts
from train.models.decoder import Decoder, DecoderConfig
from train.models.losses import cross_entropy
from train.models.modules import PathRngs, split
from train.output import plots

if importlib.util.find_spec("obstore") is None:  # which opens buckets and folders
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", "obstore"])

from jaxcomp import islands

steps = 300
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## A small model

# %%
config = DecoderConfig(layers=1, width=32, heads=2, context=32)
apply, start = split(Decoder(config, rngs=PathRngs(0)))
text = texts.read(Data(), context=32)
held_out = texts.validation_batch(text.validation, 0, 1, batch_size=256, context=32)
optimizer = optax.adam(6e-3)


def loss_fn(params, tokens):
    return cross_entropy(apply(params, tokens[:, :-1]), tokens[:, 1:])


validate = jax.jit(loss_fn)


@jax.jit
def train(params, state, tokens):
    updates, state = optimizer.update(jax.grad(loss_fn)(params, tokens), state, params)
    return optax.apply_updates(params, updates), state


# %% [markdown]
# ## Islands in a loop
#
# `join` founds the run, or joins the one that is there. `step` counts a step of training; once in
# an interval it sends 4 bits for each parameter, and takes the outer step one step later. On
# machines of your own each island has a loop to itself, and the address is `s3://bucket/run`.

# %%
every = max(1, steps // 20)


def train_islands(address, names_at):
    """Trains; at each round the steps, loss of the consensus, members, and the longest wait."""
    members, rows, waited = {}, [], 0.0
    for number in range(steps):
        for name in names_at(number):
            if name not in members:
                island = islands.join(
                    address, start, name=name, every=every, delay=1, deadline=3, poll=0.02
                )
                members[name] = island, island.params, optimizer.init(start)
            island, params, state = members[name]
            seed = sum(name.encode())  # each island reads text in an order of its own
            tokens = texts.batch(text.train, seed=seed, step=number, batch_size=4, context=32)
            params, state = train(params, state, tokens)
            began = time.monotonic()
            params = island.step(params)
            members[name] = island, params, state
            if name == "garage" and number > 2 * every:  # before, it compiles
                waited = max(waited, time.monotonic() - began)
        members = {name: members[name] for name in names_at(number)}  # a crash tells nobody
        island = members["garage"][0]
        if number % every == 0 and island.last is not None:
            loss = float(validate(island.params, held_out))
            rows.append((number, loss, len(island.last.members), waited))
    for island, params, _ in members.values():
        island.leave(params)
    return rows


# %% [markdown]
# ## Alone, and with a second one that crashes
#
# `attic` trains with `garage` for a third of the steps, and crashes. `garage` waits for it once, as
# long as `deadline` says. Later `attic` joins again by its name, at the consensus of that time.

# %%
folder = tempfile.mkdtemp()
alone = train_islands(f"file://{folder}/alone", lambda number: ["garage"])


def with_attic(number):
    is_there = number < steps // 3 or number >= steps // 2
    return ["garage", "attic"] if is_there else ["garage"]


together = train_islands(f"file://{folder}/together", with_attic)
for rows in (alone, together):
    print(f"loss {rows[-1][1]:.2f}, members {rows[-1][2]}, longest wait {rows[-1][3]:.1f} s")

# %%
figure, (above, below) = plt.subplots(2, sharex=True, height_ratios=(3, 1))
for label, rows, color in (
    ("alone", alone, plots.COLORS[0]),
    ("with attic", together, plots.COLORS[1]),
):
    numbers, losses, members, _ = zip(*rows, strict=True)
    above.plot(numbers, losses, color=color, label=label)
    below.step(numbers, members, color=color, where="mid")
above.set(ylabel="validation loss of the\nconsensus (nats per byte)")
below.set(xlabel="steps of garage", ylabel="members", yticks=(1, 2))
plots.label_ends(above)
plt.show()
