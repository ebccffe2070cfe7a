"""Positions of kept entries: read as written, in the bits that are stated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.compressors import positions
from jaxcomp.compressors.largest import Largest

ROWS = [
    *((1, 1), (2, 1), (3, 2), (5, 5), (10, 1), (100, 7), (256, 16), (1000, 10), (4096, 3)),
    *((4096, 64), (4096, 300), (4096, 512), (16384, 256), (100_003, 1000)),
]


def found(random, n, k):
    """Entries at the start, at the end, next to each other in the middle, and anywhere."""
    order = random.random((4, n))
    order[0], order[1] = np.arange(n), -np.arange(n)
    order[2] = np.abs(np.arange(n) - n // 2)
    marked = np.argsort(np.argsort(order, axis=1), axis=1) < k
    places = np.nonzero(marked)[1].reshape(4, k)
    return Largest(jnp.asarray(marked), jnp.asarray(places, jnp.int32), jnp.ones((4, k)))


@pytest.mark.parametrize(("n", "k"), ROWS)
def test_positions_are_read_as_written(n, k):
    entries = found(np.random.default_rng(n + k), n, k)
    written = jax.jit(positions.write)(entries)
    if positions.is_marks(n, k):
        got, want = positions.marks(written, 4, n), entries.marked
    else:
        got, want = positions.read(written, 4, n, k), entries.places
    np.testing.assert_array_equal(got, want)
    # Each part of a width ends with a whole byte.
    assert 0 <= 8 * written.size - 4 * positions.bits(n, k) < 8 * 6


def test_bits_are_near_the_fewest_that_can_tell_all_choices_apart():
    assert positions.bits(4096, 64) == 64 * 8 and positions.bits(4096, 32) == 32 * 9
    for n, k in ROWS:
        choices = sum(np.log2((n - i) / (i + 1)) for i in range(k))
        if k >= 16 and not positions.is_marks(n, k):
            assert choices < positions.bits(n, k) < choices + k


def test_marks_are_taken_unless_the_other_code_halves_them():
    assert positions.is_marks(128, 26) and positions.bits(128, 26) == 128
    assert not positions.is_marks(4096, 384) and positions.bits(4096, 384) == 384 * 3 + 32 * 28
    assert positions.is_marks(4096, 385) and positions.bits(4096, 385) == 4096
