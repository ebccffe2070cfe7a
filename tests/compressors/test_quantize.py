"""Uniform levels and narrow floats: how far off what they decode to may be."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomp.compressors.quantize import cast, quantize
from tests.helpers.coding import bucket, decoded, jitted, make_key


def test_contraction_of_nearest_rounding_is_sharp():
    compressor = quantize(4, scale_dtype="float32")
    x = np.full(128, 0.4999 / 7, np.float32)
    x[0] = 1.0
    error = np.sum((decoded(compressor, x) - x) ** 2) / np.sum(x**2)
    assert error == pytest.approx(1 - compressor.contraction, rel=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_cast_saturates_at_the_largest_finite_value(dtype):
    largest = float(jnp.finfo(dtype).max)
    x = np.array([3e38, -3.4e38, np.inf, largest, np.nan], "f4")
    got = decoded(cast(dtype), x)
    assert np.all(np.abs(got[1:4]) == largest) and got[1] < 0 and np.isnan(got[4])


def test_quantize_codes_values_of_every_magnitude():
    for magnitude in (1e-30, 1e-12, 1.0, 1e12, 1e30):
        x = (magnitude * bucket(1000)).astype("f4")
        error = np.linalg.norm(decoded(quantize(8), x) / magnitude - x / magnitude)
        assert error < 0.02 * np.linalg.norm(x / magnitude)


@pytest.mark.parametrize("code", [quantize(3), quantize(1, range="minmax")], ids=str)
def test_values_whose_step_has_no_inverse_do_not_become_zeros(code):
    assert not np.isfinite(decoded(code, np.array([3e38, 0, 1], "f4"))).any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    bits=st.integers(2, 8),
    range=st.sampled_from(["absmax", "minmax"]),
    values=st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40),
)
def test_quantize_errs_by_half_a_step_at_most(bits, range, values):
    compressor, x = quantize(bits, block=16, range=range), np.array(values, "f4")
    x[np.abs(x) < 2.0**-60] = 0
    payload, estimate = jitted(compressor)(x, make_key(0), make_key(0))
    steps = np.repeat(np.asarray(payload.data[-1], np.float64), min(16, x.size))[: x.size]
    # Beyond half a step, only what float32 rounds off the block's values.
    slack = 2.0**-21 * np.abs(x).max()
    assert np.all(np.abs(np.asarray(estimate, np.float64) - x) <= 0.5 * steps + slack)
