"""Positions of the k entries of a row that are kept: as marks, or as indices of few bits.

The code of indices is that of P. Elias, "Efficient Storage and Retrieval by Content and Address of
Static Files", Journal of the ACM, 1974. The low bits of each index are sent as they are. The high
bits grow slowly from one index to the next: a one stands for the next index, a zero for a step of
the high bits. So 64 of 4,096 entries take 8 bits each; plain indices take 12, and no code can tell
all choices apart with fewer than 7.4. Of a few entries all bits are sent as they are.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.largest import Largest
from jaxcomp.compressors.packing import pack, packed_size, slices_together, unpack

_WORD = 32
_FEW = 8  # words of a row that are all looked at; more are searched


def write(found: Largest) -> jax.Array:
    """Writes where k of the n entries of each row are, as bytes; `read` and `marks` undo it."""
    k, n = found.places.shape[1], found.marked.shape[1]
    if is_marks(n, k):
        return pack(found.marked.astype(jnp.uint8), 1)
    low, words = _parts(n, k)
    dtype = jnp.uint8 if low <= 8 else jnp.uint32
    parts = [pack((found.places & (2**low - 1)).astype(dtype), low)] if low else []
    if words:
        ones = _words_with_ones((found.places >> low) + _ranks(k), words)
        parts.append(lax.bitcast_convert_type(ones, jnp.uint8).reshape(-1))
    return jnp.concatenate(parts)


def read(written: jax.Array, rows: int, n: int, k: int) -> jax.Array:
    """The positions of the kept entries of each row, in order: `i32[rows, k]`."""
    low, words = _parts(n, k)
    end, places = packed_size(rows * k, low), jnp.zeros((rows, k), jnp.int32)
    if low:
        places = unpack(written[:end], low, rows * k).astype(jnp.int32).reshape(rows, k)
    if words:
        # Not a bitcast: a GPU would copy these bytes in a kernel of its own.
        ones = slices_together(written[end:].reshape(-1, 4).T, 8, 4, jnp.uint32)
        places |= (_places_of_ones(ones.reshape(rows, words), k) - _ranks(k)) << low
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
    low, words = _parts(n, k)
    return k * low + _WORD * words


def _parts(n, k):
    """Low bits of an index, and words for the high bits of a row: none if the low bits are all."""
    all_bits = max(1, (n - 1).bit_length())
    words = lambda low: -(-(k + -(-n >> low)) // _WORD)
    split = [(low, words(low)) for low in reversed(range(all_bits))]
    return min([(all_bits, 0), *split], key=lambda each: k * each[0] + _WORD * each[1])


def _ranks(k):
    return lax.iota(jnp.int32, k)[None]


def _words_with_ones(places, words):
    """Sets bits at different places of each row: `i32[rows, k] -> u32[rows, words]`."""
    word, bit = places // _WORD, jnp.uint32(1) << (places % _WORD).astype(jnp.uint32)
    if words <= _FEW:
        mine = word[:, None] == lax.broadcasted_iota(jnp.int32, (1, words, 1), 1)
        return jnp.sum(jnp.where(mine, bit[:, None], 0), axis=2, dtype=jnp.uint32)
    row = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    zeros = jnp.zeros((len(places), words), jnp.uint32)
    return zeros.at[row, word].add(bit, indices_are_sorted=True, mode="promise_in_bounds")


def _places_of_ones(words, k):
    """Undoes `_words_with_ones`, in the order of the places."""
    find = _by_looking if words.shape[1] <= _FEW else _by_searching
    number, word, before = find(words, lax.population_count(words).astype(jnp.int32), k)
    return _WORD * number + _places_in_words(word, _ranks(k) - before)


def _by_looking(words, count, k):
    """For each of the k ones its word's number, the word, and how many ones come before it."""
    number = before = total = jnp.zeros((1, 1), jnp.int32)
    word = words[:, :1]
    for i in range(1, words.shape[1]):
        total += count[:, i - 1 : i]
        is_later = _ranks(k) >= total
        number = jnp.where(is_later, i, number)
        word = jnp.where(is_later, words[:, i : i + 1], word)
        before = jnp.where(is_later, total, before)
    return number, word, before


def _by_searching(words, count, k):
    """As `_by_looking`, for many words."""
    total = jnp.cumsum(count, axis=1)
    search = partial(jnp.searchsorted, side="right", method="scan_unrolled")
    number = jax.vmap(search, (0, None))(total, _ranks(k)[0]).astype(jnp.int32)
    taken = partial(jnp.take_along_axis, indices=number, axis=1, mode="promise_in_bounds")
    return number, taken(words), taken(total - count)


def _places_in_words(word, rank):
    """The place of the one that has so many ones below it: `u32[...], i32[...] -> i32[...]`."""
    place = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        lower = (word >> place.astype(jnp.uint32)) & jnp.uint32(2**width - 1)
        ones = lax.population_count(lower).astype(jnp.int32)
        is_above = rank >= ones
        place = jnp.where(is_above, place + width, place)
        rank = jnp.where(is_above, rank - ones, rank)
    return place
