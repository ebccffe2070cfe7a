"""Residual convolutional networks for images, in Flax nnx."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from train import checks
from train.models.modules import PathRngs

_GROUPS, _LEAST = 32, 4  # most groups of a normalization, and least channels per group


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Size and compute dtype of the model; the defaults are ResNet-18's."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    """Blocks of each stage; each stage halves the image and doubles the channels of the last."""
    width: int = 64
    """Channels of the first stage."""
    stem: Literal["pooled", "plain"] = "pooled"
    """First layers: 7x7 and a pooling, which reduce each side to a quarter; or 3x3, for small
    images."""
    size: int = 224
    """Pixels of each side of an image."""
    channels: int = 3
    """Channels of an image: 3 colours, or 1."""
    classes: int = 1000
    """Number of classes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and convolutions."""

    def __post_init__(self):
        checks.require_types(self, "model.")
        checks.at_least(1, self, "width", "size", "channels", "classes", prefix="model.")
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"model.blocks={self.blocks} must be numbers from 1 up; write 2 2.")
        if self.width % _LEAST:
            raise ValueError(
                f"model.width={self.width} must be divisible by {_LEAST}, the least channels that "
                f"are normalized together; write --model.width "
                f"{_LEAST * max(1, round(self.width / _LEAST))}."
            )

    stacked = None  # as of `DecoderConfig`: no parameter has an axis of layers


class ResNet(nnx.Module):
    """A residual network of two-layer blocks, like ResNet-18 and ResNet-34; returns logits.

    He et al., "Deep Residual Learning for Image Recognition", 2016. Deviation: normalization is
    over groups of the channels of one image (Wu and He, "Group Normalization", 2018). Batch
    normalization would depend on the number of replicas, and its running statistics would drift
    apart between replicas unless they are exchanged too.

    Call with images f32[batch, size, size, channels]; returns logits f32[batch, classes].
    """

    def __init__(self, config: ResNetConfig, *, rngs: PathRngs):
        c = self.config = config
        size, stride = (7, 2) if c.stem == "pooled" else (3, 1)
        self.stem = _conv(c.channels, c.width, size, stride, c.dtype, rngs.at("stem"))
        self.norm = _norm(c.width, c.dtype, rngs.at("norm"))
        inputs = c.width
        for name, width in _blocks(c):
            setattr(self, name, Block(inputs, width, c.dtype, rngs=rngs.at(name)))
            inputs = width
        init = nnx.initializers.normal(0.01)
        self.head = nnx.Linear(inputs, c.classes, kernel_init=init, rngs=rngs.at("head"))

    def __call__(self, images_BxHxWxC):
        x = nnx.relu(self.norm(self.stem(images_BxHxWxC.astype(self.config.dtype))))
        if self.config.stem == "pooled":
            x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for name, _ in _blocks(self.config):
            x = getattr(self, name)(x)
        return self.head(jnp.mean(x, (1, 2), dtype=jnp.float32))


class Block(nnx.Module):
    """Two 3x3 convolutions with a residual connection, projected if the input is narrower.

    The projection halves the image.
    """

    def __init__(self, inputs: int, width: int, dtype: str, *, rngs: PathRngs):
        self.projects = inputs < width
        stride = 2 if self.projects else 1
        self.conv_0 = _conv(inputs, width, 3, stride, dtype, rngs.at("conv_0"))
        self.norm_0 = _norm(width, dtype, rngs.at("norm_0"))
        self.conv_1 = _conv(width, width, 3, 1, dtype, rngs.at("conv_1"))
        self.norm_1 = _norm(width, dtype, rngs.at("norm_1"))
        if self.projects:
            self.shortcut = _conv(inputs, width, 1, stride, dtype, rngs.at("shortcut"))
            self.norm_shortcut = _norm(width, dtype, rngs.at("norm_shortcut"))

    def __call__(self, x):
        h = self.norm_1(self.conv_1(nnx.relu(self.norm_0(self.conv_0(x)))))
        return nnx.relu(h + (self.norm_shortcut(self.shortcut(x)) if self.projects else x))


def _blocks(config: ResNetConfig) -> list[tuple[str, int]]:
    """Name and width of each block."""
    stages = enumerate(config.blocks)
    names = [(stage, f"stage_{stage}_block_{i}") for stage, count in stages for i in range(count)]
    return [(name, config.width << stage) for stage, name in names]


def _conv(inputs: int, width: int, size: int, stride: int, dtype: str, rngs: PathRngs):
    """A convolution without bias, which a normalization would remove again."""
    init = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
    options = {"padding": size // 2, "use_bias": False, "dtype": dtype, "kernel_init": init}
    return nnx.Conv(inputs, width, (size, size), (stride, stride), **options, rngs=rngs)


def _norm(width: int, dtype: str, rngs: PathRngs):
    # Groups of few channels lose an image's brightness: a single channel always has mean zero.
    groups = math.gcd(_GROUPS, width // _LEAST)
    return nnx.GroupNorm(width, groups, dtype=dtype, rngs=rngs)
