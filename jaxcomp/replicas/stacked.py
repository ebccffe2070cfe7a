"""Stacked layers: transformations see the layers that one array holds one by one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.wrapping import with_extra_args


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
      A `GradientTransformationExtraArgs`. In a tree whose leaves are all stacked alike, layer
      follows layer; paths have the layer's number after the tree's name, as in
      `blocks/0/up/kernel`. The state has the shapes of the stacked parameters, or one tree per
      layer where layers differ, for example under a policy that treats them differently. Programs
      are as long as those of the unstacked model.

    Raises:
      ValueError: At trace time, for a stacked leaf without axes, or if no leaf is stacked.

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
        unstacked = _split((), tree, stacked)
        if not any(map(_is_unstacked, jax.tree.leaves(unstacked, is_leaf=_is_unstacked))):
            paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
            raise ValueError(
                f"per_layer got no stacked leaf among {paths}; write a rule that matches some: "
                'jaxcomp.by_path(("^blocks/", True), (".*", False)), or leave per_layer out.'
            )
        return unstacked

    def init(params):
        return jax.tree.map(_joined, tx.init(split(params)), is_leaf=_is_unstacked)

    def update(updates, state, params=None, **extra_args):
        updates = split(updates)
        like = jax.eval_shape(tx.init, updates if params is None else split(params))
        nodes, treedef = jax.tree.flatten(like, is_leaf=_is_unstacked)
        state = treedef.unflatten(map(_apart, nodes, treedef.flatten_up_to(state)))
        params = None if params is None else split(params)
        updates, state = tx.update(updates, state, params, **extra_args)
        return jax.tree.map(_joined, (updates, state), is_leaf=_is_unstacked)

    return optax.GradientTransformationExtraArgs(init, update)


def _split(path, tree, stacked):
    """The tree with `Unstacked` in place of the largest subtrees of leaves stacked alike."""
    lengths = {}
    for key, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_of((*path, *key))
        is_stacked = stacked(name, leaf)
        if is_stacked and not leaf.ndim:
            raise ValueError(
                f"the leaf {name!r} has no axes and cannot be stacked; write rules for per_layer "
                "that leave it out."
            )
        lengths[leaf.shape[0] if is_stacked else None] = name
    if not set(lengths) - {None}:
        return tree
    if len(lengths) == 1:
        return _unstacked(tree, *lengths)
    children, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return treedef.unflatten([_split((*path, *key), child, stacked) for key, child in children])


def _unstacked(tree, length):
    """One tree per layer, from a tree whose leaves hold all layers."""
    one = lambda i: jax.tree.map(lambda x: lax.index_in_dim(x, i, keepdims=False), tree)
    return Unstacked(map(one, range(length)))


def _joined(node):
    """Stacks layers that are alike; returns anything else as it is."""
    if not _is_unstacked(node) or not _alike(node.trees):
        return node
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *node.trees)


def _apart(like, node):
    """Undoes `_joined`; `like` is the node before it."""
    if not _is_unstacked(like) or not _alike(like.trees):
        return node
    return _unstacked(node, len(like.trees))


def _alike(trees) -> bool:
    kind = lambda tree: (
        jax.tree.structure(tree),
        [(x.shape, x.dtype) for x in jax.tree.leaves(tree)],
    )
    first, *others = map(kind, trees)
    return all(other == first for other in others)


def _is_unstacked(node) -> bool:
    return isinstance(node, Unstacked)
