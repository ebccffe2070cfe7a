"""Signs with one scale a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.sign import sign
from tests.helpers.coding import as_for_tpus, bucket, decoded, make_key, roundtrip


def test_sign_of_zero_is_plus_and_zeros_stay_zeros_in_their_block():
    x = np.array([0, 4, -0.0, -4, 0, 0, 0, 0], "f4")
    np.testing.assert_array_equal(decoded(sign(block=4), x), [2, 2, 2, -2, 0, 0, 0, 0])


@pytest.mark.parametrize("block", [None, 96, 1024])
def test_a_tpu_sends_the_same_signs_and_scales(block, monkeypatch):
    x, keys = bucket(3 * 1024), (make_key(3), make_key(5))
    payload, sent = roundtrip(sign(block=block), x, *keys)
    packed, scales = payload.data
    as_for_tpus(monkeypatch)
    of_tpu = roundtrip(sign(block=block), x, *keys)
    np.testing.assert_array_equal(of_tpu[0].data[0], packed)
    # Sums of at most 3,072 magnitudes, in another order.
    np.testing.assert_allclose(of_tpu[0].data[1], scales, rtol=3072 * 2.0**-24)
    np.testing.assert_allclose(of_tpu[1], sent, rtol=3072 * 2.0**-24)


@pytest.mark.parametrize(("platform", "count"), [("cpu", 0), ("cuda", 1), ("tpu", 0)])
def test_a_gpu_writes_marks_and_scales_before_it_packs_them(platform, count):
    key = Key(jnp.int32(0), jnp.uint32(0))
    encode = jax.jit(lambda x: sign(block=128).encode(x, key, key))
    lowered = encode.trace(jnp.zeros(1024)).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("optimization_barrier") == count
