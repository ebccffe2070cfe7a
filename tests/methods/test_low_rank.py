"""Thin factors: columns of norm 1 that span what they should."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.compressors.base import Key
from jaxcomp.methods import low_rank
from jaxcomp.methods.low_rank import orthogonal, outer


@pytest.mark.parametrize("rank", [3, 9])  # eliminated by hand, and by a library
def test_columns_become_orthogonal_though_they_are_parallel_or_zero_or_of_other_sizes(rank):
    x = np.random.default_rng(0).normal(size=(4, 30, rank)).astype(np.float32)
    x[0, :, 1] = x[0, :, 0] * (1 + 1e-6)
    x[1, :, 2] = 0
    x[2] = x[2, :, :1] * x[2, :1]
    x[3] *= np.logspace(8, -4, rank, dtype=np.float32)
    q = np.asarray(orthogonal(jnp.asarray(x), Key(jnp.int32(0), jnp.uint32(1))))
    one = np.broadcast_to(np.eye(rank), (4, rank, rank))
    np.testing.assert_allclose(np.swapaxes(q, 1, 2) @ q, one, atol=1e-5)
    size = np.linalg.norm(x, axis=1, keepdims=True)
    x /= np.where(size > 0, size, 1)
    np.testing.assert_allclose(q @ (np.swapaxes(q, 1, 2) @ x), x, atol=1e-5)
    nothing = orthogonal(jnp.zeros((1, 30, rank)), Key(jnp.int32(0), jnp.uint32(1)))
    assert np.all(np.abs(nothing) > 0)


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 9])
def test_the_product_of_factors_is_that_of_matrices_for_any_rank(rank):
    # Integers, so that sums are exact in any order.
    draw = np.random.default_rng(rank).integers
    left, right = (draw(-9, 9, size=(2, size, rank)).astype(np.float32) for size in (7, 5))
    np.testing.assert_array_equal(outer(left, right), left @ np.swapaxes(right, 1, 2))


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((6, 4), (6, 4)),
        ((3, 3, 16, 32), (144, 32)),  # a convolution
        ((24, 6, 4), (24, 24)),  # queries of six heads
        ((6, 4, 24), (24, 24)),  # and what joins them again
        ((4, 4, 4), (16, 4)),
    ],
)
def test_axes_are_cut_where_factors_are_thinnest(shape, wanted):
    assert low_rank.sides(shape) == wanted
