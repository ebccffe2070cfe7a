"""Swin: a vision transformer with attention in shifted windows, in Flax nnx."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import checks
from train.models import modules
from train.models.activations import gelu_exact
from train.models.modules import PathRngs


@dataclasses.dataclass(frozen=True)
class SwinConfig:
    """Size and compute dtype of the model; the defaults are Swin-B's."""

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
        checks.require_types(self, "model.")
        sizes = "width", "heads", "window", "patch", "size", "channels", "classes"
        checks.at_least(1, self, *sizes, prefix="model.")
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
        """As in `DecoderConfig`."""
        return r"^stage_\d+/" if self.scan else None


class Swin(nnx.Module):
    """A transformer on windows of patches, which are merged from stage to stage; returns logits.

    Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", 2021.
    Deviation: no stochastic depth.

    Call with images f32[batch, size, size, channels]; returns logits f32[batch, classes].
    """

    def __init__(self, config: SwinConfig, *, rngs: PathRngs):
        c = self.config = config
        linear = functools.partial(nnx.Linear, kernel_init=_INIT)
        norm = functools.partial(nnx.LayerNorm, dtype=c.dtype)
        pixels = c.patch**2 * c.channels
        self.embed = linear(pixels, c.width, dtype=c.dtype, rngs=rngs.at("embed"))
        self.norm_embed = norm(c.width, rngs=rngs.at("norm_embed"))
        for stage in range(len(c.blocks)):
            width = c.width << stage
            if stage:
                name = f"norm_merge_{stage}"
                setattr(self, name, norm(2 * width, rngs=rngs.at(name)))
                options = {"use_bias": False, "dtype": c.dtype, "rngs": rngs.at(f"merge_{stage}")}
                setattr(self, f"merge_{stage}", linear(2 * width, width, **options))
            self._add_blocks(stage, rngs)
        self.norm = norm(width, rngs=rngs.at("norm"))
        self.head = linear(width, c.classes, rngs=rngs.at("head"))

    def _add_blocks(self, stage: int, rngs: PathRngs):
        c, side = self.config, self.config.size // self.config.patch >> stage
        window = min(c.window, side)
        # A window of the whole image is not shifted.
        shift = window // 2 if window < side else 0
        block = functools.partial(Block, c.width << stage, c.heads << stage, window, dtype=c.dtype)
        for index, name in enumerate(_names(c, stage)):
            if c.scan:
                pair = functools.partial(Pair, block, shift)
                pairs = [f"{name}_pair_{index}_" for index in range(c.blocks[stage] // 2)]
                made = modules.stacked(pair, pairs, rngs)
            else:
                made = block(shift if index % 2 else 0, rngs=rngs.at(name))
            setattr(self, name, made)

    def __call__(self, images_BxHxWxC):
        c = self.config
        x = self.norm_embed(self.embed(_merged(images_BxHxWxC.astype(c.dtype), c.patch)))
        for stage in range(len(c.blocks)):
            if stage:
                x = getattr(self, f"norm_merge_{stage}")(_merged(x, 2))
                x = getattr(self, f"merge_{stage}")(x)
            for block in (getattr(self, name) for name in _names(c, stage)):
                x = modules.run(block, x) if c.scan else block(x)
        return self.head(jnp.mean(self.norm(x), (1, 2), dtype=jnp.float32))


class Block(nnx.Module):
    """Self-attention in windows, shifted or not, then a four times wider MLP."""

    def __init__(
        self, width: int, heads: int, window: int, shift: int, *, dtype: str, rngs: PathRngs
    ):
        self.heads, self.window, self.shift = heads, window, shift
        linear = functools.partial(nnx.Linear, dtype=dtype, kernel_init=_INIT)
        norm = functools.partial(nnx.LayerNorm, width, dtype=dtype)
        self.norm_attention = norm(rngs=rngs.at("norm_attention"))
        self.qkv = linear(width, 3 * width, rngs=rngs.at("qkv"))
        self.position = nnx.Param(_INIT(rngs.params(), ((2 * window - 1) ** 2, heads), jnp.float32))
        self.out = linear(width, width, rngs=rngs.at("out"))
        self.norm_mlp = norm(rngs=rngs.at("norm_mlp"))
        self.up = linear(width, 4 * width, rngs=rngs.at("up"))
        self.down = linear(4 * width, width, rngs=rngs.at("down"))

    def __call__(self, x_BxHxWxD):
        x, (batch, side, _, _) = x_BxHxWxD, x_BxHxWxD.shape
        h = jnp.roll(self.norm_attention(x), (-self.shift, -self.shift), (1, 2))
        h_NxTxD = modules.windows(h, self.window)
        qkv = jnp.split(self.qkv(h_NxTxD), 3, axis=-1)
        q, k, v = (part.reshape(*h_NxTxD.shape[:2], self.heads, -1) for part in qkv)
        table = self.position[...]
        bias_HxTxT = jnp.moveaxis(table[_offsets(self.window)], -1, 0).astype(x.dtype)
        mask = None
        if self.shift:
            mask = jnp.tile(_neighbours(side, self.window, self.shift), (batch, 1, 1, 1))
        h_NxTxHxK = jax.nn.dot_product_attention(q, k, v, bias=bias_HxTxT[None], mask=mask)
        h = _image(self.out(h_NxTxHxK.reshape(h_NxTxD.shape)), side)
        x += jnp.roll(h, (self.shift, self.shift), (1, 2))
        return x + self.down(gelu_exact(self.up(self.norm_mlp(x))))


class Pair(nnx.Module):
    """A block without shifted windows, and one with."""

    def __init__(self, make: Callable[..., Block], shift: int, *, rngs: PathRngs):
        self.block_0 = make(0, rngs=rngs.at("block_0"))
        self.block_1 = make(shift, rngs=rngs.at("block_1"))

    def __call__(self, x):
        return self.block_1(self.block_0(x))


_INIT = nnx.initializers.truncated_normal(0.02)


def _names(config: SwinConfig, stage: int) -> list[str]:
    """Names of the blocks of a stage, or one for all of them stacked."""
    if config.scan:
        return [f"stage_{stage}"]
    return [f"stage_{stage}_block_{index}" for index in range(config.blocks[stage])]


def _image(x, side: int):
    """Undoes `modules.windows`."""
    window = math.isqrt(x.shape[1])
    x = x.reshape(-1, side // window, side // window, window, window, x.shape[-1])
    return x.swapaxes(2, 3).reshape(-1, side, side, x.shape[-1])


def _merged(x, patch: int):
    """Concatenates the features of `patch` times `patch` neighbours."""
    batch, side, _, width = x.shape
    rows = modules.windows(x, patch)
    return rows.reshape(batch, side // patch, side // patch, patch**2 * width)


def _offsets(window: int) -> np.ndarray:
    """i64[tokens, tokens]: the index of the offset between two tokens of a window."""
    places = np.stack(np.divmod(np.arange(window**2), window))
    down, right = places[:, :, None] - places[:, None] + window - 1
    return down * (2 * window - 1) + right


def _neighbours(side: int, window: int, shift: int) -> np.ndarray:
    """bool[windows, 1, tokens, tokens]: which tokens of a shifted window are neighbours.

    Tokens that a shift moved around the edge share a window with others, but are not neighbours.
    """
    part = np.digitize(np.arange(side), (side - window, side - shift))
    parts = 3 * part[:, None] + part
    tokens = modules.windows(parts[None, :, :, None], window)
    return (tokens == tokens.swapaxes(1, 2))[:, None]
