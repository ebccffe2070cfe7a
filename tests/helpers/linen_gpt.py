"""GPT in Flax linen: what the nnx model is compared with, as it was before."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    layers: int
    heads: int

    @nn.compact
    def __call__(self, x, time):
        width = x.shape[-1]
        init = nn.initializers.normal(0.02)
        out_init = nn.initializers.normal(0.02 / (2 * self.layers) ** 0.5)
        h = nn.LayerNorm(name="norm_attention")(x)
        qkv = nn.Dense(3 * width, kernel_init=init, name="qkv")(h)
        shape = (-1, time, self.heads, width // self.heads)
        q, k, v = (part.reshape(shape) for part in jnp.split(qkv, 3, axis=-1))
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x += nn.Dense(width, kernel_init=out_init, name="out")(h)
        h = nn.Dense(4 * width, kernel_init=init, name="up")(nn.LayerNorm(name="norm_mlp")(x))
        return x + nn.Dense(width, kernel_init=out_init, name="down")(nn.gelu(h))


class GPT(nn.Module):
    layers: int
    width: int
    heads: int
    context: int
    vocab: int = 256

    @nn.compact
    def __call__(self, tokens):
        batch, time = tokens.shape
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab, self.width, embedding_init=init, name="embed")
        position = self.param("position", init, (self.context, self.width))
        x = (embed(tokens) + position[None, :time]).reshape(-1, self.width)
        for index in range(self.layers):
            x = Block(self.layers, self.heads, name=f"block_{index}")(x, time)
        x = nn.LayerNorm(name="norm")(x)
        return (x @ embed.embedding.T).reshape(batch, time, self.vocab)
