"""The k entries of largest magnitude of each row: finds them, takes them out, and puts them back.

Each platform has forms of its own, and all return the same bits. To find the threshold, a CPU
bisects, in a fifth of the time of `jax.lax.top_k`. On accelerators such a loop would wait for the
host in each round. A GPU finds it bit by bit, in one kernel that keeps the row. GPUs before Ampere
cannot, and sort short rows. A TPU compares all pairs of short rows, and sorts rows of up to 4,096.
Longer rows are read once for each four bits.

To move entries, a CPU numbers those of long rows with a running sum, and moves them one by one. In
short rows each place computes where to read, from the ones in words of 32 marks. In long rows of a
GPU each entry writes its place at its rank. A TPU would move a whole tile for each entry: it
compares all places of a short row with each other, in one fused sum, and sorts rows of up to 4,096.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.compressors.platforms import by_platform, fuses_rows

SHORT = 256  # most entries of a row whose places are all compared with each other
SORTED = 4096  # most entries of a row that is sorted
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
_WORD = 32
ONE_KERNEL = 16384  # most entries of a row that a GPU keeps in one kernel
_DIGIT = 4  # bits of the threshold that a pass finds, by counting at 15 values


class Largest(NamedTuple):
    """The k entries of largest magnitude of each row; a compiler drops what is not used."""

    marked: jax.Array  # bool[rows, n], which they are
    places: jax.Array  # i32[rows, k], where they are, in order
    values: jax.Array  # [rows, k], in the order of their places


Form = Callable[..., Largest]  # of x and k


def find_largest(x: jax.Array, k: int) -> Largest:
    """Finds the k entries of largest magnitude of each row of `[rows, n]`.

    Ties go to the first entries. NaN counts as larger than any number. k is from 1 to n.
    """
    n = x.shape[1]
    forms = {"cpu": for_cpu(n), "gpu": for_gpu(n), "default": for_tpu(n)}
    return by_platform(x, **{name: partial(form, k=k) for name, form in forms.items()})


def for_cpu(n: int) -> Form:
    """The form of `find_largest` for a CPU and rows of n entries."""
    if n <= SHORT:
        return partial(_placed, by_halving)
    return partial(_moved, by_halving, taken_in_turn)


def for_gpu(n: int) -> Form:
    """The form for a GPU."""
    marks = by_sorting if n <= SHORT else by_digits
    if n <= ONE_KERNEL and fuses_rows():
        marks = by_bits
    # Without the barrier each pass would compute the entries again.
    return lambda x, k: _placed(marks, lax.optimization_barrier(x), k)


def for_tpu(n: int) -> Form:
    """The form for a TPU, and for platforms that are not known."""
    if n <= SHORT:
        return partial(_moved, by_comparing, taken_by_comparing)
    return sorted_together if n <= SORTED else partial(_moved, by_digits, taken_by_moving)


def sorted_together(x: jax.Array, k: int) -> Largest:
    """`find_largest` by sorting; values move along, since a TPU gathers a tile for each."""
    size = _size(x)
    order = _order(size, x)
    first = (order[1][:, :k].astype(jnp.int32), order[2][:, :k])
    places, values = lax.sort(first, dimension=1, is_stable=False, num_keys=1)
    return Largest(_first_of(order, size, k), places, values)


def _moved(marks, take, x, k):
    """`find_largest` by a form that marks entries, and one that takes the marked ones."""
    marked = marks(_size(x), k)
    place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return Largest(marked, take(place, marked, k), take(x, marked, k))


def _placed(marks, x, k):
    """`find_largest` by a form that marks entries, whose places are found before their values."""
    marked = marks(_size(x), k)
    places = places_by_words(marked, k) if x.shape[1] <= SHORT else places_by_ranks(marked, k)
    return Largest(marked, places, jnp.take_along_axis(x, places, axis=1, mode="promise_in_bounds"))


def _size(x):
    return lax.bitcast_convert_type(jnp.abs(x), UNSIGNED[x.dtype.itemsize])


def by_comparing(size: jax.Array, k: int) -> jax.Array:
    """Marks entries of short rows before which fewer than k come: `u[rows, n] -> bool[rows, n]`."""
    mine, others = size[:, :, None], size[:, None, :]
    place, other = (lax.broadcasted_iota(jnp.int32, (1, *2 * size.shape[1:]), i) for i in (1, 2))
    before = (others > mine) | ((others == mine) & (other < place))
    return jnp.sum(before, axis=2, dtype=jnp.int32) < k


def by_sorting(size: jax.Array, k: int) -> jax.Array:
    """As `by_comparing`: sorts by size and place, and compares with the k-th entry."""
    return _first_of(_order(size), size, k)


def _order(size, *more):
    """Sorts a row, the largest first: inverted sizes, `u16` places, and arrays that move along."""
    place = lax.broadcasted_iota(jnp.uint16, size.shape, 1)
    # Not a stable sort, for which XLA would sort places once more.
    return lax.sort((~size, place, *more), dimension=1, is_stable=False, num_keys=2)


def _first_of(order, size, k):
    """Marks the first k entries of an order."""
    least, last = ~order[0][:, k - 1 : k], order[1][:, k - 1 : k]
    place = lax.broadcasted_iota(jnp.uint16, size.shape, 1)
    return (size > least) | ((size == least) & (place <= last))


def by_digits(size: jax.Array, k: int) -> jax.Array:
    """As `by_comparing`, for rows of any length; ties go to the first entries."""
    least, above = least_by_digits(size, k)
    equal = size == least
    return (size > least) | (equal & (ranks(equal) < k - above))


def least_by_digits(size: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k-th largest of each row, and how many are above: `u[rows, n] -> u, i32[rows, 1]`.

    A pass over the sizes finds four bits, by counting at 15 values. The passes are a loop of known
    length, for which no host is asked; without it XLA compiles for three times as long.
    """
    bits, zeros = 8 * size.dtype.itemsize, (jnp.int32(0),) * (2**_DIGIT - 1)
    added = lambda some, others: tuple(x + y for x, y in zip(some, others, strict=True))

    def find_digit(number, found):
        least, above = found
        shift = (bits - _DIGIT * (number + 1)).astype(size.dtype)
        bounds = [least | (size.dtype.type(digit) << shift) for digit in range(1, 2**_DIGIT)]
        # One reduction of all, and not one of a longer array: it reads a size once.
        ones = tuple((size >= bound[:, None]).astype(jnp.int32) for bound in bounds)
        for bound, count in zip(bounds, lax.reduce(ones, zeros, added, (1,)), strict=True):
            least = jnp.where(count >= k, bound, least)
            above = jnp.where(count >= k, above, jnp.maximum(above, count))
        return least, above

    none = size[:, 0] ^ size[:, 0]  # zeros that vary, in the types of `shard_map`
    found = lax.fori_loop(0, bits // _DIGIT, find_digit, (none, none.astype(jnp.int32)))
    return found[0][:, None], found[1][:, None]


def by_bits(size: jax.Array, k: int) -> jax.Array:
    """As `by_digits`, in one kernel of a GPU, which reads a size once.

    The k-th entry is found bit by bit: first by size, then by place among those of equal size.
    """
    n = size.shape[1]
    wide = size.astype(jnp.int64 if size.dtype.itemsize == 8 else jnp.int32)
    excess = _minus_the_kth(wide, k, 8 * size.dtype.itemsize - 1)
    # -1, 0 or 1 for above, equal and below; a clamp would have three operands, see below.
    below = jnp.minimum(-jnp.minimum(excess, 1), 1)
    order = (1 - below) * n - lax.broadcasted_iota(wide.dtype, size.shape, 1) + (n - 1)
    # Readers of the marks would have the whole kernel again.
    return lax.optimization_barrier(_minus_the_kth(order, k, (3 * n - 1).bit_length()) >= 0)


def _minus_the_kth(x, k, bits):
    """Subtracts from each row its k-th largest entry, for entries from 0 to 2**bits - 1.

    A round subtracts a bit if k entries reach it. XLA makes one kernel of all rounds, as it does
    for a softmax, if each is a reduction that is subtracted from what was reduced, and all other
    operations have one operand that is no constant: so a mask takes the place of `where`.
    """
    for bit in reversed(range(bits)):
        count = jnp.sum(x >= 2**bit, axis=1, keepdims=True, dtype=jnp.int32)
        x -= -(count >= k).astype(x.dtype) & 2**bit
    return x


def by_halving(size: jax.Array, k: int) -> jax.Array:
    """As `by_digits`, in as many rounds as the rows need."""
    n = size.shape[1]
    least = _greatest(
        lambda bound: _count(size >= bound[:, None]) >= k,
        jnp.min(size, axis=1),
        jnp.max(size, axis=1),
    )[:, None]
    above, equal = size > least, size == least
    missing = k - _count(above)
    place = lax.iota(jnp.int32, n)[None]
    # Nearly always all entries that equal the threshold; else those before a place, found by
    # bisection.
    first = jnp.where(_count(equal) == missing, n, 0)
    end = _greatest(
        lambda end: _count(equal & (place < end[:, None])) <= missing, first, first - first + n
    )[:, None]
    return above | (equal & (place < end))


def _count(entries):
    return jnp.sum(entries, axis=-1, dtype=jnp.int32)


def _greatest(holds, low, high):
    """In each row, the greatest integer in [low, high] that `holds`; it must hold for `low`."""

    def halved(bounds):
        low, high = bounds
        # Not their sum, which might not fit.
        middle = low + (high - low + 1) // 2
        fits = holds(middle)
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    return lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halved, (low, high))[0]


