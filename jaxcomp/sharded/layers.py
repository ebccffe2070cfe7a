"""Gathers trees of shards: once, or as layers that gather again in the backward pass."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.shards import is_shard
from jaxcomp.replicas.types import to_varying
from jaxcomp.sharded import walks
from jaxcomp.sharded.gathering import receive, send, spread, weight_dtype


def gather(tree: Any, axes: tuple[str, ...], but: str | None = None) -> Any:
    """Gathers the shards of a tree, which must have keys; see `QSDP.gather`."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)
    leaves = [leaf for _, leaf in keyed]
    stacks: dict[tuple[int, ...], list[int]] = {}
    for index, (path, leaf) in enumerate(keyed):
        if is_shard(leaf) and not (but and re.search(but, path_of(path))):
            stacks.setdefault(leaf.data.shape[:-1], []).append(index)
    one = lambda shards: receive(shards, axes, spread(send(shards, axes), axes))
    for stack, chosen in stacks.items():
        shards = [leaves[index] for index in chosen]
        values = lax.map(one, shards) if stack else one(shards)
        for index, value in zip(chosen, values, strict=True):
            leaves[index] = value
    return treedef.unflatten(leaves)


def layer(
    function: Callable, axes: tuple[str, ...], secondary: bool, dtype: Any = None
) -> Callable:
    """Turns a function of whole parameters into one of shards, in both passes; see `QSDP.layer`.

    `secondary` says whether what crossed the slow axis is kept between the passes.
    """
    run = layers(lambda params, args: function(params, *args), axes, secondary, 0, dtype)
    return lambda params, *args: run([params], args)


def layers(
    function: Callable, axes: tuple[str, ...], secondary: bool, lookahead: int, dtype: Any = None
) -> Callable:
    """Runs layers in order, and gathers some ahead; see `QSDP.layers`."""
    of_codes = walks.walk(walks.Walk(function, axes, secondary, lookahead, dtype))
    cast = lambda w: w.astype(weight_dtype(w.shape, w.dtype, dtype))
    of_whole = jax.checkpoint(lambda params, x: function(jax.tree.map(cast, params), x))

    def run(trees, x):
        found = [leaf for leaf in jax.tree.leaves(trees, is_leaf=is_shard) if is_shard(leaf)]
        if not isinstance(trees, list):
            _require_stacked(found)
        if found:
            return of_codes(trees, to_varying(x, axes))
        if not isinstance(trees, list):
            return lax.scan(lambda x, params: (of_whole(params, x), None), x, trees)[0]
        for params in trees:
            x = of_whole(params, x)
        return x

    return run


def _require_stacked(shards):
    if any(shard.data.ndim < 2 for shard in shards):
        raise ValueError(
            "got one tree of shards that are not stacked; give a list of trees, one per layer, or "
            "cut stacked parameters by fsdp.shard(params, mesh, stacked)."
        )
