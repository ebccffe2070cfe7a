"""Trees of shards gathered: once, or as a layer that gathers again for its gradient."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax

from jaxcomp import buckets
from jaxcomp.gathering import keep, receive, send
from jaxcomp.shards import is_shard


def gather(
    tree: Any, axes: tuple[str, ...], messages: jax.Array | None = None, but: str | None = None
) -> Any:
    """A tree with its shards gathered, all in one message: see `QSDP.gather`.

    Args:
      tree: Shards with keys, among other leaves.
      axes: The mesh axes that shards are cut over, the slow one last.
      messages: Of these shards, from `send`; None: they are sent here.
      but: Pattern of the paths that stay shards.
    """
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)
    leaves = [leaf for _, leaf in keyed]
    chosen = [
        index
        for index, (path, leaf) in enumerate(keyed)
        if is_shard(leaf) and not (but and re.search(but, buckets.path_of(path)))
    ]
    if not chosen:
        return tree
    shards = [leaves[index] for index in chosen]
    messages = send(shards, axes) if messages is None else messages
    for index, value in zip(chosen, receive(shards, axes, messages), strict=True):
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
        return function(gather(shards, axes, messages), *args)

    @jax.custom_vjp
    def layer(shards, *args):
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

    layer.defvjp(forward, backward)
    return layer


def _shards_in(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]