def ranks(marked: jax.Array) -> jax.Array:
    """Counts the marked entries before each one in its row: `bool[rows, n] -> i32[rows, n]`."""
    return by_platform(marked, cpu=ranks_by_words, gpu=ranks_by_words, default=ranks_by_comparing)


def put_back(values: jax.Array, marked: jax.Array) -> jax.Array:
    """Undoes `taken`, with zeros at the other entries: `[rows, k] -> [rows, n]`."""
    n = marked.shape[1]
    long = put_back_by_sorting if n <= SORTED else put_back_by_ranks
    other = put_back_by_comparing if n <= SHORT else long
    return by_platform(values, marked, cpu=put_back_in_turn, gpu=put_back_by_ranks, default=other)


def put_at(values: jax.Array, places: jax.Array, n: int) -> jax.Array:
    """Puts values at places of their row, all different: `[rows, k], i32[rows, k] -> [rows, n]`."""
    moved = lambda values, places: put_at_by_moving(values, places, n)
    compared = lambda values, places: put_at_by_comparing(values, places, n)
    other = compared if n <= SHORT else moved
    return by_platform(values, places, cpu=moved, gpu=moved, default=other)


# Numbers of marked entries.


def ranks_by_words(marked: jax.Array) -> jax.Array:
    """`ranks` by counting ones in words, and by the sums of the words before."""
    rows, n = marked.shape
    words = _words(marked)
    earlier = (np.uint32(1) << np.arange(_WORD, dtype=np.uint32)[None, None]) - np.uint32(1)
    within = lax.population_count(words[:, :, None] & earlier).astype(jnp.int32)
    sums = _before(lax.population_count(words).astype(jnp.int32), SHORT)
    return (within + sums[:, :, None]).reshape(rows, -1)[:, :n]


