"""Thin factors: columns of norm 1 that span what they should."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.compressors.base import Key
from jaxcomp.methods.low_rank import orthogonal, outer


def test_columns_that_are_nearly_parallel_become_orthogonal():
    x = np.random.default_rng(0).normal(size=(2, 30, 3)).astype(np.float32)
    x[0, :, 1] = x[0, :, 0] * (1 + 1e-6)
    x[1, :, 2] = 0
    q = np.asarray(orthogonal(jnp.asarray(x), Key(jnp.int32(0), jnp.uint32(1))))
    np.testing.assert_allclose(np.swapaxes(q, 1, 2) @ q, np.stack([np.eye(3)] * 2), atol=1e-5)
    span = q[1, :, :2] @ (q[1, :, :2].T @ x[1, :, :2])
    np.testing.assert_allclose(span, x[1, :, :2], atol=1e-5)
    nothing = orthogonal(jnp.zeros((1, 30, 2)), Key(jnp.int32(0), jnp.uint32(1)))
    assert np.all(np.abs(nothing) > 0)


@pytest.mark.parametrize("rank", [1, 2, 4, 5, 9])
def test_the_product_of_factors_is_that_of_matrices_for_any_rank(rank):
    # Integers, so that sums are exact in any order.
    draw = np.random.default_rng(rank).integers
    left, right = (draw(-9, 9, size=(2, size, rank)).astype(np.float32) for size in (7, 5))
    np.testing.assert_array_equal(outer(left, right), left @ np.swapaxes(right, 1, 2))
