"""Turns each payload into one message, for any compressor: an array of bytes, or of 32-bit words.

On CPUs it is bytes: LLVM does not vectorize most loops that find a byte in a word. On other
platforms it is words: rows of 4 bytes would fill 4 of a TPU's 128 lanes.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Compressor, Key, Payload
from jaxcomp.compressors.packing import slices_apart, slices_together
from jaxcomp.compressors.platforms import platform

_UNIT = 16  # messages are padded to this many bytes: one load of a link or GPU


def message_of(payload: Payload) -> jax.Array:
    """Concatenates the leaves of a payload in one message: `u8[bytes]` on CPUs, else `u32[words]`.

    Each leaf begins at a multiple of 4 bytes, the message ends at a multiple of 16. The order of
    bytes within a leaf depends on the platform, so all replicas must be of one platform.
    """
    return bytes_of(payload) if platform() == "cpu" else words_of(payload)


def payload_of(message: jax.Array, like: Payload) -> Payload:
    """Cuts a message into a payload of the shapes and dtypes of `like`."""
    return _cut(message, like, _cast_apart if message.dtype == jnp.uint8 else _shifted_apart)


def message_bytes(compressor: Compressor, numel: int, dtype=jnp.float32) -> int:
    """Bytes of the message that a bucket of `numel` elements becomes."""
    words = sum(map(_num_words, jax.tree.leaves(payload_like(compressor, numel, dtype))))
    return 4 * words + -4 * words % _UNIT


@functools.lru_cache(maxsize=256)
def payload_like(compressor: Compressor, numel: int, dtype=jnp.float32) -> Payload:
    """The shapes and dtypes of the payload that a bucket becomes."""
    key = Key(jnp.int32(0), jnp.uint32(0))
    x = jax.ShapeDtypeStruct((numel,), dtype)
    return jax.eval_shape(lambda x: compressor.encode(x, key, key), x)


def words_of(payload: Payload) -> jax.Array:
    """`message_of` in `u32[words]`."""
    return _concatenated([_shifted_together(leaf) for leaf in jax.tree.leaves(payload)])


def bytes_of(payload: Payload) -> jax.Array:
    """`message_of` in `u8[bytes]`."""
    return _concatenated([_cast_together(leaf) for leaf in jax.tree.leaves(payload)])


def _concatenated(parts):
    padding = -sum(part.nbytes for part in parts) % _UNIT
    parts = [*parts, jnp.zeros(padding // parts[0].itemsize, parts[0].dtype)] if padding else parts
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def _cut(message, like, apart):
    leaves, start = [], 0
    for leaf in jax.tree.leaves(like):
        size = 4 * _num_words(leaf) // message.itemsize
        leaves.append(apart(message[start : start + size], leaf).reshape(leaf.shape))
        start += size
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _num_words(leaf) -> int:
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
    """The bytes of a leaf, padded to whole words."""
    flat = lax.bitcast_convert_type(leaf.reshape(-1), jnp.uint8).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % 4))


def _cast_apart(message, leaf):
    width, size = jnp.dtype(leaf.dtype).itemsize, math.prod(leaf.shape)
    rows = message[: size * width].reshape((size, width) if width > 1 else (size,))
    return lax.bitcast_convert_type(rows, leaf.dtype)


def _unsigned(width: int):
    return jnp.dtype(f"uint{8 * width}")