def ranks_by_comparing(marked: jax.Array) -> jax.Array:
    """`ranks` by comparing all places of a short row, or of 128 neighbours in a long one."""
    n = marked.shape[1]
    return _before(marked.astype(jnp.int32), n if n <= SHORT else SHORT // 2)


def _words(marked):
    """Marks as bits: `bool[rows, n] -> u32[rows, ceil(n / 32)]`, the first one lowest."""
    rows, n = marked.shape
    padded = jnp.pad(marked, ((0, 0), (0, -n % _WORD))).reshape(rows, -1, _WORD)
    bits = padded.astype(jnp.uint32) << lax.iota(jnp.uint32, _WORD)[None, None]
    return jnp.sum(bits, axis=2, dtype=jnp.uint32)


def _before(counts, size):
    """Sums what comes before each entry of a row, in tiles of `size`: `i32[rows, n]`, as counts."""
    rows, n = counts.shape
    size = min(size, n)
    tiles = jnp.pad(counts, ((0, 0), (0, -n % size))).reshape(-1, size)
    place, other = (lax.broadcasted_iota(jnp.int32, (1, size, size), axis) for axis in (1, 2))
    within = jnp.sum(jnp.where(other < place, tiles[:, None, :], 0), axis=2).reshape(rows, -1, size)
    if n > size:
        within += _before(jnp.sum(tiles, axis=1).reshape(rows, -1), size)[:, :, None]
    return within.reshape(rows, -1)[:, :n]


# From all entries to the marked ones.


def taken_in_turn(x: jax.Array, marked: jax.Array, k: int) -> jax.Array:
    """`taken`, one entry at a time, numbered across all rows."""
    one, rank = _ones(marked)
    count = x.shape[0] * k
    place = jnp.where(one, rank, count).reshape(-1)[: x.size]
    return jnp.zeros(count, x.dtype).at[place].set(x.reshape(-1), mode="drop").reshape(-1, k)


def taken_by_moving(x: jax.Array, marked: jax.Array, k: int) -> jax.Array:
    """`taken`, one entry at a time, numbered in each row."""
    place = jnp.where(marked, ranks(marked), k)
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.zeros((x.shape[0], k), x.dtype).at[row, place].set(x, mode="drop")


def taken_by_comparing(x: jax.Array, marked: jax.Array, k: int) -> jax.Array:
    """`taken` for short rows: each of the k places looks at all entries."""
    place = jnp.where(marked, ranks(marked), k)[:, None, :]
    return _picked(x[:, None, :], place == lax.broadcasted_iota(jnp.int32, (1, k, 1), 1))


def places_by_words(marked: jax.Array, k: int) -> jax.Array:
    """The places of the k marked entries of each short row, in order, by bisection.

    `bool[rows, n] -> i32[rows, k]`.
    """
    words, rank = _words(marked), lax.broadcasted_iota(jnp.int32, (1, k), 1)
    # At least one turn, also for rows of one entry: the result's type varies as `marked` does.
    place, step = (
        jnp.zeros((marked.shape[0], k), jnp.int32),
        1 << max(1, (marked.shape[1] - 1).bit_length()),
    )
    while step := step // 2:
        ones: jax.Array | int = 0  # before the middle
        for number in range(words.shape[1]):
            bits = jnp.clip(place + step - _WORD * number, 0, _WORD).astype(jnp.uint32)
            # A shift by all 32 bits is not defined.
            earlier = jnp.where(
                bits == 0, 0, jnp.uint32(2**32 - 1) >> (_WORD - jnp.maximum(bits, 1))
            )
            ones += lax.population_count(words[:, number, None] & earlier).astype(jnp.int32)
        place = jnp.where(ones <= rank, place + step, place)
    return place


def places_by_ranks(marked: jax.Array, k: int) -> jax.Array:
    """As `places_by_words`, for rows of any length: each entry writes its place at its rank."""
    row, place = (lax.broadcasted_iota(jnp.int32, marked.shape, axis) for axis in (0, 1))
    rank = jnp.where(marked, ranks(marked), k)
    places = jnp.zeros((marked.shape[0], k), jnp.int32)
    return places.at[row, rank].set(place, mode="drop", unique_indices=True)


# From values to all entries.


def put_back_in_turn(values: jax.Array, marked: jax.Array) -> jax.Array:
    """`put_back`, numbered across all rows."""
    one, rank = _ones(marked)
    kept = values.reshape(-1).at[rank].get(mode="clip")
    x = jnp.where(one, kept, jnp.zeros((), values.dtype))
    return x.reshape(-1)[: marked.size].reshape(marked.shape)


def put_back_by_ranks(values: jax.Array, marked: jax.Array) -> jax.Array:
    """`put_back`: each entry reads the place of its rank."""
    kept = jnp.take_along_axis(values, ranks(marked), axis=1, mode="clip")
    return jnp.where(marked, kept, jnp.zeros((), values.dtype))


def put_back_by_comparing(values: jax.Array, marked: jax.Array) -> jax.Array:
    """`put_back` for short rows: each entry looks at all k values."""
    k = values.shape[1]
    place = jnp.where(marked, ranks(marked), k)[:, :, None]
    return _picked(values[:, None, :], place == lax.broadcasted_iota(jnp.int32, (1, 1, k), 2))


def put_back_by_sorting(values: jax.Array, marked: jax.Array) -> jax.Array:
    """`put_back`: orders the places, the marked ones first, and sorts the values by them."""
    n, others = marked.shape[1], marked.shape[1] - values.shape[1]
    place = lax.sort(_first_if(marked), dimension=1, is_stable=False) % n
    return _sorted(place, jnp.pad(values, ((0, 0), (0, others))))[1]


def _first_if(marked):
    """The places of marked entries, and those of all others plus n, `u16[rows, n]`."""
    place = lax.broadcasted_iota(jnp.uint16, marked.shape, 1)
    return jnp.where(marked, place, place + marked.shape[1])


def _sorted(key, x):
    return lax.sort((key, x), dimension=1, is_stable=False, num_keys=1)


def put_at_by_moving(values: jax.Array, places: jax.Array, n: int) -> jax.Array:
    """`put_at`, one value at a time."""
    row = jnp.arange(values.shape[0])[:, None]
    x = jnp.zeros((values.shape[0], n), values.dtype)
    return x.at[row, places].set(values, unique_indices=True, mode="promise_in_bounds")


def put_at_by_comparing(values: jax.Array, places: jax.Array, n: int) -> jax.Array:
    """`put_at` in short rows: each entry looks at all places."""
    mine = places[:, None, :] == lax.broadcasted_iota(places.dtype, (1, n, 1), 1)
    return _picked(values[:, None, :], mine)


def _picked(x, mine):
    """The entry of the last axis where `mine` holds, at most one; zero if none. Keeps its bits."""
    bits = lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize])
    total = jnp.sum(jnp.where(mine, bits, 0), axis=-1, dtype=bits.dtype)
    return lax.bitcast_convert_type(total, x.dtype)


def _ones(marked):
    """Marks by eights, `bool[bytes, 8]`, and how many come before in all rows, `i32[bytes, 8]`."""
    marked = jnp.pad(marked.reshape(-1), (0, -marked.size % 8)).reshape(-1, 8).astype(jnp.uint8)
    bit = lax.iota(jnp.uint8, 8)[None]
    mask = jnp.sum(marked << bit, axis=1, dtype=jnp.uint8)
    # Counted byte by byte: a running sum over bits would take four bytes an entry.
    ones = lax.population_count(mask).astype(jnp.int32)
    mask = mask[:, None]
    before = lax.population_count(mask & ((jnp.uint8(1) << bit) - jnp.uint8(1)))
    rank = (jnp.cumsum(ones) - ones)[:, None] + before.astype(jnp.int32)
    return (mask >> bit) & 1 == 1, rank
