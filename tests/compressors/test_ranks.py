"""Marked entries moved to the front of their row and back: forms of all machines against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.compressors import largest

SHAPES = [(1, 1, 1), (4096, 3, 2), (3, 7, 2), (5, 128, 26), (2, 130, 130), (3, 256, 9)]
LONG = [(2, 300, 40), (1, 4096, 512), (2, 5000, 3)]
TAKEN = [largest.taken_in_turn, largest.taken_by_moving]
PUT_BACK = [
    largest.put_back_in_turn,
    largest.put_back_by_ranks,
    largest.put_back_by_sorting,
    largest.put_back,
]


def marks(rows, n, k):
    random = np.random.default_rng([rows, n, k])
    return jnp.asarray(np.argsort(random.random((rows, n)), axis=1) < k)


def values(rows, n):
    """With zeros of both signs, infinities and NaN, of which the bits shall stay."""
    x = np.random.default_rng([rows, n]).standard_normal((rows, n)).astype("f4")
    x.reshape(-1)[::7], x.reshape(-1)[1::11], x.reshape(-1)[2::13] = -0.0, np.nan, -np.inf
    return x


def same_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got).view("u4"), np.asarray(want).view("u4"))


@pytest.mark.parametrize("shape", SHAPES + LONG)
@pytest.mark.parametrize(
    "form", [largest.ranks_by_words, largest.ranks_by_comparing, largest.ranks]
)
def test_ranks_count_the_marks_before(form, shape):
    marked = marks(*shape)
    np.testing.assert_array_equal(jax.jit(form)(marked), np.cumsum(marked, axis=1) - marked)


def test_ranks_of_rows_with_different_counts_and_of_a_long_row():
    random = np.random.default_rng(0)
    for shape in [(6, 100), (1, 200_000)]:
        marked = random.random(shape) < random.random((shape[0], 1))
        for form in (largest.ranks_by_words, largest.ranks_by_comparing):
            got = jax.jit(form)(jnp.asarray(marked))
            np.testing.assert_array_equal(got, np.cumsum(marked, axis=1) - marked)


@pytest.mark.parametrize(
    "form, shape",
    [(form, shape) for form in TAKEN for shape in SHAPES + LONG]
    + [(largest.taken_by_comparing, shape) for shape in SHAPES],
)
def test_taken_are_the_marked_entries_in_their_order(form, shape):
    rows, n, k = shape
    x, marked = values(rows, n), marks(*shape)
    got = jax.jit(form, static_argnums=2)(jnp.asarray(x), marked, k)
    same_bits(got, x[np.asarray(marked)].reshape(rows, k))


@pytest.mark.parametrize(
    "form, shape",
    [(largest.places_by_ranks, shape) for shape in SHAPES + LONG]
    + [(largest.places_by_words, shape) for shape in SHAPES],
)
def test_places_are_those_of_the_marked_entries(form, shape):
    marked = marks(*shape)
    got = jax.jit(form, static_argnums=1)(marked, shape[2])
    np.testing.assert_array_equal(got, np.nonzero(marked)[1].reshape(got.shape))


@pytest.mark.parametrize(
    "form, shape",
    [(form, shape) for form in PUT_BACK for shape in SHAPES + LONG]
    + [(largest.put_back_by_comparing, shape) for shape in SHAPES],
)
def test_put_back_undoes_taken(form, shape):
    rows, n, k = shape
    marked, kept = marks(*shape), values(rows, k)
    want = np.zeros((rows, n), "f4")
    want[np.asarray(marked)] = kept.reshape(-1)
    same_bits(jax.jit(form)(jnp.asarray(kept), marked), want)


@pytest.mark.parametrize(
    "form, shape",
    [
        (form, shape)
        for form in (largest.put_at_by_moving, largest.put_at)
        for shape in SHAPES + LONG
    ]
    + [(largest.put_at_by_comparing, shape) for shape in SHAPES],
)
def test_put_at_puts_each_value_at_its_place(form, shape):
    rows, n, k = shape
    marked, kept = np.asarray(marks(*shape)), values(rows, k)
    places = np.nonzero(marked)[1].reshape(rows, k).astype("i4")
    want = np.zeros((rows, n), "f4")
    want[marked] = kept.reshape(-1)
    got = jax.jit(form, static_argnums=2)(jnp.asarray(kept), jnp.asarray(places), n)
    same_bits(got, want)
