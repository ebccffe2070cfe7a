"""Turns each payload into one message, an array of 32-bit words, for any compressor."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Compressor, Key, Payload
from jaxcomp.compressors.packing import slices_apart, slices_together
from jaxcomp.compressors.platforms import by_platform

_UNIT = 4  # messages are padded to this many words: 16 bytes, one load of a link or GPU


def pack(payload: Payload) -> jax.Array:
    """Concatenates the leaves of a payload in one message, `u32[words]`.

    Each leaf begins with a new word; the message ends at a multiple of 16 bytes. The order of bytes
    within a leaf depends on the platform, so all replicas must be of one platform.
    """
    return by_platform(payload, cpu=pack_bytes, default=pack_words)


def unpack(message: jax.Array, like: Payload) -> Payload:
    """Cuts a message, `u32[words]`, into a payload of the shapes and dtypes of `like`."""
    cut = lambda form: lambda message: form(message, like)
    return by_platform(message, cpu=cut(unpack_bytes), default=cut(unpack_words))


def message_bytes(compressor: Compressor, numel: int, dtype=jnp.float32) -> int:
    """Bytes of the message that a bucket of `numel` elements becomes."""
    words = sum(_words_of(leaf) for leaf in jax.tree.leaves(payload_like(compressor, numel, dtype)))
    return 4 * (words + -words % _UNIT)


@functools.lru_cache(maxsize=256)
def payload_like(compressor: Compressor, numel: int, dtype=jnp.float32) -> Payload:
    """The shapes and dtypes of the payload that a bucket becomes."""
    key = Key(jnp.int32(0), jnp.uint32(0))
    x = jax.ShapeDtypeStruct((numel,), dtype)
    return jax.eval_shape(lambda x: compressor.encode(x, key, key), x)


def pack_words(payload: Payload) -> jax.Array:
    """`pack` with shifts of whole slices: bit-casts of 4-byte rows would fill 4 lanes of 128."""
    return _joined([_shifted_together(leaf) for leaf in jax.tree.leaves(payload)])


def unpack_words(message: jax.Array, like: Payload) -> Payload:
    """Undoes `pack_words`."""
    return _cut(message, like, _shifted_apart)


def pack_bytes(payload: Payload) -> jax.Array:
    """`pack` with bit-casts, which cost a CPU nothing."""
    return _joined([_cast_together(leaf) for leaf in jax.tree.leaves(payload)])


def unpack_bytes(message: jax.Array, like: Payload) -> Payload:
    """Undoes `pack_bytes`."""
    return _cut(message, like, _cast_apart)


def _joined(parts):
    padding = -sum(part.size for part in parts) % _UNIT
    parts = [*parts, jnp.zeros(padding, jnp.uint32)] if padding else parts
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _cut(message, like, apart):
    leaves, start = [], 0
    for leaf in jax.tree.leaves(like):
        words = message[start : start + _words_of(leaf)]
        leaves.append(apart(words, leaf).reshape(leaf.shape))
        start += words.size
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _words_of(leaf) -> int:
    return -(-math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize // 4)


def _shifted_together(leaf):
    """The bytes of a leaf as `u32[words]`: the first slice takes the low bits of all words."""
    width = jnp.dtype(leaf.dtype).itemsize
    if width >= 4:
        return lax.bitcast_convert_type(leaf.reshape(-1), jnp.uint32).reshape(-1)
    bits = lax.bitcast_convert_type(leaf.reshape(-1), _unsigned(width))
    bits = jnp.pad(bits, (0, -bits.size % (4 // width)))
    return slices_together(bits, 8 * width, 4 // width, jnp.uint32)


def _shifted_apart(words, leaf):
    width, size = jnp.dtype(leaf.dtype).itemsize, math.prod(leaf.shape)
    if width >= 4:
        words = words.reshape(-1, width // 4) if width > 4 else words
        return lax.bitcast_convert_type(words, leaf.dtype)
    bits = slices_apart(words, 8 * width, 4 // width).astype(_unsigned(width))
    return lax.bitcast_convert_type(bits[:size], leaf.dtype)


def _cast_together(leaf):
    width = jnp.dtype(leaf.dtype).itemsize
    if width >= 4:
        return _shifted_together(leaf)
    flat = leaf.reshape(-1)
    rows = jnp.pad(flat, (0, -flat.size % (4 // width))).reshape(-1, 4 // width)
    return lax.bitcast_convert_type(rows, jnp.uint32)


def _cast_apart(words, leaf):
    width = jnp.dtype(leaf.dtype).itemsize
    if width >= 4:
        return _shifted_apart(words, leaf)
    return lax.bitcast_convert_type(words, leaf.dtype).reshape(-1)[: math.prod(leaf.shape)]


def _unsigned(width: int):
    return jnp.dtype(f"uint{8 * width}")
