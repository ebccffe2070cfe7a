"""Marks the k entries of largest magnitude of each row, exactly.

Magnitudes have the order of their bits, read as integers. Each platform has a form of its own, and
all mark the same entries. A CPU bisects for the threshold, in a fifth of the time of
`jax.lax.top_k`. On accelerators such a loop would wait for the host in each round. So a GPU sorts
rows of up to 4,096, in one or a few kernels. A TPU compares all pairs in short rows. In longer rows
both find the threshold digit by digit.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.platforms import by_platform
from jaxcomp.compressors.ranks import SHORT, SORTED, UNSIGNED, ranks

_DIGIT = 4  # bits of the threshold that a pass finds, by counting at 15 values


def mark_largest(x: jax.Array, k: int) -> jax.Array:
    """Marks the k entries of largest magnitude of each row: `[rows, n] -> bool[rows, n]`.

    Ties go to the first entries. NaN counts as larger than any number. k is from 1 to n.
    """
    size = lax.bitcast_convert_type(jnp.abs(x), UNSIGNED[x.dtype.itemsize])
    n = x.shape[1]
    forms = {
        "cpu": by_halving,
        "gpu": by_sorting if n <= SORTED else by_digits,
        "default": by_comparing if n <= SHORT else by_digits,
    }
    return by_platform(size, **{name: partial(form, k=k) for name, form in forms.items()})


def by_comparing(size: jax.Array, k: int) -> jax.Array:
    """Marks entries of short rows before which fewer than k come: `u[rows, n] -> bool[rows, n]`."""
    mine, others = size[:, :, None], size[:, None, :]
    place, other = (lax.broadcasted_iota(jnp.int32, (1, *2 * size.shape[1:]), i) for i in (1, 2))
    before = (others > mine) | ((others == mine) & (other < place))
    return jnp.sum(before, axis=2, dtype=jnp.int32) < k


def by_sorting(size: jax.Array, k: int) -> jax.Array:
    """As `by_comparing`: sorts by size and place, and compares with the k-th entry."""
    place = lax.broadcasted_iota(jnp.uint16, size.shape, 1)
    # The largest first; not a stable sort, for which XLA would sort places once more.
    order = lax.sort((~size, place), dimension=1, is_stable=False, num_keys=2)
    least, last = ~order[0][:, k - 1 : k], order[1][:, k - 1 : k]
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
