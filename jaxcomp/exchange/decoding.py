"""Decodes messages, one or those of all replicas, in the form that is fast on the platform.

XLA:CPU needs loops over messages. It sums the rows of a matrix ten times as slowly as it adds
arrays, and decodes rows again in the loop of each leaf that reads them. A row that it looks up in a
loop takes 4 times as long as an array at 4 bits, so the loops carry the next message.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Compressor, Key
from jaxcomp.compressors.platforms import LANES, by_platform
from jaxcomp.exchange.messages import payload_like, payload_of
from jaxcomp.replicas.types import zeros_of

# `message -> f32[...]`: what it decodes to.
Decode = Callable[[jax.Array], jax.Array]


def decoder(compressor: Compressor, shared: Key, numel: int, dtype: Any) -> Decode:
    """What decodes one message of a bucket of `numel` elements."""

    def decode(message):
        payload = payload_of(message, payload_like(compressor, numel, dtype))
        return compressor.decode(payload, shared).astype(dtype)

    return decode


def rows(messages: Any, decode: Callable[[Any], jax.Array]) -> jax.Array:
    """What messages, or parts of them, decode to: one a row, one after the other in one array."""
    same = lambda rows: rows
    decoded = jax.vmap(decode)(messages)
    return by_platform(decoded, cpu=same, gpu=same, default=_written).reshape(-1)


def _written(rows):
    """The rows in a TPU's lanes, written once.

    XLA:TPU would write each block's scale for each of its entries, and not fuse what decodes them
    into the lines of a bucket.
    """
    lanes = LANES if rows.size % LANES == 0 else rows.shape[-1]
    return lax.optimization_barrier(rows.reshape(-1, lanes)).reshape(rows.shape)


def rows_once(messages: jax.Array, decode: Decode) -> jax.Array:
    """`rows`, but CPUs decode once for all readers, into an array of their own."""
    return by_platform(
        messages,
        cpu=lambda messages: rows_in_turn(messages, decode),
        default=lambda messages: rows(messages, decode),
    )


def rows_in_turn(messages: jax.Array, decode: Decode) -> jax.Array:
    """`rows` in a loop."""
    put = lambda i, rows, message: lax.dynamic_update_index_in_dim(rows, decode(message), i, axis=0)
    nothing = zeros_of(jax.eval_shape(jax.vmap(decode), messages))
    return _in_turn(messages, 0, nothing, put).reshape(-1)


def mean(messages: jax.Array, decode: Decode) -> jax.Array:
    """The mean of what messages, one a row, decode to."""
    return total(messages, decode) / len(messages)


def total(messages: jax.Array, decode: Callable[[jax.Array], Any]) -> Any:
    """The sum of what messages, one a row, decode to, arrays or trees; one pass, except on CPUs."""
    return by_platform(
        messages,
        cpu=lambda messages: total_in_turn(messages, decode),
        default=lambda messages: total_at_once(messages, decode),
    )


def total_in_turn(messages: jax.Array, decode: Callable[[jax.Array], Any]) -> Any:
    """`total` in a loop."""
    add = lambda i, total, message: jax.tree.map(jnp.add, total, decode(message))
    return _in_turn(messages, 1, decode(messages[0]), add)


def total_at_once(messages: jax.Array, decode: Callable[[jax.Array], Any]) -> Any:
    """`total` in one pass."""
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.vmap(decode)(messages))


def total_of_all(
    messages: jax.Array,
    compressor: Compressor,
    shared: Key,
    like: jax.Array,
    function: Callable[[jax.Array], Any] = lambda values: values,
) -> Any:
    """The sum of `function(values)` over messages, one a row, each of a bucket as `like`.

    The function takes any values of a bucket, and keeps zeros. Entries that a message lists are
    added to the sum in place, so that memory does not grow with the replicas; not on TPUs, which
    would move a tile for each.
    """
    decode = decoder(compressor, shared, like.size, like.dtype)
    at_once = lambda messages: total(messages, lambda message: function(decode(message)))

    def entries(message):
        if compressor.entries is None:
            return None
        payload = payload_of(message, payload_like(compressor, like.size, like.dtype))
        return compressor.entries(payload, shared)

    if jax.eval_shape(entries, messages[0]) is None:
        return at_once(messages)

    def add(total, message):
        values, places = entries(message)
        put = lambda total, values: total.at[places].add(values, mode="drop", unique_indices=True)
        return jax.tree.map(put, total, function(values.astype(like.dtype))), None

    def in_place(messages):
        nothing = jax.tree.map(zeros_of, jax.eval_shape(at_once, messages))
        return lax.scan(add, nothing, messages)[0]

    return by_platform(messages, cpu=in_place, gpu=in_place, default=at_once)


def _in_turn(messages, start, value, step):
    """Applies `value = step(i, value, message)` to the messages from number `start` on."""
    row = lambda i: lax.dynamic_index_in_dim(messages, i, keepdims=False)  # or the last one

    def body(i, value_and_message):
        value, message = value_and_message
        return step(i, value, message), row(i + 1)

    return lax.fori_loop(start, messages.shape[0], body, (value, row(start)))[0]
