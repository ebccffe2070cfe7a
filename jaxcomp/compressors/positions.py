"""Positions of the k entries of a row that are kept: as marks, or as indices of few bits.

The code of indices is that of P. Elias, "Efficient Storage and Retrieval by Content and Address of
Static Files", Journal of the ACM, 1974. The low bits of each index are sent as they are. The high
bits grow slowly from one index to the next: a one stands for the next index, a zero for a step of
the high bits. So 64 of 4,096 entries take 8 bits each; plain indices take 12, and no code can tell
all choices apart with fewer than 7.4. Of a few entries all bits are sent as they are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.largest import Largest, places_of, put_at
from jaxcomp.compressors.packing import pack, packed_size, unpack


def write(found: Largest) -> jax.Array:
    """Writes where k of the n entries of each row are, as bytes; `read` and `marks` undo it."""
    (rows, k), n = found.places.shape, found.marked.shape[1]
    if is_marks(n, k):
        return pack(found.marked.astype(jnp.uint8), 1)
    low, steps = _parts(n, k)
    dtype = jnp.uint8 if low <= 8 else jnp.uint32
    parts = [pack((found.places & (2**low - 1)).astype(dtype), low)] if low else []
    if steps:
        turns = (found.places >> low) + lax.iota(jnp.int32, k)[None]
        parts.append(pack(put_at(jnp.ones((rows, k), jnp.uint8), turns, k + steps), 1))
    return jnp.concatenate(parts)


def read(written: jax.Array, rows: int, n: int, k: int) -> jax.Array:
    """The positions of the kept entries of each row, in order: `i32[rows, k]`."""
    low, steps = _parts(n, k)
    end, places = packed_size(rows * k, low), jnp.zeros((rows, k), jnp.int32)
    if low:
        places = unpack(written[:end], low, rows * k).astype(jnp.int32).reshape(rows, k)
    if steps:
        turns = unpack(written[end:], 1, rows * (k + steps)).reshape(rows, k + steps) == 1
        places |= (places_of(turns, k) - lax.iota(jnp.int32, k)[None]) << low
    return places


def marks(written: jax.Array, rows: int, n: int) -> jax.Array:
    """Which entries of each row are kept, if `is_marks`: `bool[rows, n]`."""
    return unpack(written, 1, rows * n).reshape(rows, n) == 1


def is_marks(n: int, k: int) -> bool:
    """Whether each of the n entries has a bit: a faster code, taken unless the other halves it."""
    return 2 * _coded_bits(n, k) > n


def bits(n: int, k: int) -> int:
    """Bits for the positions of k of n entries."""
    return n if is_marks(n, k) else _coded_bits(n, k)


def _coded_bits(n, k):
    low, steps = _parts(n, k)
    return k * low + (k + steps if steps else 0)


def _parts(n, k):
    """Bits of the low parts, and how many high parts there are: none if the low ones are all."""
    whole = max(1, (n - 1).bit_length())
    split = [(k * (low + 1) + -(-n >> low), low) for low in reversed(range(whole))]
    least, low = min(split, key=lambda bits: bits[0])
    return (low, -(-n >> low)) if least < k * whole else (whole, 0)
