"""Finds the k entries of largest magnitude of each row, exactly.

Magnitudes have the order of their bits, read as integers. Each platform has a form of its own, and
all find the same entries. A CPU bisects for the threshold, in a fifth of the time of
`jax.lax.top_k`. On accelerators such a loop would wait for the host in each round. So they sort
rows of up to 4,096, but a TPU compares all pairs in short rows. In longer rows both find the
threshold digit by digit.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.platforms import by_platform
from jaxcomp.compressors.ranks import SHORT, SORTED, UNSIGNED, ranks, taken

_DIGIT = 4  # bits of the threshold that a pass finds, by counting at 15 values


class Largest(NamedTuple):
    """The k entries of largest magnitude of each row; a compiler drops what is not used."""

    marked: jax.Array  # bool[rows, n], which they are
    places: jax.Array  # i32[rows, k], where they are, in order
    values: jax.Array  # [rows, k], in the order of their places


def find_largest(x: jax.Array, k: int) -> Largest:
    """Finds the k entries of largest magnitude of each row of `[rows, n]`.

    Ties go to the first entries. NaN counts as larger than any number. k is from 1 to n.
    """
    n = x.shape[1]
    forms = {
        "cpu": partial(_marked_first, by_halving),
        "gpu": _for_gpu(n),
        "default": _for_tpu(n),
    }
    return by_platform(x, **{name: partial(form, k=k) for name, form in forms.items()})


def _for_gpu(n):
    if SHORT < n <= SORTED:
        return sorted_first
    return partial(_marked_first, by_sorting if n <= SHORT else by_digits)


def _for_tpu(n):
    if SHORT < n <= SORTED:
        return sorted_together
    return partial(_marked_first, by_comparing if n <= SHORT else by_digits)


def sorted_first(x: jax.Array, k: int) -> Largest:
    """`find_largest`: the places of a sort need no other search for the values."""
    size = _size(x)
    order = _order(size)
    places = lax.sort(order[1][:, :k], dimension=1, is_stable=False).astype(jnp.int32)
    values = jnp.take_along_axis(x, places, axis=1, mode="promise_in_bounds")
    return Largest(_first_of(order, size, k), places, values)


def sorted_together(x: jax.Array, k: int) -> Largest:
    """As `sorted_first`, with values that move along, since a TPU gathers a tile for each."""
    size = _size(x)
    order = _order(size, x)
    first = (order[1][:, :k].astype(jnp.int32), order[2][:, :k])
    places, values = lax.sort(first, dimension=1, is_stable=False, num_keys=1)
    return Largest(_first_of(order, size, k), places, values)


def _marked_first(form, x, k):
    marked = form(_size(x), k)
    place = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return Largest(marked, taken(place, marked, k), taken(x, marked, k))


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
    """As `by_comparing`, for rows of any length: one pass for every four bits."""
    least = jnp.zeros_like(size, shape=size.shape[:1])
    for shift in reversed(range(0, 8 * size.dtype.itemsize, _DIGIT)):
        digits = (jnp.arange(1, 2**_DIGIT, dtype=size.dtype) << shift)[None]
        bounds = least[:, None] | digits
        fits = _count(size[:, None, :] >= bounds[:, :, None]) >= k
        least = least | (jnp.sum(fits, axis=1, dtype=size.dtype) << shift)
    return _at_least(size, least, k)


def _at_least(size, least, k):
    """Marks k entries whose least value is known; ties go to the first entries."""
    above, equal = size > least[:, None], size == least[:, None]
    return above | (equal & (ranks(equal) < k - _count(above)[:, None]))


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
