"""Arrays behind each other, each by a code of its own: what each alone gives, in one payload."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomp.compressors.base import Key, identity
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.quantize import quantize
from jaxcomp.exchange.messages import message_bytes, payload_like
from jaxcomp.sharded.gathering import fused

SHARED, PRIVATE = Key(jnp.int32(3), jnp.uint32(7)), Key(jnp.int32(3), jnp.uint32(9))
SHIFT = quantize(3, block=16, rounding="shift")
NOISE = quantize(2, block=16, rounding="stochastic")
PARTS = (SHIFT, 40), (identity(), 3), (NOISE, 33), (SHIFT, 1), (NOISE, 33)


def pieces_of(x):
    return np.split(x, np.cumsum([size for _, size in PARTS])[:-1])


def test_each_part_is_coded_as_if_alone_with_one_shift_and_noise_of_its_own():
    code = fused(*PARTS)
    x = np.random.default_rng(0).normal(size=110).astype(np.float32)
    x[77:] = x[43:76]  # the second noisy part is the first one again
    payload = code.encode(x, SHARED, PRIVATE)
    decoded = pieces_of(np.asarray(code.decode(payload, SHARED)))
    for index, ((part, _), piece) in enumerate(zip(PARTS, pieces_of(x), strict=True)):
        alone = part.encode(piece, SHARED, fold(PRIVATE, index))
        np.testing.assert_array_equal(decoded[index], part.decode(alone, SHARED))
    assert np.any(decoded[2] != decoded[4])
    leaves = [leaf for part, size in PARTS for leaf in jax.tree.leaves(payload_like(part, size))]
    words = sum(-(-leaf.size * leaf.dtype.itemsize // 4) for leaf in leaves)
    assert 4 * words <= message_bytes(code, 110) < 4 * words + 16


def test_it_promises_what_all_parts_promise():
    exact = fused((identity(), 2), (identity(), 5))
    assert exact.linear and exact.unbiased and exact.contraction == 1.0
    mixed = fused((identity(), 100), (quantize(8, block=100), 300))
    assert not mixed.linear and not mixed.unbiased
    assert mixed.contraction == quantize(8, block=100).contraction
    assert mixed.bits_per_parameter == (32 * 100 + 8.16 * 300) / 400
    assert fused((NOISE, 4)).contraction == NOISE.contraction
    assert fused((NOISE, 4)) == fused((NOISE, 4)) != fused((NOISE, 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fused(), "write fused"),
        (
            lambda: fused((NOISE, 4)).encode(jnp.zeros(5), SHARED, PRIVATE),
            "bucket of 5 values, needs the 4",
        ),
    ],
)
def test_mistakes_are_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()
