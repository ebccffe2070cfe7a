"""A vision transformer with attention in windows, which shift from block to block, in Flax."""

import dataclasses
import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from train import checks
from train.models.gpt import scanned


@dataclasses.dataclass(frozen=True)
class SwinConfig:
    """Size of the model and the type that it computes in; the defaults are Swin-B's."""

    blocks: tuple[int, ...] = (2, 2, 18, 2)
    """Blocks of each stage; each stage halves the image and doubles width and heads of the last."""
    width: int = 128
    """Features of the first stage; divisible by heads."""
    heads: int = 4
    """Attention heads of the first stage."""
    window: int = 7
    """Patches of each side of a window; a stage whose image is smaller is one window."""
    patch: int = 4
    """Pixels of each side of a patch."""
    size: int = 224
    """Pixels of each side of an image."""
    channels: int = 3
    """Channels of an image: 3 colours, or 1."""
    classes: int = 1000
    """Number of classes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products."""
    scan: bool = False
    """Whether a stage is a scan over its pairs of blocks, which compiles as fast as one pair."""

    def __post_init__(self):
        sizes = "width", "heads", "window", "patch", "size", "channels", "classes"
        checks.at_least(1, self, *sizes, of="model.")
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"model.blocks={self.blocks} must be numbers from 1 up; write 2 2.")
        if self.scan and any(count % 2 for count in self.blocks):
            raise ValueError(
                f"model.scan needs an even number of blocks in each stage, got {self.blocks}; "
                "write --model.no-scan."
            )
        checks.divisible(self, "width", "heads")
        unit = self.patch << (len(self.blocks) - 1)
        sides = [self.size // self.patch >> stage for stage in range(len(self.blocks))]
        if self.size % unit or any(side % min(self.window, side) for side in sides):
            raise ValueError(
                f"model.size={self.size} must be cut into windows of model.window={self.window} "
                f"patches in all {len(self.blocks)} stages; write --model.size "
                f"{unit * self.window}."
            )

    @property
    def stacked(self) -> str | None:
        """As of `GPTConfig`."""
        return r"^stage_\d+/" if self.scan else None


class Swin(nn.Module):
    """Logits of a transformer that sees patches in windows, and merges them from stage to stage.

    Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021.
    Deviation: no block is skipped by chance (stochastic depth) while it trains.

    Call with images f32[batch, size, size, channels]; returns logits f32[batch, classes].
    """

    config: SwinConfig

    @nn.compact
    def __call__(self, images_BxHxWxC):
        c = self.config
        x = _dense(c.width, "embed")(_merged(images_BxHxWxC.astype(c.dtype), c.patch))
        x = nn.LayerNorm(dtype=x.dtype, name="norm_embed")(x)
        for stage, count in enumerate(c.blocks):
            if stage:
                x = nn.LayerNorm(dtype=x.dtype, name=f"norm_merge_{stage}")(_merged(x, 2))
                x = _dense(c.width << stage, f"merge_{stage}", use_bias=False)(x)
            window, name = min(c.window, x.shape[1]), f"stage_{stage}"
            # A window that is the whole image has nowhere to go.
            shift = window // 2 if window < x.shape[1] else 0
            if c.scan:
                x = scanned(Pair(c.heads << stage, window, shift, name=name), count // 2, x)
                continue
            for index in range(count):
                name = f"stage_{stage}_block_{index}"
                x = Block(c.heads << stage, window, shift if index % 2 else 0, name=name)(x)
        x = nn.LayerNorm(dtype=x.dtype, name="norm")(x)
        return _dense(c.classes, "head")(jnp.mean(x, (1, 2), dtype=jnp.float32))


class Block(nn.Module):
    """Self-attention in windows, shifted or not, then a four times wider perceptron."""

    heads: int
    window: int
    shift: int

    @nn.compact
    def __call__(self, x_BxHxWxD):
        x, (batch, side, _, width) = x_BxHxWxD, x_BxHxWxD.shape
        h = nn.LayerNorm(dtype=x.dtype, name="norm_attention")(x)
        h_NxTxD = _windows(jnp.roll(h, (-self.shift, -self.shift), (1, 2)), self.window)
        qkv = jnp.split(_dense(3 * width, "qkv")(h_NxTxD), 3, axis=-1)
        q, k, v = (part.reshape(*h_NxTxD.shape[:2], self.heads, -1) for part in qkv)
        table = self.param("position", _INIT, ((2 * self.window - 1) ** 2, self.heads))
        bias_HxTxT = jnp.moveaxis(table[_offsets(self.window)], -1, 0).astype(x.dtype)
        mask = None
        if self.shift:
            mask = jnp.tile(_of_one_place(side, self.window, self.shift), (batch, 1, 1, 1))
        h_NxTxHxK = jax.nn.dot_product_attention(q, k, v, bias=bias_HxTxT[None], mask=mask)
        h = _image(_dense(width, "out")(h_NxTxHxK.reshape(h_NxTxD.shape)), side)
        x += jnp.roll(h, (self.shift, self.shift), (1, 2))
        h = nn.LayerNorm(dtype=x.dtype, name="norm_mlp")(x)
        return x + _dense(width, "down")(nn.gelu(_dense(4 * width, "up")(h), approximate=False))


class Pair(nn.Module):
    """A block whose windows are not shifted, and one whose are."""

    heads: int
    window: int
    shift: int

    @nn.compact
    def __call__(self, x):
        for index, shift in enumerate((0, self.shift)):
            x = Block(self.heads, self.window, shift, name=f"block_{index}")(x)
        return x


_INIT = nn.initializers.truncated_normal(0.02)


def _dense(features: int, name: str, use_bias: bool = True):
    """A layer that computes in the type of what it is called with."""

    def layer(x):
        dense = nn.Dense(features, use_bias, dtype=x.dtype, kernel_init=_INIT, name=name)
        return dense(x)

    return layer


def _windows(x, window: int):
    """Cuts `[batch, side, side, width]` into `[batch * windows, window**2, width]`."""
    batch, side, _, width = x.shape
    x = x.reshape(batch, side // window, window, side // window, window, width)
    return x.swapaxes(2, 3).reshape(-1, window**2, width)


def _image(x, side: int):
    """Undoes `_windows`."""
    window = math.isqrt(x.shape[1])
    x = x.reshape(-1, side // window, side // window, window, window, x.shape[-1])
    return x.swapaxes(2, 3).reshape(-1, side, side, x.shape[-1])


def _merged(x, patch: int):
    """Lays the features of `patch` times `patch` neighbours behind each other."""
    batch, side, _, width = x.shape
    rows = _windows(x, patch)
    return rows.reshape(batch, side // patch, side // patch, patch**2 * width)


def _offsets(window: int) -> np.ndarray:
    """i64[tokens, tokens]: the number of the way from one token of a window to another."""
    places = np.stack(np.divmod(np.arange(window**2), window))
    down, right = places[:, :, None] - places[:, None] + window - 1
    return down * (2 * window - 1) + right


def _of_one_place(side: int, window: int, shift: int) -> np.ndarray:
    """bool[windows, 1, tokens, tokens]: which tokens of a shifted window are neighbours.

    What a shift has brought around the edge of the image shares a window with what was there.
    """
    part = np.digitize(np.arange(side), (side - window, side - shift))
    parts = 3 * part[:, None] + part
    tokens = _windows(parts[None, :, :, None], window)
    return (tokens == tokens.swapaxes(1, 2))[:, None]
