"""Layers that one array holds: tree nodes for them, and what shows a transformation each layer."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.protocol import with_extra_args


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
    """A subtree of stacked leaves as a sequence of trees, one per layer; a pytree node.

    It remembers the stacked tree that the layers were taken from, until something maps it.
    """

    def __init__(self, trees: Any, whole: Any = None):
        self.trees, self.whole = tuple(trees), whole

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.SequenceKey(i), tree) for i, tree in enumerate(self.trees)], None

    @classmethod
    def tree_unflatten(cls, _, trees):
        return cls(trees)


def unstacked(tree: Any, length: int) -> Unstacked:
    """One tree per layer, from a tree whose leaves hold all layers."""
    one = lambda i: jax.tree.map(lambda x: lax.index_in_dim(x, i, keepdims=False), tree)
    return Unstacked(map(one, range(length)), tree)


def in_batches(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Gives a transformation that knows of stacks the arrays that `per_layer` took apart.

    It may stand anywhere inside `per_layer`: in a chain, in `optax.partition`, in `local_steps`.
    Where nothing has changed the layers since, no array is cut or joined.

    Args:
      tx: Takes `Stacked` nodes, and treats their layers as separate leaves. If it raises
        `LayersDiffer`, it gets the layers one by one.

    Returns:
      A transformation of the same layers with the same state.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        with contextlib.suppress(LayersDiffer):
            return _taken_apart(tx.init(_stacked(params)))
        return tx.init(params)

    def update(updates, state, params=None, **extra_args):
        with contextlib.suppress(LayersDiffer):
            trees = map(_stacked, (updates, state, params))
            return _taken_apart(tx.update(*trees, **extra_args))
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def layer_by_layer(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Shows a transformation the layers of `Stacked` nodes one by one: the reverse."""
    tx = optax.with_extra_args_support(tx)

    def update(updates, state, params=None, **extra_args):
        with_extra = functools.partial(tx.update, **extra_args)
        return one_by_one(with_extra, updates, state, params)

    return optax.GradientTransformationExtraArgs(functools.partial(one_by_one, tx.init), update)


def one_by_one(function: Callable[..., Any], *trees: Any) -> Any:
    """What a function makes of trees in which it sees the layers of `Stacked` nodes one by one."""
    if not any(map(is_stack, _paths(trees))):
        return function(*trees)
    return _stacked(function(*map(_taken_apart, trees)))


def _stacked(tree):
    """The tree with `Stacked` nodes in place of `Unstacked` ones whose layers are alike."""

    stacked = lambda node: Stacked(_restacked(node), len(node.trees)) if _fits(node) else node
    return jax.tree.map(stacked, tree, is_leaf=_is_unstacked)


def _taken_apart(tree):
    """The tree with `Unstacked` nodes in place of `Stacked` ones."""
    apart = lambda node: unstacked(node.tree, node.length) if isinstance(node, Stacked) else node
    return jax.tree.map(apart, tree, is_leaf=lambda node: isinstance(node, Stacked))


def numbers(tree: Any) -> list[list[int]]:
    """The numbers that each leaf's layers have among the leaves of the unstacked tree."""
    found: list[list[int]] = []
    first = 0
    for node, group in itertools.groupby(_paths(tree), _node_of):
        size, length = len(list(group)), node[-1].length if is_stack(node) else 1
        found += [[first + layer * size + i for layer in range(length)] for i in range(size)]
        first += length * size
    return found


def _paths(tree):
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def _node_of(path):
    """The path of the `Stacked` node that a leaf lies in; of another leaf its own."""
    ends = [place + 1 for place, key in enumerate(path) if isinstance(key, _AllLayers)]
    return path[: ends[0]] if ends else path


def is_stack(key_path: Any) -> bool:
    """Whether a leaf lies in a `Stacked` node, so that its first axis counts layers."""
    return any(isinstance(key, _AllLayers) for key in key_path)


def own_axes(tree: Any) -> list[tuple[int, ...]]:
    """The axes of one layer, for each leaf: all axes, or all but the first in a `Stacked` node."""
    keyed = jax.tree.leaves_with_path(tree)
    return [tuple(range(is_stack(key_path), jnp.ndim(x))) for key_path, x in keyed]


def broadcast_over(value: jax.Array, x: jax.Array) -> jax.Array:
    """A value per layer, f32[] or f32[layers], with axes of length 1 to broadcast over `x`."""
    return value.reshape(*value.shape, *[1] * (x.ndim - value.ndim)) if value.ndim else value


def common_value(function: Callable[[str, Any], Any], key_path: Any, leaf: Any) -> Any:
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


def common_values(function: Callable[[Any], Any], tree: Any) -> Any:
    """Calls a function with the layers of a tree apart, and joins the equal values of a stack.

    Args:
      function: Maps a tree to a tree of the same structure, or to a prefix of one, of static
        values.
      tree: May have `Stacked` nodes; the function sees `Unstacked` ones.

    Raises:
      LayersDiffer: If the values of a stack's layers are not equal.
    """
    if not any(map(is_stack, _paths(tree))):
        return function(tree)  # of layers that are apart already

    def stacked(node):
        if not _is_unstacked(node):
            return node
        return Stacked(jax.tree.map(lambda *values: _only(values), *node.trees), len(node.trees))

    values = function(_taken_apart(tree))
    return jax.tree.map(stacked, values, is_leaf=_is_unstacked)


