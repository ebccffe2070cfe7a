"""b-bit codes <-> bytes, and the counter-based hash that noise and masks are drawn from."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.platforms import LANES


def packed_size(count: int, bits: int) -> int:
    """Counts the bytes that `pack` makes of `count` codes of `bits` bits each."""
    return sum(-(-count * width // 8) for width in _widths(bits))


def pack(codes: jax.Array, bits: int) -> jax.Array:
    """Packs codes of 1 to 32 bits into `uint8[packed_size(codes.size, bits)]`.

    Codes are `uint8[...]` or, for more than 8 bits, `uint32[...]`, below `2**bits`. A width is
    split into parts of 8, 4, 2 and 1 bits, so that no code straddles bytes; each part is padded to
    a whole byte. The first slice of the codes takes the low bits, the next slice the bits above.
    XLA vectorizes operations on contiguous slices, but not on neighbours.
    """
    parts, shift = [], 0
    for width in _widths(bits):
        part = (codes.reshape(-1) >> shift).astype(jnp.uint8)
        parts.append(_pack_width(part, width))
        shift += width
    return jnp.concatenate(parts)


def unpack(packed: jax.Array, bits: int, count: int) -> jax.Array:
    """Undoes `pack`: `uint8[count]`, or `uint32[count]` for more than 8 bits."""
    dtype = jnp.uint8 if bits <= 8 else jnp.uint32
    parts, start, shift = [], 0, 0
    for width in _widths(bits):
        size = packed_size(count, width)
        part = _unpack_width(packed[start : start + size], width)[:count].astype(dtype)
        parts.append(part << shift)
        start, shift = start + size, shift + width
    return functools.reduce(operator.or_, parts)


def slices_together(x: jax.Array, width: int, slices: int, dtype=jnp.uint8) -> jax.Array:
    """Joins the slices of a flat array: slice i is shifted up by i times `width` bits.

    Maps `u[slices * n] -> dtype[n]`. `slices_apart` undoes it, with the bits of later slices above.
    """
    parts = [part.astype(dtype) << (i * width) for i, part in enumerate(_in_lanes(x, slices))]
    return functools.reduce(operator.or_, parts).reshape(-1)


def slices_apart(x: jax.Array, width: int, slices: int) -> jax.Array:
    """Shifts an array down by 0, `width`, 2 * `width` bits and so on: `u[n] -> u[slices * n]`."""
    parts = _in_lanes(x, 1)
    shifts = lax.iota(x.dtype, slices).reshape(-1, *(1,) * (parts.ndim - 1)) * width
    return (parts >> shifts).reshape(-1)


def _in_lanes(x, slices):
    """Cuts a flat array into slices: `[slices, rows, 128]` where that divides, or `[slices, n]`.

    A TPU keeps arrays in tiles of 128 lanes. The first shape is a view there, the second a copy.
    """
    count = x.size // slices
    return x.reshape(slices, *((count // LANES, LANES) if count % LANES == 0 else (count,)))


def fold(key: Key, *data: jax.Array | int) -> Key:
    """Derives another key: one whose seed is a hash of this one's and of every integer given.

    Integers may be arrays of no axis, as `lax.axis_index` returns; their order matters. Equal
    arguments give equal keys.
    """
    seed = _word(key.seed)
    for datum in data:
        seed = _hashed(seed, jnp.asarray(_word(datum)).astype(jnp.uint32))
    return key._replace(seed=_ended(seed))


def random_bits(key: Key, shape: tuple[int, ...]) -> jax.Array:
    """Hashes each index of an array with the key's seed into 32 bits.

    Counter-based, so XLA fuses it into its reader and writes no array of noise. Not for
    cryptography. Use `fold` to make keys for independent draws. The bits repeat after 2**32
    entries.
    """
    size, seed = math.prod(shape), _word(key.seed)
    # The seed enters twice: once would make two seeds' streams permutations of each other.
    first = _mix_start(lax.iota(jnp.uint32, size) ^ seed)
    return _mix_end(first + _mix(seed)).reshape(shape)


def _word(integer):
    return np.uint32(integer & 0xFFFFFFFF) if isinstance(integer, int) else integer


def uniform(key: Key, shape: tuple[int, ...] = ()) -> jax.Array:
    """Draws float32 values in [0, 1), multiples of 2**-24, from `random_bits`."""
    return (random_bits(key, shape) >> 8).astype(jnp.float32) * 2.0**-24


@jax.jit  # programs fold hundreds of keys: tracing each hash would take most of their tracing
def _hashed(seed, word):
    return _mix(_mix(seed + jnp.uint32(0x9E3779B9)) + word)


@jax.jit
def _ended(seed):
    # XLA does not fuse a sum into its readers. Without it LLVM does not finish on a long chain of
    # hashes.
    return jnp.sum(_mix(seed ^ lax.iota(jnp.uint32, 2)), dtype=jnp.uint32)


def _widths(bits):
    """Splits a width into parts that divide a byte: 13 is 8 + 4 + 1."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def _pack_width(codes, width):
    codes = codes & (2**width - 1)
    return slices_together(jnp.pad(codes, (0, -codes.size % (8 // width))), width, 8 // width)


def _unpack_width(packed, width):
    return slices_apart(packed, width, 8 // width) & (2**width - 1)


def _mix(x):
    return _mix_end(_mix_start(x))


def _mix_start(x):
    x = x ^ (x >> 16)
    x = x * jnp.uint32(0x21F0AAAD)
    return x ^ (x >> 15)


def _mix_end(x):
    x = x * jnp.uint32(0xD35A2D97)
    return x ^ (x >> 15)
