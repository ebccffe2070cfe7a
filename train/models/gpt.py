"""A transformer language model in Flax: GPT, or BERT's twin of it."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from train import checks

STACKED = "^blocks/"
"""Pattern of the paths of parameters that a scan over the blocks stacks."""


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


class Block(nn.Module):
    """Pre-norm transformer block: self-attention, then a four times wider perceptron.

    Features of all tokens are one matrix, N = batch * time rows: XLA:CPU multiplies matrices
    twice as fast as batches of them.
    """

    config: GPTConfig
    causal: bool = True

    @nn.compact
    def __call__(self, x_NxD, time: int):
        c, dtype = self.config, x_NxD.dtype
        init = nn.initializers.normal(0.02)
        out_init = nn.initializers.normal(0.02 / (2 * c.layers) ** 0.5)

        h_NxD = nn.LayerNorm(dtype=dtype, name="norm_attention")(x_NxD)
        qkv = nn.Dense(3 * c.width, dtype=dtype, kernel_init=init, name="qkv")(h_NxD)
        shape = (-1, time, c.heads, c.width // c.heads)
        q, k, v = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        h_NxD = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal).reshape(x_NxD.shape)
        x_NxD += nn.Dense(c.width, dtype=dtype, kernel_init=out_init, name="out")(h_NxD)

        h_NxD = nn.LayerNorm(dtype=dtype, name="norm_mlp")(x_NxD)
        h_NxF = nn.Dense(4 * c.width, dtype=dtype, kernel_init=init, name="up")(h_NxD)
        h_NxF = nn.gelu(h_NxF)
        return x_NxD + nn.Dense(c.width, dtype=dtype, kernel_init=out_init, name="down")(h_NxF)


class GPT(nn.Module):
    """Logits of a transformer with tied embeddings (GPT-2's form), of the next or the same token.

    With `causal=False` every position sees all others, as in BERT. Call with tokens
    i32[batch, time], time at most `config.context`; returns logits f32[batch, time, vocab].
    With `layers`, as `jaxcomp.QSDP.layers`, the parameters of the blocks are shards.
    """

    config: GPTConfig
    causal: bool = True
    layers: Callable | None = None

    @nn.compact
    def __call__(self, tokens_BxT):
        c = self.config
        batch, time = tokens_BxT.shape
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(c.vocab, c.width, embedding_init=init, name="embed")
        position = self.param("position", init, (c.context, c.width))
        x_BxTxD = embed(tokens_BxT) + position[None, :time]
        x_NxD = x_BxTxD.reshape(-1, c.width).astype(c.dtype)
        if c.scan and self.layers is None:
            x_NxD = scanned(Block(c, self.causal, name="blocks"), c.layers, x_NxD, time)
        elif self.layers is None:
            for index in range(c.layers):
                x_NxD = Block(c, self.causal, name=f"block_{index}")(x_NxD, time)
        else:
            block = Block(c, self.causal, parent=None)
            one = lambda params, x: block.apply({"params": params}, x, time)
            shards = self.variables["params"]
            names = [f"block_{index}" for index in range(c.layers)]
            blocks = shards["blocks"] if c.scan else [shards[name] for name in names]
            x_NxD = self.layers(one, c.dtype)(blocks, x_NxD)
        x_NxD = nn.LayerNorm(dtype=x_NxD.dtype, name="norm")(x_NxD)
        logits_NxV = x_NxD @ embed.embedding.astype(x_NxD.dtype).T
        return logits_NxV.reshape(batch, time, c.vocab).astype(jnp.float32)


def scanned(block: nn.Module, length: int, x, *args):
    """Runs so many blocks in turn, whose parameters lie behind each other in one array."""
    one = lambda block, x, _: (block(x, *args), None)
    rngs = {"params": True}
    scan = nn.scan(one, variable_axes={"params": 0}, split_rngs=rngs, length=length)
    return scan(block, x, None)[0]
