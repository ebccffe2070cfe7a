"""Trees of shards gathered: once, or as a layer that gathers again for its gradient."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.shards import is_shard, map_shards
from jaxcomp.sharded.gathering import keep, receive, send


def gather(tree: Any, axes: tuple[str, ...], but: str | None = None) -> Any:
    """A tree with its shards, which have keys, gathered: see `QSDP.gather`."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)
    leaves = [leaf for _, leaf in keyed]
    stacks: dict[tuple[int, ...], list[int]] = {}
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


class _Layer(NamedTuple):
    """A function of whole parameters, and how they are gathered."""

    function: Callable
    axes: tuple[str, ...]
    secondary: bool


def layer(function: Callable, axes: tuple[str, ...], secondary: bool) -> Callable:
    """A function of whole parameters as one of their shards, in both passes: see `QSDP.layer`.

    `secondary` says whether what crossed the slow axis is kept between the passes.
    """
    of = _Layer(function, axes, secondary)
    of_codes = jax.custom_vjp(lambda shards, *args: _forward(of, shards, *args)[0])
    of_codes.defvjp(functools.partial(_forward, of), functools.partial(_backward, of))
    whole = jax.checkpoint(function)

    def of_params(params, *args):
        return (of_codes if _shards_in(params) else whole)(params, *args)

    return of_params


def _forward(of, shards, *args):
    messages = send(_shards_in(shards), of.axes, args)
    kept = messages if of.secondary else None
    return _received(of, messages, shards, *args), (kept, shards, args)


def _backward(of, saved, grads):
    kept, shards, args = saved
    own = _shards_in(shards)
    messages = send(own, of.axes, grads) if kept is None else keep(kept, own, grads)
    return jax.vjp(functools.partial(_received, of, messages), shards, *args)[1](grads)


def _received(of, messages, shards, *args):
    received = iter(receive(_shards_in(shards), of.axes, messages))
    return of.function(map_shards(lambda _: next(received), shards), *args)


def _shards_in(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]
