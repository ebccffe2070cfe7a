"""Masks: which leaves have one, and the mean at their entries alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.compressors.base import Key
from jaxcomp.exchange import averaging, buckets, masks, wire
from tests.helpers.coding import as_for_tpus
from tests.helpers.replicas import mesh_of, on, rows

TREE = {"bias": np.zeros(64, "f"), "kernel": np.zeros((8, 8), "f"), "small": np.zeros((2, 2), "f")}


def policy_of(code, exact_numel=16):
    is_whole = buckets.small_or_vector("replica", numel=exact_numel)
    return averaging.but_exact(wire.transport_of(code, "replica"), is_whole).code


def found_masks(code, exact_numel=16):
    found = {}

    def look(tree):
        found.update(masks.masks_of(tree, policy_of(code, exact_numel)))
        return tree

    on(mesh_of(2), look)(TREE | {"empty": np.zeros((0, 8), "f")})
    return found


def test_matrices_that_are_large_enough_have_masks():
    assert [path for path, mask in found_masks(jaxcomp.random_k(1 / 4)).items() if mask] == [
        "kernel"
    ]
    assert found_masks(jaxcomp.random_k(1 / 4), 4)["small"] is not None
    assert found_masks(jaxcomp.random_k(1 / 4), 65)["kernel"] is None
    assert found_masks(jaxcomp.random_k(1 / 4), 0)["empty"] is None
    assert not any(found_masks(jaxcomp.identity()).values())
    chain = jaxcomp.compose(jaxcomp.random_k(1 / 4), jaxcomp.quantize(8))
    assert found_masks(chain)["kernel"].values == jaxcomp.quantize(8)


@pytest.mark.parametrize("pattern", ["runs", "strided", "random"])
def test_each_layer_of_a_stack_has_a_mask(pattern):
    code, key = jaxcomp.random_k(1 / 4, pattern), Key(jnp.int32(1), jnp.uint32(7))
    x = 1 + jnp.arange(3 * 64, dtype=jnp.float32).reshape(3, 8, 8)
    mask = masks.Mask(code.selection, jaxcomp.identity(), is_stack=True)
    values = mask.select(x, key)
    found = np.asarray(mask.scatter(values, key, x))
    assert values.shape == (3, 16) and np.all(np.sum(found > 0, axis=(1, 2)) == 16)
    np.testing.assert_array_equal(found[found > 0], x[found > 0])
    # Entries that a count picks are the same in all layers; drawn ones are not.
    assert np.all((found > 0) == (found[:1] > 0)) == (pattern != "random")


@pytest.mark.parametrize("shape", [(3, 16, 256), (3, 40, 128), (3, 9, 128)])
@pytest.mark.parametrize("is_stack", [True, False])
def test_a_tpu_puts_entries_back_where_it_took_them(shape, is_stack, monkeypatch):
    as_for_tpus(monkeypatch)
    key, code = Key(jnp.int32(1), jnp.uint32(7)), jaxcomp.random_k(1 / 2)
    x = 1 + jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    mask = masks.Mask(code.selection, jaxcomp.identity(), is_stack)
    found = np.asarray(mask.scatter(mask.select(x, key), key, x))
    np.testing.assert_array_equal(found[found > 0], x[found > 0])
    layers = found.reshape(3 if is_stack else 1, -1)
    assert np.all(np.sum(layers > 0, axis=1) == mask.select(x, key).size // len(layers))


@pytest.mark.parametrize("code", [jaxcomp.top_k(0.1), jaxcomp.quantize(4)])
def test_entries_of_a_replicas_own_are_refused(code):
    with pytest.raises(ValueError, match="needs entries that all replicas pick alike"):
        found_masks(code)


def test_the_mean_is_taken_at_the_entries_of_the_mask_alone():
    own = {
        name: np.arange(2)[:, None] + np.arange(2 * x.size).reshape(2, -1)
        for name, x in TREE.items()
    }
    own = {name: x.reshape(2, *TREE[name].shape).astype("f") for name, x in own.items()}
    transport = wire.transport_of(
        jaxcomp.two_shot(jaxcomp.identity(), bucket_numel=1024), "replica"
    )

    def step(tree):
        tree = jax.tree.map(lambda x: x[0], tree)
        of = masks.masks_of(tree, policy_of(jaxcomp.random_k(1 / 4)))
        done = masks.mean_on_masks(of, "part", jax.tree.leaves(tree), transport, jnp.int32(1))
        where = jnp.zeros((1, 64)) if done.on[1] is None else done.on[1].reshape(1, -1)
        return [x[None] for x in done.tree], where

    (bias, kernel, small), where = on(mesh_of(2), step, P("replica"), (P("replica"), P(None)))(
        rows(mesh_of(2), own)
    )
    mask = np.asarray(where).reshape(8, 8)
    assert mask.sum() == 16
    for got, wanted in ((bias, own["bias"]), (small, own["small"])):
        np.testing.assert_array_equal(got, np.stack([wanted.mean(axis=0)] * 2))
    np.testing.assert_array_equal(kernel[:, mask], np.stack([own["kernel"][:, mask].mean(0)] * 2))
    np.testing.assert_array_equal(kernel[:, ~mask], own["kernel"][:, ~mask])
