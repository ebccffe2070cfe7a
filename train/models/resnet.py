"""Residual convolutional networks for images, in Flax."""

import dataclasses
import math
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from train import checks

_GROUPS, _LEAST = 32, 4  # groups of a normalization at most, and channels of each at least


@dataclasses.dataclass(frozen=True)
class ResNetConfig:
    """Size of the model and the type that it computes in; the defaults are ResNet-18's."""

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    """Blocks of each stage; each stage halves the image and doubles the channels of the last."""
    width: int = 64
    """Channels of the first stage."""
    stem: Literal["pooled", "plain"] = "pooled"
    """First layers: 7x7 and a pooling, that leave a quarter of each side; or 3x3, for images of few
    pixels."""
    size: int = 224
    """Pixels of each side of an image."""
    channels: int = 3
    """Channels of an image: 3 colours, or 1."""
    classes: int = 1000
    """Number of classes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and convolutions."""

    def __post_init__(self):
        checks.at_least(1, self, "width", "size", "channels", "classes", of="model.")
        if not self.blocks or min(self.blocks) < 1:
            raise ValueError(f"model.blocks={self.blocks} must be numbers from 1 up; write 2 2.")
        if self.width % _LEAST:
            raise ValueError(
                f"model.width={self.width} must be divisible by {_LEAST}, the least channels that "
                f"are normalized together; write --model.width "
                f"{_LEAST * max(1, round(self.width / _LEAST))}."
            )

    stacked = None  # as of `GPTConfig`: no parameter has an axis of layers


class ResNet(nn.Module):
    """Logits of a residual network of two-layer blocks, as ResNet-18 and ResNet-34.

    He et al., "Deep Residual Learning for Image Recognition", 2016. Deviation: normalization is
    over groups of the channels of one image (Wu and He, "Group Normalization", 2018). Over a batch
    it would depend on how many replicas share the batch, and its running statistics would be
    parameters without a gradient, that go apart on replicas unless they are exchanged as well.

    Call with images f32[batch, size, size, channels]; returns logits f32[batch, classes].
    """

    config: ResNetConfig

    @nn.compact
    def __call__(self, images_BxHxWxC):
        c = self.config
        x = images_BxHxWxC.astype(c.dtype)
        if c.stem == "pooled":
            x = nn.relu(_norm(_conv(x, c.width, 7, 2, "stem"), "norm"))
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        else:
            x = nn.relu(_norm(_conv(x, c.width, 3, 1, "stem"), "norm"))
        for stage, count in enumerate(c.blocks):
            for index in range(count):
                stride = 2 if stage and not index else 1
                x = Block(c.width << stage, stride, name=f"stage_{stage}_block_{index}")(x)
        x = jnp.mean(x, (1, 2), dtype=jnp.float32)
        return nn.Dense(c.classes, kernel_init=nn.initializers.normal(0.01), name="head")(x)


class Block(nn.Module):
    """Two 3x3 convolutions, and what they are added to: the input, projected where it must be."""

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        h = nn.relu(_norm(_conv(x, self.width, 3, self.stride, "conv_0"), "norm_0"))
        h = _norm(_conv(h, self.width, 3, 1, "conv_1"), "norm_1")
        if x.shape != h.shape:
            x = _norm(_conv(x, self.width, 1, self.stride, "shortcut"), "norm_shortcut")
        return nn.relu(x + h)


def _conv(x, width, size, stride, name):
    """A convolution without bias, that a normalization would take off again."""
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    return nn.Conv(
        width,
        (size, size),
        (stride, stride),
        padding=size // 2,
        use_bias=False,
        dtype=x.dtype,
        kernel_init=init,
        name=name,
    )(x)


def _norm(x, name):
    # Fewer channels together lose how bright an image is: a single one has always the mean zero.
    groups = math.gcd(_GROUPS, x.shape[-1] // _LEAST)
    return nn.GroupNorm(groups, dtype=x.dtype, name=name)(x)
