"""Thin factors: columns of norm 1 that span what they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.compressors.base import Key
from jaxcomp.methods import low_rank
from jaxcomp.methods.low_rank import orthogonal, outer


def hard(rows, rank):
    """Columns that are zero, equal, dependent up to rounding, of all scales: [cases, n, rank]."""
    random = np.random.default_rng(rows)
    full, one = random.normal(size=(rows, rank)), random.normal(size=(rows, 1))
    half = max(1, rank // 2)
    half = random.normal(size=(rows, half)) @ random.normal(size=(half, rank))
    # Singular values from 1 to 1e-20, in all columns.
    fading = full * np.logspace(0, -20, rank) @ np.linalg.qr(random.normal(size=(rank, rank)))[0]
    near = one * (1 + 1e-6 * random.normal(size=rank))
    cases = [
        *(full, half, fading, near, 0 * full, 1e30 * full, 1e-30 * full, np.ones((rows, rank))),
        *(one @ random.normal(size=(1, rank)), np.eye(rows)[:, :1] * np.ones(rank)),
        *(full * (np.arange(rank) % 2), full * np.logspace(25, -25, rank)),
        np.linspace(0, 1, rows)[:, None] ** np.arange(rank),
    ]
    return np.stack(cases).astype(np.float32)


SIZES = [(1, 1), (4, 4), (30, 3), (30, 9), (12, 12), (17, 17), (31, 31), (64, 64), (96, 80)]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("rows", "rank"), SIZES)
def test_columns_become_orthogonal_whatever_they_are(rows, rank, platform, monkeypatch):
    monkeypatch.setattr(low_rank, "platform", lambda: platform)
    x = hard(rows, rank)
    compiled = jax.jit(lambda x: orthogonal(x, Key(jnp.int32(0), jnp.uint32(1))))
    q = np.asarray(compiled(x), np.float64)
    turned = np.swapaxes(q, 1, 2)
    np.testing.assert_allclose(
        turned @ q, np.broadcast_to(np.eye(rank), q[:, :rank].shape), atol=2e-6
    )
    x = x / np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-37, dtype=np.float64)
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-37)
    np.testing.assert_allclose(q @ (turned @ x), x, atol=1e-5)


def test_what_is_not_finite_stays_so():
    x = np.ones((2, 30, 5), np.float32)
    x[0, 0, 0], x[1, 0, 0] = np.inf, np.nan
    q = orthogonal(jnp.asarray(x), Key(jnp.int32(0), jnp.uint32(1)))
    assert not np.isfinite(q).all(axis=(1, 2)).any()


def test_no_library_with_threads_of_its_own_is_called_on_cpus():
    program = jax.jit(orthogonal).lower(
        np.ones((2, 90, 70), np.float32), Key(jnp.int32(0), jnp.uint32(1))
    )
    assert "lapack" not in program.as_text() and "custom_call" not in program.as_text()


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
