"""A vision transformer in Flax: GPT's blocks over patches of an image."""

import dataclasses
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp

from train import checks
from train.models.gpt import Block


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Size of the model and the type that it computes in; the defaults are small ones."""

    layers: int = 4
    """Number of transformer blocks."""
    width: int = 64
    """Features of the residual stream; divisible by heads."""
    heads: int = 4
    """Attention heads of a block."""
    patch: int = 2
    """Pixels of each side of a patch; the image's size is divisible by it."""
    size: int = 8
    """Pixels of each side of an image."""
    channels: int = 1
    """Channels of an image: 3 colours, or 1."""
    classes: int = 10
    """Number of classes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products."""

    def __post_init__(self):
        sizes = "layers", "width", "heads", "patch", "size", "channels", "classes"
        checks.at_least(1, self, *sizes, of="model.")
        checks.divisible(self, "width", "heads")
        checks.divisible(self, "size", "patch")

    stacked = None  # as of `GPTConfig`: no parameter has an axis of layers


class ViT(nn.Module):
    """Logits of a transformer that sees an image as a row of patches.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021. Deviation: the class is read from
    the mean over patches, without a token of its own, as in Beyer et al., "Better plain ViT
    baselines for ImageNet-1k", 2022.

    Call with images f32[batch, size, size, channels]; returns logits f32[batch, classes].
    """

    config: ViTConfig

    @nn.compact
    def __call__(self, images_BxHxWxC):
        c = self.config
        side, time = c.size // c.patch, (c.size // c.patch) ** 2
        patches = images_BxHxWxC.reshape(-1, side, c.patch, side, c.patch, c.channels)
        patches_NxP = patches.swapaxes(2, 3).reshape(-1, c.patch**2 * c.channels)
        init = nn.initializers.normal(0.02)
        # The first layer's features are as large as its inputs, of size one, and not 0.02 of them.
        x_NxD = nn.Dense(c.width, dtype=c.dtype, name="embed")(patches_NxP.astype(c.dtype))
        position = self.param("position", init, (time, c.width))
        x_BxTxD = x_NxD.reshape(-1, time, c.width) + position.astype(c.dtype)[None]
        x_NxD = x_BxTxD.reshape(-1, c.width)
        for index in range(c.layers):
            x_NxD = Block(c, causal=False, name=f"block_{index}")(x_NxD, time)
        x_NxD = nn.LayerNorm(dtype=x_NxD.dtype, name="norm")(x_NxD)
        x_BxD = jnp.mean(x_NxD.reshape(-1, time, c.width), 1, dtype=jnp.float32)
        return nn.Dense(c.classes, kernel_init=init, name="head")(x_BxD)
