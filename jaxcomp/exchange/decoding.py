"""Decodes messages, one or those of all replicas, in the form that is fast on the platform.

XLA:CPU sums the rows of a matrix ten times as slowly as it adds arrays. A row that it looks up in a
loop takes 4 times as long as an array at 4 bits, so the loop carries the next message.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Compressor, Key
from jaxcomp.compressors.platforms import by_platform
from jaxcomp.exchange.messages import payload_like, unpack

# `message -> f32[...]`: what it decodes to.
Decode = Callable[[jax.Array], jax.Array]


def of(compressor: Compressor, shared: Key, numel: int, dtype: Any) -> Decode:
    """What decodes one message of a bucket of `numel` elements."""

    def decode(message):
        payload = unpack(message, payload_like(compressor, numel, dtype))
        return compressor.decode(payload, shared).astype(dtype)

    return decode


def mean(messages: jax.Array, decode: Decode) -> jax.Array:
    """The mean of what messages, one a row, decode to."""
    return total(messages, decode) / len(messages)


def total(messages: jax.Array, decode: Decode) -> jax.Array:
    """The sum of what messages, one a row, decode to; one pass, except on CPUs."""
    return by_platform(
        messages,
        cpu=lambda messages: total_in_turn(messages, decode),
        default=lambda messages: total_at_once(messages, decode),
    )


def total_in_turn(messages: jax.Array, decode: Decode) -> jax.Array:
    """`total` in a loop."""
    row = lambda i: lax.dynamic_index_in_dim(messages, i, keepdims=False)  # or the last one

    def add(i, total_and_message):
        total, message = total_and_message
        return total + decode(message), row(i + 1)

    return lax.fori_loop(1, messages.shape[0], add, (decode(row(0)), row(1)))[0]


def total_at_once(messages: jax.Array, decode: Decode) -> jax.Array:
    """`total` in one pass."""
    return jnp.sum(jax.vmap(decode)(messages), axis=0)
