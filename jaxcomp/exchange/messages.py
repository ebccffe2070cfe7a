"""Turns each payload into one message, and back: an array of bytes, or of 32-bit words.

On CPUs it is bytes: LLVM does not vectorize most loops that find a byte in a word. On other
platforms it is words: rows of 4 bytes would fill 4 of a TPU's 128 lanes.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._printing import array
from jaxcomp.compressors.base import Compressor, Key, Payload
from jaxcomp.compressors.packing import fold, slices_apart, slices_together
from jaxcomp.compressors.platforms import LANES, platform

_UNIT = 16  # messages are padded to this many bytes: one load of a link or GPU
_TPU_UNIT = 4 * LANES  # XLA makes an all-reduce, of twice the bytes, of another all-gather


def message_of(payload: Payload) -> jax.Array:
    """Concatenates the leaves of a payload in one message: `u8[bytes]` on CPUs, else `u32[words]`.

    Each leaf begins at a multiple of 4 bytes, the message ends at a multiple of 16, on TPUs of
    512. The order of bytes within a leaf depends on the platform, so all replicas must be of one.
    """
    return bytes_of(payload) if platform() == "cpu" else words_of(payload)


def payload_of(message: jax.Array, like: Payload) -> Payload:
    """Cuts a message into a payload of the shapes and dtypes of `like`."""
    return _cut(message, like, _cast_apart if message.dtype == jnp.uint8 else _shifted_apart)


def message_bytes(compressor: Compressor, numel: int) -> int:
    """Bytes of the message that a bucket of `numel` float32 elements becomes."""
    words = sum(map(_num_words, jax.tree.leaves(payload_like(compressor, numel))))
    return 4 * words + -4 * words % _unit()


@functools.lru_cache(maxsize=256)
def payload_like(compressor: Compressor, numel: int, dtype=jnp.float32) -> Payload:
    """The shapes and dtypes of the payload that a bucket becomes."""
    key = Key(jnp.int32(0), jnp.uint32(0))
    x = jax.ShapeDtypeStruct((numel,), dtype)
    return jax.eval_shape(lambda x: compressor.encode(x, key, key), x)


class Transmission(NamedTuple):
    """What `transmit` returns."""

    message: jax.Array  # what is sent: u8[bytes] on CPUs, u32[words] elsewhere
    decoded: jax.Array  # f32 of the array's shape, what a receiver gets
    bits_per_parameter: float  # of the message
    error: float  # |x - decoded|^2 / |x|^2; 0 for an array of zeros that decodes to zeros

    def __repr__(self) -> str:
        fields = (f"{name}={array(value)}" for name, value in self._asdict().items())
        return f"Transmission({', '.join(fields)})"


def transmit(compressor: Compressor, x: jax.Array, *, seed: int = 0) -> Transmission:
    """Encodes an array as one bucket and decodes the message again; needs no network.

    Use it to compare codes on real gradients. On independent normal values, no code of b bits
    per parameter has an expected error below 4**-b.

    Args:
      compressor: Any code.
      x: Floating array of any shape, with at least one element.
      seed: Seed of masks, shifts and stochastic rounding.

    Returns:
      The `Transmission`.

    Raises:
      ValueError: If the array is not floating or has no elements.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxcomp
      >>> sent = jaxcomp.transmit(jaxcomp.sign(), jnp.array([3.0, -3.0] * 512))
      >>> sent.message.shape, sent.bits_per_parameter, sent.error
      ((144,), 1.125, 0.0)

    References:
      T. M. Cover, J. A. Thomas, "Elements of Information Theory", 2nd edition, 2006, theorem
      10.3.2, for the bound.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
        raise ValueError(
            f"transmit got {x.dtype}{list(x.shape)}; needs floating numbers, at least one; write "
            "x.astype('float32')."
        )
    message, decoded, error = _transmit(compressor, x.astype(jnp.float32), jnp.uint32(seed))
    return Transmission(message, decoded, 8 * message.nbytes / x.size, float(error))


@functools.partial(jax.jit, static_argnums=0)
def _transmit(compressor, x, seed):
    shared = Key(jnp.int32(0), seed)
    payload = compressor.encode(x.reshape(-1), shared, fold(shared, 1))
    message = message_of(payload)
    decoded = compressor.decode(payload_of(message, payload), shared).reshape(x.shape)
    lost, norm = jnp.sum(jnp.square(x - decoded)), jnp.sum(jnp.square(x))
    return message, decoded, lost / jnp.where(norm > 0, norm, 1)


def words_of(payload: Payload) -> jax.Array:
    """`message_of` in `u32[words]`."""
    return _concatenated([_shifted_together(leaf) for leaf in jax.tree.leaves(payload)], _unit())


def bytes_of(payload: Payload) -> jax.Array:
    """`message_of` in `u8[bytes]`, of the same length on all platforms."""
    return _concatenated([_cast_together(leaf) for leaf in jax.tree.leaves(payload)], _UNIT)


def _unit():
    return _TPU_UNIT if platform() == "tpu" else _UNIT


def _concatenated(parts, unit):
    padding = -sum(part.nbytes for part in parts) % unit
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
