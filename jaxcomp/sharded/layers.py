"""Trees of shards gathered: once, or as a layer that gathers again for its gradient."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.shards import is_shard, map_shards
from jaxcomp.sharded.gathering import keep, receive, send


def gather(tree: Any, axes: tuple[str, ...], but: str | None = None) -> Any:
    """A tree with its shards gathered: see `QSDP.gather`.

    Args:
      tree: Shards with keys, among other leaves.
      axes: The mesh axes that shards are cut over, the slow one last.
      but: Pattern of the paths that stay shards.
    """
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)
    leaves, stacks = [leaf for _, leaf in keyed], {}
    for index, (path, leaf) in enumerate(keyed):
        if is_shard(leaf) and not (but and re.search(but, path_of(path))):
            stacks.setdefault(leaf.data.shape[:-1], []).append(index)
    one = lambda shards: receive(shards, axes, send(shards, axes))
    for stack, chosen in stacks.items():
        shards = [leaves[index] for index in chosen]
        values = lax.map(one, shards) if stack else one(shards)
        for index, value in zip(chosen, values, strict=True):
            leaves[index] = value
    return treedef.unflatten(leaves)


def layer(function: Callable, axes: tuple[str, ...], secondary: bool) -> Callable:
    """A function of whole parameters as one of their shards, in both passes: see `QSDP.layer`.

    Args:
      function: Of a tree of parameters and further arguments.
      axes: As for `gather`.
      secondary: Whether what crossed the slow axis is kept between the passes.
    """

    def of_shards(messages, shards, *args):
        received = iter(receive(_shards_in(shards), axes, messages))
        return function(map_shards(lambda _: next(received), shards), *args)

    @jax.custom_vjp
    def of_codes(shards, *args):
        return forward(shards, *args)[0]

    def forward(shards, *args):
        messages = send(_shards_in(shards), axes, args)
        kept = messages if secondary else None
        return of_shards(messages, shards, *args), (kept, shards, args)

    def backward(saved, grads):
        kept, shards, args = saved
        own = _shards_in(shards)
        messages = send(own, axes, grads) if kept is None else keep(kept, own, grads)
        return jax.vjp(functools.partial(of_shards, messages), shards, *args)[1](grads)

    of_codes.defvjp(forward, backward)

    def layer(params, *args):
        return (of_codes if _shards_in(params) else jax.checkpoint(function))(params, *args)

    return layer


def _shards_in(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]
