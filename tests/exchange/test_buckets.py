"""Buckets: every pytree comes back as it was, whatever the cuts and the padding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcomp.compressors.policies import by_path, last_layers_first
from jaxcomp.exchange import buckets


def one_label(path, leaf):
    return "all"


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_tree_of_any_form_comes_back():
    leaves = [jnp.full((i % 7, 3), i, "bfloat16") for i in range(200)]
    tree = {"x": (jnp.arange(24.0).reshape(2, 3, 4), None, leaves), "y": {}, "z": jnp.float32(3)}
    plan = buckets.make_plan(tree, one_label, num_replicas=3, bucket_numel=500)
    assert_same(buckets.unflatten(plan, buckets.flatten(plan, tree)), tree)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(["bfloat16", "float16", "float32"])


class Model(NamedTuple):
    stem: jax.Array
    layers: list[jax.Array]
    bias: jax.Array


def test_layers_with_numbers_come_last_first_and_other_leaves_as_in_the_tree():
    def placed(tree):
        plan = buckets.make_plan(tree, one_label, 1, order=last_layers_first)
        [bucket] = plan.buckets
        return plan.reordered, [plan.paths[s.leaf] for s in bucket.segments]

    x = jnp.ones(3)
    paths = ["layers/1", "layers/0", "stem", "bias"]
    assert placed(Model(x, [x, x], x)) == (True, paths)
    assert placed(Model(x, [], x)) == (False, ["stem", "bias"])


@settings(max_examples=25, deadline=None)
@given(
    leaves=st.lists(st.tuples(shapes, dtypes, st.integers(0, 2)), min_size=1, max_size=8),
    num_replicas=st.integers(1, 8),
    bucket_numel=st.integers(1, 100),
    order=st.sampled_from([None, last_layers_first]),
)
def test_any_tree_comes_back_and_every_entry_lies_in_one_bucket(
    leaves, num_replicas, bucket_numel, order
):
    # Integers up to 255 are exact in all three types.
    tree = [(np.arange(np.prod(shape, dtype=int)) % 256).reshape(shape) for shape, _, _ in leaves]
    tree = [jnp.asarray(x, dtype) for x, (_, dtype, _) in zip(tree, leaves, strict=True)]
    labels = {str(i): label for i, (_, _, label) in enumerate(leaves)}
    label = lambda path, _: labels[path]
    plan = buckets.make_plan(tree, label, num_replicas, bucket_numel, order)
    flat = buckets.flatten(plan, tree)
    assert_same(buckets.unflatten(plan, flat), tree)

    covered = [np.zeros(x.size, int) for x in tree]
    for bucket, x in zip(plan.buckets, flat, strict=True):
        assert x.shape == (bucket.numel,) and x.dtype == jnp.float32
        assert bucket.numel % num_replicas == 0
        assert 0 < bucket.used <= bucket_numel
        np.testing.assert_array_equal(x[bucket.used :], 0)
        for leaf, start, stop in bucket.segments:
            assert labels[plan.paths[leaf]] == bucket.label
            covered[leaf][start:stop] += 1
    assert all((count == 1).all() for count in covered)


def test_entries_lie_in_order_of_leaves_within_a_label():
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0]), "c": jnp.array([4.0, 5.0])}
    plan = buckets.make_plan(tree, lambda path, leaf: path == "b", num_replicas=1, bucket_numel=3)
    assert [(b.label, b.segments) for b in plan.buckets] == [
        (False, ((0, 0, 2), (2, 0, 1))),
        (False, ((2, 1, 2),)),
        (True, ((1, 0, 1),)),
    ]
    flat = [x.tolist() for x in buckets.flatten(plan, tree)]
    assert flat == [[1.0, 2.0, 4.0], [5.0], [3.0]]


@pytest.mark.parametrize("numel", [1, 7, 100, 1000, 70_000, 300_000])
def test_padding_fits_every_number_of_replicas_and_is_small(numel):
    for num_replicas in range(1, 9):
        plan = buckets.make_plan(
            [jax.ShapeDtypeStruct((numel,), jnp.float32)], one_label, num_replicas
        )
        [bucket] = plan.buckets
        assert bucket.numel % num_replicas == 0
        padding = bucket.numel - numel
        # Up to one element a replica, or a 64th of the last chunk where whole blocks are cheap.
        assert 0 <= padding < max(num_replicas, bucket.numel / num_replicas / 64)


def test_large_chunks_are_whole_blocks():
    for num_replicas in range(1, 9):
        leaf = jax.ShapeDtypeStruct((2**22,), jnp.float32)
        [bucket] = buckets.make_plan([leaf], one_label, num_replicas, 2**22).buckets
        assert (bucket.numel // num_replicas) % 1024 == 0


def test_leaves_come_back_from_the_rows_of_a_bucket():
    # Of rows of ten entries each: leaves in one of them, in two, in three; one with an end.
    tree = [jnp.arange(4.0), jnp.arange(6.0), jnp.arange(12.0), jnp.arange(10.0), jnp.arange(28.0)]
    plan = buckets.make_plan(tree, one_label, 6)
    [flat] = buckets.flatten(plan, tree)
    assert_same(buckets.unflatten(plan, [flat.reshape(6, -1)]), tree)


def test_buckets_of_tpus_have_tile_after_tile(monkeypatch):
    monkeypatch.setattr(buckets, "platform", lambda: "tpu")
    matrix = np.arange(3.0 * 16 * 256).reshape(3, 16, 256)
    tree = [jnp.array(matrix), jnp.ones((9, 128)), jnp.ones((8, 100)), jnp.arange(128.0)]
    plan = buckets.make_plan(tree, one_label, 2)
    [flat] = buckets.flatten(plan, tree)
    tiles = [layer[i : i + 8, j : j + 128] for layer in matrix for i in (0, 8) for j in (0, 128)]
    np.testing.assert_array_equal(flat[: matrix.size], np.ravel(tiles))
    assert_same(buckets.unflatten(plan, [flat]), tree)


def test_boundaries_do_not_depend_on_the_number_of_replicas():
    tree = [jnp.zeros(100), jnp.zeros((30, 7)), jnp.zeros(999)]
    plans = [buckets.make_plan(tree, one_label, n, bucket_numel=256) for n in range(1, 9)]
    assert len({tuple(b.segments for b in plan.buckets) for plan in plans}) == 1


def test_a_plan_is_hashable_and_equal_for_equal_shapes():
    tree = {"a": jnp.ones((4, 3)), "b": jnp.ones(5, "bfloat16")}
    shapes = jax.eval_shape(lambda: tree)
    plans = [buckets.make_plan(t, one_label, 2) for t in (tree, shapes)]
    assert len(set(plans)) == 1
    assert buckets.make_plan(tree, one_label, 4) != plans[0]


def test_dtypes_can_be_kept_wide():
    tree = [jnp.ones(3, "bfloat16")]
    plan = buckets.make_plan(tree, one_label, 1)
    [x] = buckets.unflatten(plan, buckets.flatten(plan, tree), [jnp.float32])
    assert x.dtype == jnp.float32


def test_norms_biases_and_small_leaves_travel_exact():
    def exact(*shape):
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
        return buckets.small_or_vector("replica")("any/path", leaf)

    assert [exact(), exact(10**6), exact(31, 33), exact(0, 5)] == [True] * 4
    assert [exact(32, 32), exact(2, 2, 256), exact(1024, 1)] == [False] * 3


def test_the_first_rule_that_matches_wins():
    policy = by_path(("embed", 1), ("block_0/", 2), ("kernel$", 3))
    assert policy("block_0/embed", None) == 1
    assert policy("block_0/up/kernel", None) == 2
    assert policy("block_1/up/kernel", None) == 3
    with pytest.raises(
        ValueError, match=r"no rule covers the leaf 'block_1/bias'.*kernel\$.*'\.\*'"
    ):
        policy("block_1/bias", None)


def test_paths_are_readable():
    tree = {"params": {"block_0": [jnp.zeros(2), jnp.zeros(2)]}}
    plan = buckets.make_plan(tree, one_label, 1)
    assert plan.paths == ("params/block_0/0", "params/block_0/1")


@pytest.mark.parametrize("tree", [{}, [], None, {"a": None}])
def test_a_tree_without_leaves_is_refused(tree):
    with pytest.raises(ValueError, match="without leaves; give the gradients"):
        buckets.make_plan(tree, one_label, 2)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_leaves_that_are_not_floating_are_refused_by_name(dtype):
    tree = {"w": jnp.zeros(3), "step": {"count": jnp.zeros(3, dtype)}}
    instead = "jax.lax.complex" if dtype == "complex64" else "keep such leaves out of"
    with pytest.raises(ValueError, match=f"'step/count' has dtype {dtype}.*{instead}"):
        buckets.make_plan(tree, one_label, 2)


def test_a_bucket_holds_at_least_one_element():
    with pytest.raises(ValueError, match="bucket_numel is 0; write at least 1"):
        buckets.make_plan([jnp.zeros(3)], one_label, 2, bucket_numel=0)