def _only(values):
    first, *others = values
    if any(other != first for other in others):
        raise LayersDiffer(f"the layers of one stack have different values: {values}.")
    return first


def per_layer(
    tx: optax.GradientTransformation, stacked: Callable[[str, Any], bool]
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation as if the layers of stacked parameters were leaves of their own.

    `nn.scan`, `nnx.scan` and `jax.vmap` keep the parameters of many layers in one array,
    `[layers, *shape]`. Anything that looks at whole leaves would take them for one layer: a trust
    ratio (LAMB), a variance floor, the mask of `slamb`, the rule that sends vectors in float32, an
    optax mask such as `ndim > 1`, a policy by path. Inside `per_layer` all of these see the
    unstacked model. Wrap the whole chain in it, or one method of the chain.

    Args:
      tx: Any transformation, from this library or from optax, or a chain.
      stacked: `(path, leaf) -> bool`, whether a leaf's first axis counts layers, for example
        `jaxcomp.by_path(("^blocks/", True), (".*", False))`. Each device must hold all of that
        axis: shard the others.

    Returns:
      A `GradientTransformationExtraArgs`. Paths have the layer's number after the name of the
      largest tree whose leaves are all stacked alike, as in `blocks/0/up/kernel`. The state has the
      shapes of the stacked parameters, or one tree per layer where layers differ, for example under
      a policy that treats them differently.

      Programs are as long as those of the unstacked model, and layer follows layer in the buckets.
      The exceptions are `power_sgd`, `dion`, `muon`, `local_steps`, `slamb` and `one_bit_lamb`,
      which compute with the stacked arrays wherever they stand; in buckets of the last two leaf
      follows leaf. Only if a policy, fragments or a mask of weight decay treat the layers of an
      array differently, they get the layers one by one, too.

    Raises:
      ValueError: At trace time, for a stacked leaf of no axes or layers, or if no leaf is.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> blocks = jaxcomp.by_path(("^blocks/", True), (".*", False))
      >>> tx = jaxcomp.per_layer(jaxcomp.slamb(1e-2, "replica"), blocks)
      >>> lamb = optax.chain(
      ...     jaxcomp.compressed_mean(jaxcomp.quantize(8), "replica"), optax.lamb(1e-2)
      ... )
      >>> tx = jaxcomp.per_layer(lamb, blocks)
    """
    tx = with_extra_args(tx, "per_layer")

    def split(tree):
        found = _split((), tree, stacked)
        if not any(map(_is_unstacked, jax.tree.leaves(found, is_leaf=_is_unstacked))):
            paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(tree)]
            raise ValueError(
                f"per_layer got no stacked leaf among {paths}; write a rule that matches some: "
                'jaxcomp.by_path(("^blocks/", True), (".*", False)), or leave per_layer out.'
            )
        return found

    def init(params):
        return jax.tree.map(_restacked, tx.init(split(params)), is_leaf=_is_unstacked)

    def update(updates, state, params=None, **extra_args):
        updates = split(updates)
        params = None if params is None else split(params)
        like = jax.eval_shape(tx.init, updates if params is None else params)
        nodes, treedef = jax.tree.flatten(like, is_leaf=_is_unstacked)
        state = treedef.unflatten(map(_apart, nodes, treedef.flatten_up_to(state)))
        updates, state = tx.update(updates, state, params, **extra_args)
        return jax.tree.map(_restacked, (updates, state), is_leaf=_is_unstacked)

    return optax.GradientTransformationExtraArgs(init, update)


def _split(path, tree, stacked):
    """The tree with `Unstacked` nodes in place of the largest subtrees of leaves stacked alike."""
    lengths: dict[Any, str] = {}
    for key, leaf in jax.tree.leaves_with_path(tree):
        name = path_of((*path, *key))
        is_stacked = stacked(name, leaf)
        if is_stacked and not (leaf.ndim and leaf.shape[0]):
            raise ValueError(
                f"the leaf {name!r} has no {'layers' if leaf.ndim else 'axes'} and cannot be "
                "stacked; write rules for per_layer that leave it out."
            )
        lengths[leaf.shape[0] if is_stacked else None] = name
    if not set(lengths) - {None}:
        return tree
    if len(lengths) == 1:
        return unstacked(tree, *lengths)
    children, treedef = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    split = lambda key, child: _split((*path, *key), child, stacked)
    return treedef.unflatten([split(key, child) for key, child in children])


def _restacked(node):
    """Stacks layers that are alike; returns anything else as it is."""
    if not _fits(node):
        return node
    if node.whole is not None:
        return node.whole
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *node.trees)


def _apart(like, node):
    """Undoes `_restacked`; `like` is the node before it."""
    return unstacked(node, len(like.trees)) if _fits(like) else node


def _fits(node) -> bool:
    """Whether a node has layers that one array can hold: of equal trees, shapes and dtypes."""
    if not _is_unstacked(node):
        return False
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    first, *others = ((jax.tree.structure(tree), shapes(tree)) for tree in node.trees)
    return all(other == first for other in others)


def _is_unstacked(node) -> bool:
    return isinstance(node, Unstacked)
