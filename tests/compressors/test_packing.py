"""Codes as bytes, and random bits as a stated hash."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomp.compressors.packing import fold, pack, packed_size, random_bits, uniform, unpack
from tests.helpers import reference
from tests.helpers.coding import QUICK, SHARED, make_key


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 32), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_packing_returns_every_code(bits, count, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, count, dtype=np.uint64)
    codes = jnp.asarray(codes.astype(np.uint8 if bits <= 8 else np.uint32))
    packed = jax.jit(functools.partial(pack, bits=bits), compiler_options=QUICK)(codes)
    assert packed.dtype == jnp.uint8 and packed.shape == (packed_size(count, bits),)
    assert math.ceil(count * bits / 8) <= packed.size <= count * bits / 8 + 3
    undo = functools.partial(unpack, bits=bits, count=count)
    np.testing.assert_array_equal(jax.jit(undo, compiler_options=QUICK)(packed), codes)


def test_random_bits_are_the_stated_hash():
    for seed in (0, 1, SHARED, 2**32 - 1):
        got = random_bits(make_key(seed), (5, 1000))
        np.testing.assert_array_equal(got.reshape(-1), reference.random_bits(seed, 5000))
    seed = fold(make_key(3, 9), 4, -1, jnp.int32(7)).seed
    assert int(seed) == reference.fold(3, 4, 2**32 - 1, 7)
    assert fold(make_key(3, 9), 4).count == 9


def test_random_bits_are_uniform_and_independent():
    streams = np.stack([uniform(make_key(seed), (2**16,)) for seed in (0, 1, SHARED)])
    assert streams.min() >= 0 and streams.max() < 1
    # Five standard errors, of a count of 1024 and of a correlation of 2**16 pairs.
    for stream in streams:
        counts = np.bincount((stream * 64).astype(int), minlength=64)
        assert np.all(np.abs(counts - 1024) < 5 * 32)
        assert abs(np.corrcoef(stream[1:], stream[:-1])[0, 1]) < 5 / 2**8
    assert np.all(np.abs(np.corrcoef(streams) - np.eye(3)) < 5 / 2**8)


def test_fold_separates_data_and_their_order():
    key = make_key(3)
    seeds = [fold(key, *data).seed for data in ((), (0,), (1,), (0, 1), (1, 0), (0, 0), (-1,))]
    assert len({int(seed) for seed in seeds}) == len(seeds)
