"""Stacks as nodes of trees: their axes, the paths of their layers, and rules that differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomp import by_path
from jaxcomp.replicas import layers
from jaxcomp.replicas.layers import LayersDiffer, Stacked

TREE = {
    "blocks": Stacked({"bias": np.ones((3, 4)), "kernel": np.ones((3, 4, 5))}, 3),
    "head": np.ones((4, 5)),
}
PATHS = [f"blocks/{i}/{name}" for name in ("bias", "kernel") for i in range(3)]


def test_a_stack_keeps_its_layers_when_it_is_mapped():
    doubled = jax.tree.map(lambda x: 2 * x, TREE)
    assert isinstance(doubled["blocks"], Stacked) and doubled["blocks"].length == 3
    np.testing.assert_array_equal(doubled["blocks"].tree["bias"], 2 * np.ones((3, 4)))


def test_the_axes_of_a_layer_leave_out_the_first_of_a_stack():
    assert layers.own_axes(TREE) == [(1,), (1, 2), (0, 1)]
    assert layers.own_axes(TREE["blocks"].tree) == [(0, 1), (0, 1, 2)]


def test_a_value_per_layer_spreads_over_its_entries():
    found = layers.broadcast_over(jnp.arange(3.0), jnp.ones((3, 4, 5))) * jnp.ones((3, 4, 5))
    assert [np.unique(x).tolist() for x in found] == [[0.0], [1.0], [2.0]]
    assert layers.broadcast_over(jnp.float32(2), jnp.ones((3, 4))).shape == ()


def test_rules_see_each_layer_by_its_path_and_shape():
    seen = {}

    def rule(path, leaf):
        seen[path] = leaf.shape
        return leaf.ndim

    keyed = jax.tree_util.tree_leaves_with_path(TREE)
    assert [layers.common_value(rule, *of) for of in keyed] == [1, 2, 2]
    assert list(seen) == [*PATHS, "head"]
    assert seen["blocks/1/bias"] == (4,) and seen["blocks/2/kernel"] == seen["head"] == (4, 5)


def test_layers_that_a_rule_treats_differently_are_told():
    (key_path, leaf), *_ = jax.tree_util.tree_leaves_with_path(TREE)
    with pytest.raises(LayersDiffer, match=r"different values: \[False, True, False\]"):
        layers.common_value(lambda path, leaf: "1" in path, key_path, leaf)


def test_a_function_of_a_tree_sees_layers_apart():
    many_axes = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    found = layers.common_values(many_axes, TREE)
    assert isinstance(found["blocks"], Stacked)
    assert found["blocks"].tree == {"bias": False, "kernel": True} and found["head"]
    prefix = layers.common_values(lambda tree: {"blocks": False, "head": True}, TREE)
    assert prefix == {"blocks": False, "head": True}

    def but_the_second(tree):
        flags = many_axes(tree)
        flags["blocks"].trees[1]["kernel"] = False
        return flags

    with pytest.raises(LayersDiffer):
        layers.common_values(but_the_second, TREE)


def test_a_method_in_batches_gets_the_arrays_themselves_in_a_chain():
    seen = []

    def update(updates, state, params=None, **_):
        seen.append(updates)
        return jax.tree.map(jnp.negative, updates), state

    inner = layers.in_batches(optax.GradientTransformation(lambda params: (), update))
    blocks = by_path(("^blocks/", True), (".*", False))
    tx = layers.per_layer(optax.chain(inner, optax.scale(2.0)), blocks)
    grads = {"blocks": {"w": jnp.arange(6.0).reshape(3, 2)}, "head": jnp.ones(2)}
    found, _ = tx.update(grads, tx.init(grads))
    assert seen[-1]["blocks"].tree["w"] is grads["blocks"]["w"]
    assert found["blocks"]["w"].tolist() == (-2 * grads["blocks"]["w"]).tolist()


def test_layers_have_the_numbers_of_the_unstacked_tree():
    stack = layers.Stacked({"a": jnp.ones((3, 1)), "b": jnp.ones((3, 1))}, 3)
    assert layers.numbers({"a": 0, "blocks": stack, "c": 0}) == [[0], [1, 3, 5], [2, 4, 6], [7]]
