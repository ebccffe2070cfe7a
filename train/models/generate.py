"""Greedy text generation: the likeliest token at each step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def greedy(logits_of: Callable, prompt: jax.Array, count: int) -> jax.Array:
    """Appends the token with the largest logit to each row, `count` times.

    Recomputes all tokens for each new one, in one program: for short texts.

    Args:
      logits_of: i32[batch, time] -> f32[batch, time, vocab], a causal model.
      prompt: i32[batch, time], time at least 1.
      count: Tokens to append, at least 0.

    Returns:
      i32[batch, time + count].
    """
    first = prompt.shape[1]
    tokens = jnp.pad(jnp.asarray(prompt, jnp.int32), ((0, 0), (0, count)))

    def appended(place, tokens):
        logits_BxV = jax.lax.dynamic_index_in_dim(logits_of(tokens), place - 1, 1, keepdims=False)
        token_Bx1 = jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)[:, None]
        return jax.lax.dynamic_update_slice_in_dim(tokens, token_Bx1, place, 1)

    return jax.lax.fori_loop(first, first + count, appended, tokens)
