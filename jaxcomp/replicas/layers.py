"""Layers that one array holds: tree nodes for them, and what looks at one layer at a time."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.compressors.policies import path_of


class LayeredTransformation(optax.GradientTransformationExtraArgs):
    """A transformation that takes `Stacked` nodes, and treats their layers as separate leaves."""


class LayersDiffer(ValueError):
    """A rule treats the layers of a stack differently, so that they need arrays of their own."""


@dataclasses.dataclass(frozen=True)
class _AllLayers:
    """The key of a stack's arrays, where that of one layer would be its number."""

    length: int

    def __str__(self):
        return "*"


@jax.tree_util.register_pytree_with_keys_class
class Stacked:
    """A subtree whose leaves are `[length, *shape]`, one entry per layer; a pytree node."""

    def __init__(self, tree: Any, length: int):
        self.tree, self.length = tree, length

    def tree_flatten_with_keys(self):
        return [(_AllLayers(self.length), self.tree)], self.length

    @classmethod
    def tree_unflatten(cls, length, children):
        (tree,) = children
        return cls(tree, length)


@jax.tree_util.register_pytree_with_keys_class
class Unstacked:
    """A subtree of stacked leaves as a sequence of trees, one per layer; a pytree node."""

    def __init__(self, trees: Any):
        self.trees = tuple(trees)

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.SequenceKey(i), tree) for i, tree in enumerate(self.trees)], None

    @classmethod
    def tree_unflatten(cls, _, trees):
        return cls(trees)


def unstacked(tree: Any, length: int) -> Unstacked:
    """One tree per layer, from a tree whose leaves hold all layers."""
    one = lambda i: jax.tree.map(lambda x: lax.index_in_dim(x, i, keepdims=False), tree)
    return Unstacked(map(one, range(length)))


def is_stack(key_path: Any) -> bool:
    """Whether a leaf lies in a `Stacked` node, so that its first axis counts layers."""
    return any(isinstance(key, _AllLayers) for key in key_path)


def own_axes(tree: Any) -> list[tuple[int, ...]]:
    """The axes of one layer, for each leaf: all axes, or all but the first in a `Stacked` node."""
    keyed = jax.tree_util.tree_leaves_with_path(tree)
    return [tuple(range(is_stack(key_path), jnp.ndim(x))) for key_path, x in keyed]


def spread(value: jax.Array, x: jax.Array) -> jax.Array:
    """A value per layer, f32[] or f32[layers], with axes of length 1 to broadcast over `x`."""
    return value.reshape(*value.shape, *[1] * (x.ndim - value.ndim)) if value.ndim else value


def of_each_layer(function: Callable[[str, Any], Any], key_path: Any, leaf: Any) -> Any:
    """Calls `function(path, leaf)`, for a stack with the path and the shape of each layer.

    Raises:
      LayersDiffer: If the values of a stack's layers are not equal.
    """
    if not is_stack(key_path):
        return function(path_of(key_path), leaf)
    (length,) = (key.length for key in key_path if isinstance(key, _AllLayers))
    layer = jax.eval_shape(lambda x: lax.index_in_dim(x, 0, keepdims=False), leaf)
    number = lambda key, i: jax.tree_util.SequenceKey(i) if isinstance(key, _AllLayers) else key
    paths = [path_of([number(key, i) for key in key_path]) for i in range(length)]
    return _only([function(path, layer) for path in paths])


def of_all_layers(function: Callable[[Any], Any], tree: Any) -> Any:
    """Calls a function with the layers of a tree apart, and joins the equal values of a stack.

    Args:
      function: Maps a tree to a tree of the same structure, or to a prefix of one, of static
        values.
      tree: May have `Stacked` nodes; the function sees `Unstacked` ones.

    Raises:
      LayersDiffer: If the values of a stack's layers are not equal.
    """
    apart = lambda node: unstacked(node.tree, node.length) if isinstance(node, Stacked) else node
    of_nodes = lambda kind: {"is_leaf": lambda node: isinstance(node, kind)}

    def together(node):
        if not isinstance(node, Unstacked):
            return node
        return Stacked(jax.tree.map(lambda *values: _only(values), *node.trees), len(node.trees))

    values = function(jax.tree.map(apart, tree, **of_nodes(Stacked)))
    return jax.tree.map(together, values, **of_nodes(Unstacked))


def _only(values):
    first, *others = values
    if any(other != first for other in others):
        raise LayersDiffer(f"the layers of one stack have different values: {values}.")
    return first
