# %% [markdown]
# # What compression does to a gradient
#
# A compressor turns a bucket of numbers into a message of fewer bytes. Here all compressors get
# the same gradient, that of a small GPT after some training on Python source. A minute on a CPU.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import jaxcomp
from train.config import Data
from train.data import texts
from train.models.decoder import Decoder, DecoderConfig
from train.models.losses import cross_entropy
from train.models.modules import PathRngs, split
from train.output import plots

steps = 150
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## A real gradient of a real model
#
# A byte-level GPT trains briefly on the source of Python's standard library, so that its gradient
# is not that of random weights.

# %%
config = DecoderConfig(layers=2, width=64, heads=4, context=64)
apply, params = split(Decoder(config, rngs=PathRngs(0)))
text = texts.read(Data(), context=64)
batch = lambda step: texts.batch(text.train, seed=0, step=step, batch_size=32, context=64)


def loss_fn(params, tokens):
    return cross_entropy(apply(params, tokens[:, :-1]), tokens[:, 1:])


@jax.jit
def step(params, state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, state = adam.update(grads, state)
    return optax.apply_updates(params, updates), state, loss, grads


adam = optax.adam(3e-3)
state = adam.init(params)
for number in range(steps):
    params, state, loss, grads = step(params, state, batch(number))
gradient, _ = ravel_pytree(grads)
print(f"loss {loss:.2f} nats per byte after {steps} steps, {gradient.size:,} parameters")

# %% [markdown]
# ## Bits against error
#
# `jaxcomp.transmit` encodes an array and decodes it again. Further left is cheaper, further down is
# more exact. The grey line is the least that *any* code could lose if the entries were independent
# normal numbers. Those of a gradient are not: few of them hold most of it, so a code that keeps the
# largest ones gets below the line.

# %%
families = {
    "quantize": [jaxcomp.quantize(bits) for bits in (3, 4, 6, 8)],
    "top_k, then 4 bits": [
        jaxcomp.compose(jaxcomp.top_k(density), jaxcomp.quantize(4))
        for density in (0.01, 0.04, 0.16, 0.5)
    ],
    "group_top_1, then 4 bits": [
        jaxcomp.compose(jaxcomp.group_top_1(group), jaxcomp.quantize(4)) for group in (64, 16, 8, 4)
    ],
    "cocktail": [jaxcomp.cocktail(random) for random in (0.1, 0.25, 0.5, 1.0)],
    "random_k": [jaxcomp.random_k(density) for density in (1 / 256, 1 / 32, 1 / 8)],
    "sign": [jaxcomp.sign(block=block) for block in (1024, 128, 32)],
    "cast to bfloat16": [jaxcomp.cast("bfloat16")],
}
names = {  # where each one stands: behind which point, how many points right and up of it
    "quantize": (1, 10, 0),
    "top_k, then 4 bits": (1, -98, -34),
    "group_top_1, then 4 bits": (0, -105, -27),
    "cocktail": (-1, 8, -3),
    "random_k": (-1, 10, -4),
    "sign": (-1, 10, -2),
    "cast to bfloat16": (0, -30, 10),
}
figure, axes = plt.subplots(figsize=(7, 4.6))
bits = np.geomspace(1 / 30, 10, 200)
axes.plot(bits, 4.0**-bits, color=plots.COLORS[0], linewidth=4, zorder=0)
axes.text(6.3, 4e-5, "best possible for\nnormal numbers", color="#666666", ha="right")
for (name, codes), mark, color in zip(
    families.items(), "os^DvPX", plt.cm.tab10.colors, strict=False
):
    sent = [jaxcomp.transmit(code, gradient) for code in codes]
    points = [(one.bits_per_parameter, one.error) for one in sent]
    axes.plot(*zip(*points, strict=True), mark + "-", color=color, linewidth=1.2)
    place, *shift = names[name]
    axes.annotate(
        name, points[place], shift, textcoords="offset points", color=color, weight="bold"
    )
axes.set_xscale("log", base=2)
axes.set_yscale("log")
axes.set(xlim=(1 / 40, 40), ylim=(1e-6, 2.5))
axes.xaxis.set_major_formatter(lambda bits, _: f"{bits:g}" if bits >= 1 else f"1/{1 / bits:g}")
axes.set_xlabel("bits per parameter (float32 has 32)")
axes.set_ylabel("lost share of the gradient's energy")
plt.show()

# %% [markdown]
# ## What arrives, and what a message looks like
#
# Above: 64 rows of one layer's gradient as the receiver sees them. Below: the message, a pixel a
# byte, all in one scale, so that area is bytes. Scales and positions look regular, codes like
# noise.

# %%
kernel = grads["block_0"]["up"]["kernel"][:, :64]
codes = {
    "float32": jaxcomp.identity(),
    "quantize(4)": jaxcomp.quantize(4),
    "sign": jaxcomp.sign(block=128),
    "group_top_1(8),\n4 bits": jaxcomp.compose(jaxcomp.group_top_1(8), jaxcomp.quantize(4)),
    "cocktail(1/2)": jaxcomp.cocktail(0.5),
}
limit = float(np.quantile(np.abs(kernel), 0.98))
figure, (above, below) = plt.subplots(2, len(codes), figsize=(7, 3.8))
for (name, code), top, bottom in zip(codes.items(), above, below, strict=True):
    sent = jaxcomp.transmit(code, kernel)
    top.imshow(sent.decoded, cmap="RdBu", vmin=-limit, vmax=limit, interpolation="nearest")
    top.set_title(name, size=10)
    top.set_xlabel(f"{sent.error:.0%} lost", size=9)
    message = np.asarray(sent.message, np.float32)
    message = np.pad(message, (0, -message.size % 128), constant_values=np.nan).reshape(-1, 128)
    bottom.imshow(message, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    bottom.set(xlim=(0, 128), ylim=(128, 0))
    bottom.set_xlabel(
        f"{sent.message.size:,} bytes\n{sent.bits_per_parameter:.2f} bits each", size=9
    )
for axes in figure.axes:
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    axes.spines[:].set_visible(False)
above[0].set_ylabel("decoded", size=10)
below[0].set_ylabel("message", size=10)
plt.show()
