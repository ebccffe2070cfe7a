"""The largest entries of rows: forms of all machines against a stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxcomp.compressors import largest

FORMS = [largest.by_halving, largest.by_sorting, largest.by_digits]
SHAPES = [(1, 1), (4096, 2), (5, 128), (2, 130), (3, 256), (1, 4096)]
# Of 16 bits there are more ties; what depends on sizes is the same.
ROWS = [*((shape, jnp.float32) for shape in SHAPES), ((3, 256), jnp.bfloat16)]


def rows_of(shape, dtype):
    """Many ties, zeros of both signs, subnormal numbers, infinities and NaN."""
    random = np.random.default_rng([shape[0], shape[1]])
    x = np.round(2 * random.standard_normal(shape)).astype(np.float32)
    some = random.random(shape)
    x[some < 0.1] = np.float32(1e-40)
    x[some > 0.9] *= -np.float32(0.37)
    if shape[1] > 100:
        x[:, 3], x[:, 50], x[:, 90], x[:, 70] = -np.inf, np.inf, np.nan, -0.0
    return jnp.asarray(x).astype(dtype)


def expected(x, k):
    """Of equal magnitudes the first; NaN is larger than any number."""
    width = x.dtype.itemsize
    bits = np.asarray(x).view(f"u{width}").astype(np.int64) & (2 ** (8 * width - 1) - 1)
    order = np.argsort(-bits, axis=1, kind="stable")[:, :k]
    marked = np.zeros(x.shape, bool)
    np.put_along_axis(marked, order, True, axis=1)
    return marked


@pytest.mark.parametrize(
    "form, shape, dtype",
    [(form, *row) for form in FORMS for row in ROWS]
    + [(largest.by_comparing, *row) for row in ROWS if row[0][1] <= 256],
)
def test_every_form_marks_what_a_stable_sort_does(form, shape, dtype):
    n, x = shape[1], rows_of(shape, dtype)
    size = jax.lax.bitcast_convert_type(jnp.abs(x), largest.UNSIGNED[x.dtype.itemsize])
    for k in {1, -(-n // 5), n}:
        got = jax.jit(form, static_argnums=1)(size, k)
        np.testing.assert_array_equal(got, expected(x, k))


@pytest.mark.parametrize("n", [5, 128, 300])
def test_a_row_of_equals_gives_its_first(n):
    for value in (0.0, -3.0, np.nan):
        x = jnp.full((2, n), value)
        for k in (1, 3, n):
            got = jax.jit(largest.find_largest, static_argnums=1)(x, k)
            np.testing.assert_array_equal(got.marked, np.arange(n)[None] < np.full((2, 1), k))


def test_rows_of_one_entry_have_the_type_of_others():
    # Of no platform: all forms are traced.
    mesh = AbstractMesh((2,), ("replica",), axis_types=(AxisType.Auto,))
    rows = {"in_specs": P("replica"), "out_specs": P("replica")}
    find = jax.shard_map(lambda x: largest.find_largest(x, 1).places, mesh=mesh, **rows)
    assert jax.eval_shape(find, jnp.ones((2, 1))).shape == (2, 1)


def for_old_gpu(n):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest, "fuses_rows", lambda: False)
        return largest.for_gpu(n)


@pytest.mark.parametrize(
    "form",
    [largest.for_cpu, largest.for_gpu, for_old_gpu, largest.for_tpu],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize(("shape", "dtype"), ROWS)
def test_every_platform_finds_the_values_that_are_marked(shape, dtype, form):
    x, n = rows_of(shape, dtype), shape[1]
    bits = lambda values: np.asarray(values).view(f"u{values.dtype.itemsize}")
    for k in {1, -(-n // 5)}:  # all of a row are marked above
        # Not as one program: XLA compiles a GPU's rounds for a CPU for ten seconds.
        got, marked = form(n)(x, k), expected(x, k)
        np.testing.assert_array_equal(got.marked, marked)
        np.testing.assert_array_equal(got.places, np.nonzero(marked)[1].reshape(-1, k))
        np.testing.assert_array_equal(bits(got.values), bits(x)[marked].reshape(-1, k))
