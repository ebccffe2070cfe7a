"""A transformer language model in Flax nnx: GPT, or BERT's twin of it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from train import checks
from train.models import modules
from train.models.modules import PathRngs

STACKED = "^blocks/"
"""Pattern of the paths of parameters that a scan over the blocks stacks."""
INIT = nnx.initializers.normal(0.02)
"""Of weights, and of positions."""


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Size of the model and the type that it computes in; parameters are float32."""

    layers: int = 4
    """Number of transformer blocks."""
    width: int = 128
    """Features of the residual stream; divisible by heads."""
    heads: int = 4
    """Attention heads of a block."""
    context: int = 128
    """Tokens that one prediction may look back on."""
    vocab: int = 256
    """Number of different tokens: 256 for bytes, 257 with one that hides a byte."""
    dtype: str = "float32"
    """Type of activations and matrix products: float32 or bfloat16."""
    scan: bool = False
    """Whether one program runs all blocks in turn, that compiles as fast as one of them. Parameters
    then have other names and a leading axis of layers; methods look at one layer all the same."""

    def __post_init__(self):
        sizes = "layers", "width", "heads", "context", "vocab"
        checks.at_least(1, self, *sizes, of="model.")
        checks.divisible(self, "width", "heads")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"model.dtype is {self.dtype!r}; write float32 or bfloat16.")

    @property
    def stacked(self) -> str | None:
        """Pattern of the paths whose first axis counts layers, see `jaxcomp.per_layer`; or None."""
        return STACKED if self.scan else None


class Block(nnx.Module):
    """Pre-norm transformer block: self-attention, then a four times wider perceptron.

    Features of all tokens are one matrix, N = batch * time rows: XLA:CPU multiplies matrices
    twice as fast as batches of them.
    """

    def __init__(self, config: Any, causal: bool, *, rngs: PathRngs):
        width, self.heads, self.causal = config.width, config.heads, causal
        linear = functools.partial(nnx.Linear, dtype=config.dtype, kernel_init=INIT)
        norm = functools.partial(nnx.LayerNorm, width, dtype=config.dtype)
        out_init = nnx.initializers.normal(0.02 / (2 * config.layers) ** 0.5)
        self.norm_attention = norm(rngs=rngs.at("norm_attention"))
        self.qkv = linear(width, 3 * width, rngs=rngs.at("qkv"))
        self.out = linear(width, width, kernel_init=out_init, rngs=rngs.at("out"))
        self.norm_mlp = norm(rngs=rngs.at("norm_mlp"))
        self.up = linear(width, 4 * width, rngs=rngs.at("up"))
        self.down = linear(4 * width, width, kernel_init=out_init, rngs=rngs.at("down"))

    def __call__(self, x_NxD, time: int):
        qkv = self.qkv(self.norm_attention(x_NxD))
        shape = (-1, time, self.heads, x_NxD.shape[-1] // self.heads)
        q, k, v = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        h_NxD = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal).reshape(x_NxD.shape)
        x_NxD += self.out(h_NxD)
        return x_NxD + self.down(nnx.gelu(self.up(self.norm_mlp(x_NxD))))


class GPT(nnx.Module):
    """Logits of a transformer with tied embeddings (GPT-2's form), of the next or the same token.

    With `causal=False` every position sees all others, as in BERT. Call with tokens
    i32[batch, time], time at most `config.context`; returns logits f32[batch, time, vocab].
    With `layers`, as `jaxcomp.QSDP.layers`, the parameters of the blocks may be shards.
    """

    def __init__(self, config: GPTConfig, *, causal: bool = True, rngs: PathRngs):
        c = self.config = config
        self.embed = nnx.Embed(c.vocab, c.width, embedding_init=INIT, rngs=rngs.at("embed"))
        self.position = nnx.Param(INIT(rngs.params(), (c.context, c.width)))
        block = functools.partial(Block, c, causal)
        self.names = tuple(f"block_{index}" for index in range(c.layers))
        if c.scan:
            self.blocks = modules.stacked(block, self.names, rngs)
        else:
            for name in self.names:
                setattr(self, name, block(rngs=rngs.at(name)))
        self.norm = nnx.LayerNorm(c.width, dtype=c.dtype, rngs=rngs.at("norm"))

    def __call__(self, tokens_BxT, *, layers: Callable = modules.in_turn):
        c = self.config
        batch, time = tokens_BxT.shape
        x_BxTxD = self.embed(tokens_BxT) + self.position[None, :time]
        x_NxD = x_BxTxD.reshape(-1, c.width).astype(c.dtype)
        blocks = self.blocks if c.scan else [getattr(self, name) for name in self.names]
        x_NxD = self.norm(modules.run(blocks, x_NxD, time, layers=layers))
        logits_NxV = x_NxD @ self.embed.embedding[...].astype(x_NxD.dtype).T
        return logits_NxV.reshape(batch, time, c.vocab).astype(jnp.float32)
