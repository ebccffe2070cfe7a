"""What random_k, top_k and group_top_1 keep."""

import math

import jax
import numpy as np
import pytest

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import random_bits
from jaxcomp.compressors.sparse import group_top_1, random_k, top_k
from tests.helpers.coding import as_for_tpus, bucket, decoded, drawn, make_key, roundtrip


@pytest.mark.parametrize("pattern", ["runs", "strided"])
@pytest.mark.parametrize("numel", [3, 1000, 10240, 51234])
def test_every_entry_comes_once_in_a_period(pattern, numel):
    x = np.arange(1, numel + 1, dtype="f4")
    total = sum(decoded(random_k(0.1, pattern), x, count) for count in range(37, 47))
    np.testing.assert_array_equal(total, x)


def test_a_key_may_hold_integers_of_python():
    code, x, key = random_k(0.5, "strided"), np.arange(1, 5, dtype="f4"), Key(3, 2**32 - 1)
    same = key._replace(seed=np.uint32(key.seed))
    draw = lambda: (random_bits(key, (4,)), random_bits(same, (4,)))
    kept, pair = jax.jit(lambda x: (code.decode(code.encode(x, key, key), key), draw()))(x)
    np.testing.assert_array_equal(kept, [0, 2, 0, 4])
    np.testing.assert_array_equal(*pair)


@pytest.mark.parametrize("numel", [3, 5, 800, 3072, 10 * 1024, 25 * 1024, 51234])
@pytest.mark.parametrize("code", [random_k(0.1), group_top_1(8)], ids=lambda code: code.name)
def test_a_tpu_picks_the_same_entries(code, numel, monkeypatch):
    x, keys = bucket(numel), (make_key(3, count=16), make_key(5))
    made = lambda: jax.jit(lambda x, *keys: roundtrip(code, x, *keys))(x, *keys)
    payload, sent = made()
    as_for_tpus(monkeypatch)
    of_tpu = made()
    for ours, wanted in zip(of_tpu[0].data, payload.data, strict=True):
        np.testing.assert_array_equal(ours, wanted)
    np.testing.assert_array_equal(of_tpu[1], sent)


def test_runs_are_whole_rows_of_neighbours():
    sent = decoded(random_k(0.25), np.ones(3 * 4096 + 40, "f4"), count=6)
    starts = np.flatnonzero(np.diff(sent, prepend=0) == 1)
    ends = np.flatnonzero(np.diff(sent, append=0) == -1) + 1
    first = np.array([2048, 4096 + 2048, 2 * 4096 + 2048, 3 * 4096 + 20])
    np.testing.assert_array_equal(starts, first)
    np.testing.assert_array_equal(ends - starts, [1024, 1024, 1024, 10])


def test_random_draws_every_entry_equally_often():
    seen = drawn(random_k(0.25, "random"), np.ones((1, 256), "f4"), 4000).mean(axis=0)
    # Five standard errors of a share of 1/4.
    np.testing.assert_allclose(seen, 0.25, atol=5 * math.sqrt(0.25 * 0.75 / 4000))


def test_top_k_and_group_top_1_keep_the_first_of_equals():
    x = np.array([1, -2, 2, 2, 0, 2, -1, 2], "f4")
    np.testing.assert_array_equal(decoded(top_k(0.25), x), [0, -2, 2, 0, 0, 0, 0, 0])
    # Where a bit mask travels: it marks no more than are sent.
    np.testing.assert_array_equal(decoded(top_k(0.5), x), [0, -2, 2, 2, 0, 2, 0, 0])
    assert decoded(top_k(0.375), x).tolist() == [0, -2, 2, 2, 0, 0, 0, 0]
    np.testing.assert_array_equal(decoded(group_top_1(8), x), [0, -2, 0, 0, 0, 0, 0, 0])
