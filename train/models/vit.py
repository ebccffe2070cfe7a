"""A vision transformer in Flax nnx: GPT's blocks on patches of an image."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from train import checks
from train.models import modules
from train.models.decoder import INIT, Block, DecoderConfig
from train.models.modules import PathRngs


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Size and compute dtype of the model; the defaults are small."""

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
        checks.require_types(self, "model.")
        sizes = "layers", "width", "heads", "patch", "size", "channels", "classes"
        checks.at_least(1, self, *sizes, prefix="model.")
        checks.divisible(self, "width", "heads")
        checks.divisible(self, "size", "patch")

    stacked = None  # as in `DecoderConfig`: no parameter has an axis of layers


class ViT(nnx.Module):
    """A transformer on the patches of an image, which returns logits.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021. Deviation: the class comes from the
    mean over patches, without a class token, as in Beyer et al., "Better plain ViT baselines for
    ImageNet-1k", 2022.

    Call with images f32[batch, size, size, channels]; returns logits f32[batch, classes].
    """

    def __init__(self, config: ViTConfig, *, rngs: PathRngs):
        c = self.config = config
        self.time, pixels = (c.size // c.patch) ** 2, c.patch**2 * c.channels
        # Default initializer: the first layer's features have the scale of its inputs, one, not
        # 0.02.
        self.embed = nnx.Linear(pixels, c.width, dtype=c.dtype, rngs=rngs.at("embed"))
        self.position = nnx.Param(INIT(rngs.params(), (self.time, c.width), jnp.float32))
        self.names = tuple(f"block_{index}" for index in range(c.layers))
        blocks = DecoderConfig(layers=c.layers, width=c.width, heads=c.heads, dtype=c.dtype)
        for name in self.names:
            setattr(self, name, Block(blocks, causal=False, rngs=rngs.at(name)))
        self.norm = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs.at("norm"))
        self.head = nnx.Linear(c.width, c.classes, kernel_init=INIT, rngs=rngs.at("head"))

    def __call__(self, images_BxHxWxC):
        c, time = self.config, self.time
        patches_NxP = modules.windows(images_BxHxWxC, c.patch).reshape(-1, c.patch**2 * c.channels)
        x_NxD = self.embed(patches_NxP.astype(c.dtype))
        x_BxTxD = x_NxD.reshape(-1, time, c.width) + self.position[...].astype(c.dtype)[None]
        x_NxD = x_BxTxD.reshape(-1, c.width)
        for name in self.names:
            x_NxD = getattr(self, name)(x_NxD, time)
        x_NxD = self.norm(x_NxD)
        x_BxD = jnp.mean(x_NxD.reshape(-1, time, c.width), 1, dtype=jnp.float32)
        return self.head(x_BxD)
