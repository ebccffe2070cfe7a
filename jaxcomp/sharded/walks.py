"""Layers of shards in turn, gathered ahead of the one that computes: one VJP of the whole walk.

The gather of a layer waits for what enters the layer `lookahead` places before it on the walk, and
for nothing that is computed later. So it may travel while those layers compute, and no more layers
than these are held.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.replicas.shards import is_shard, map_shards
from jaxcomp.replicas.types import vary_like
from jaxcomp.sharded.gathering import keep, receive, send, spread


class Walk(NamedTuple):
    """A function of one layer's whole parameters, and how layers are gathered for it."""

    function: Callable  # (params, x) -> x
    axes: tuple[str, ...]  # as of `QSDP.axes`
    secondary: bool  # whether what crossed the slow axis is kept between the passes
    lookahead: int
    dtype: Any = None  # as of `receive`


def walk(of: Walk) -> Callable:
    """`(trees, x) -> x`, of a list of layers' trees of shards, or of one tree of stacked ones."""
    run = jax.custom_vjp(lambda trees, x: _forward(of, trees, x)[0])
    run.defvjp(functools.partial(_forward, of), functools.partial(_backward, of))
    return run


class _Steps(NamedTuple):
    """One direction of a walk."""

    fetch: Callable  # (item, after) -> fetched: what travels ahead
    step: Callable  # (item, fetched, carry) -> (carry, out)
    lookahead: int
    backwards: bool = False


def _forward(of, trees, x):
    def fetch(tree, after):
        sent = send(_shards_in(tree), of.axes, after)
        return spread(sent, of.axes), sent if of.secondary else None

    def step(tree, fetched, x):
        messages, kept = fetched
        return _computed(of, messages, tree, x), (x, kept)

    y, saved = _in_turn(_Steps(fetch, step, of.lookahead), trees, x, x)
    return y, (trees, saved, y if of.lookahead else None)


def _backward(of, saved, grad):
    trees, inputs, y = saved

    def fetch(item, after):
        tree, (_, kept) = item
        own = _shards_in(tree)
        sent = send(own, of.axes, after) if kept is None else keep(kept, own, after)
        return spread(sent, of.axes)

    def step(item, messages, grad):
        tree, (x, _) = item
        y, pull = jax.vjp(functools.partial(_computed, of, messages), tree, x)
        of_tree, of_x = pull(_with_integers(grad, y))
        return _of_floats(of_x), _of_floats(map_shards(_gradient_alone, of_tree))

    items = list(zip(trees, inputs, strict=True)) if isinstance(trees, list) else (trees, inputs)
    # The first gathers wait for the walk's result alone: they travel while the loss is computed.
    steps = _Steps(fetch, step, of.lookahead, backwards=True)
    of_x, of_trees = _in_turn(steps, items, _of_floats(grad), y)
    return of_trees, of_x


def _computed(of, messages, tree, x):
    received = iter(receive(_shards_in(tree), of.axes, messages, of.dtype))
    return of.function(map_shards(lambda _: next(received), tree), x)


def _in_turn(steps, items, carry, known):
    """Walks over all items: the last carry, and each item's `out` at its place.

    The first gathers, of as many items as are fetched ahead, wait for what is `known`, and for each
    other: the first one's codes are needed first.
    """
    run = _over_list if isinstance(items, list) else _over_stack
    return run(steps, items, carry, known)


def _over_list(steps, items, carry, known):
    order = range(len(items))[:: -1 if steps.backwards else 1]
    outs, ahead = list(items), list[Any]()
    for index in order[: steps.lookahead]:
        ahead.append(steps.fetch(items[index], (known, ahead)))
    for place, index in enumerate(order):
        for later in order[place + steps.lookahead :][:1]:
            ahead.append(steps.fetch(items[later], carry))
        carry, outs[index] = steps.step(items[index], ahead.pop(0), carry)
    return carry, outs


def _over_stack(steps, items, carry, known):
    length = len(jax.tree.leaves(items)[0])
    lookahead = min(steps.lookahead, length)

    def item_at(place):
        index = length - 1 - place if steps.backwards else place
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), items)

    def one(state, place, more):
        carry, ahead, outs = state
        if more:
            ahead = (*ahead, steps.fetch(item_at(place + lookahead), carry))
        carry, out = steps.step(item_at(place), ahead[0], carry)
        index = length - 1 - place if steps.backwards else place
        put = lambda all, one: lax.dynamic_update_index_in_dim(all, one, index, 0)
        return (carry, ahead[1:], jax.tree.map(put, outs, out)), None

    ahead: tuple[Any, ...] = ()
    for place in range(lookahead):
        ahead = (*ahead, steps.fetch(item_at(place), (known, ahead)))
    like = lambda item: steps.step(item, steps.fetch(item, carry), carry)[1]
    # Not as a scan's own outputs: the last layers, which fetch nothing more, add theirs.
    outs = jax.tree.map(
        lambda out: vary_like(jnp.zeros((length, *out.shape), out.dtype), out),
        jax.eval_shape(like, item_at(0)),
    )
    fetching = functools.partial(one, more=True)
    state, _ = lax.scan(fetching, (carry, ahead, outs), jnp.arange(length - lookahead))
    for place in range(length - lookahead, length):
        state, _ = one(state, place, more=False)
    return state[0], state[2]


def _shards_in(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def _gradient_alone(shard):
    return dataclasses.replace(shard, key=None, levels=None)


def _of_floats(grads):
    """Gradients without those of integers, which no loop can carry."""
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, grads)


def _with_integers(grads, like):
    """Undoes `_of_floats`, of gradients at what is `like`."""
    nothing = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    fill = lambda g, x: nothing(x) if g is None else g
    return jax.tree.map(fill, grads, like, is_leaf=lambda g: g is None)
