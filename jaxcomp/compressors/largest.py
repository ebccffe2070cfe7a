"""The k entries of largest magnitude of each row, exactly, without sorting.

Magnitudes are ordered as their bits are, read as integers. Each machine has the form that suits it;
all mark the same entries. On a CPU a loop halves intervals that hold the threshold, at a fifth of
the time of `jax.lax.top_k`. Elsewhere a loop of unknown length would wait for the host in each
round. A GPU sorts rows of up to 4,096: one operation, of which XLA launches a kernel or a few. A
TPU compares all pairs of short rows. In longer rows both find the threshold digit by digit.
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

    Of equal ones the first are marked; NaN counts as larger than any number. k is from 1 to n.
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
    """As `by_comparing`, by the last one of the k first in order of size and place."""
    place = lax.broadcasted_iota(jnp.uint16, size.shape, 1)
    # The largest first; not a stable sort, for which XLA would sort places once more.
    order = lax.sort((~size, place), dimension=1, is_stable=False, num_keys=2)
    least, last = ~order[0][:, k - 1 : k], order[1][:, k - 1 : k]
    return (size > least) | ((size == least) & (place <= last))


def by_digits(size: jax.Array, k: int) -> jax.Array:
    """As `by_comparing`, of rows of any length: in a pass for each four bits."""
    least = jnp.zeros_like(size, shape=size.shape[:1])
    for shift in reversed(range(0, 8 * size.dtype.itemsize, _DIGIT)):
        digits = (jnp.arange(1, 2**_DIGIT, dtype=size.dtype) << shift)[None]
        bounds = least[:, None] | digits
        fits = _count(size[:, None, :] >= bounds[:, :, None]) >= k
        least = least | (jnp.sum(fits, axis=1, dtype=size.dtype) << shift)
    return _at_least(size, least, k)


def _at_least(size, least, k):
    """Marks k entries, of which the least is known: of those equal to it the first ones."""
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
    # All equal ones, as nearly always, or those before a place that is searched for.
    first = jnp.where(_count(equal) == missing, n, 0)
    end = _greatest(
        lambda end: _count(equal & (place < end[:, None])) <= missing, first, first - first + n
    )[:, None]
    return above | (equal & (place < end))


def _count(entries):
    return jnp.sum(entries, axis=-1, dtype=jnp.int32)


def _greatest(holds, low, high):
    """The greatest integer of [low, high] for which `holds`, as it does for `low`; a row each."""

    def halved(bounds):
        low, high = bounds
        # Not their sum, which might not fit.
        middle = low + (high - low + 1) // 2
        fits = holds(middle)
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    return lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halved, (low, high))[0]
