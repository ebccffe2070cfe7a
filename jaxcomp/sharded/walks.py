"""A walk over layers of shards, which gathers ahead; it has one VJP.

The gather of a layer waits for the input of the layer `lookahead` places before it, and for nothing
later. So it can be sent while those layers compute, and no more layers than these are in memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.replicas.shards import is_shard, map_shards
from jaxcomp.replicas.types import vary_like
from jaxcomp.sharded.gathering import keep, receive, scatter, send, spread


class Walk(NamedTuple):
    """A function of one layer's whole parameters, and how layers are gathered for it."""

    function: Callable  # (params, x) -> x
    axes: tuple[str, ...]  # as in `QSDP.axes`
    secondary: bool  # whether what crossed the slow axis is kept between the passes
    lookahead: int
    dtype: Any = None  # as in `receive`


def walk(of: Walk) -> Callable:
    """`(trees, x) -> x`, for a list of trees of shards, one per layer, or one stacked tree."""
    run = jax.custom_vjp(lambda trees, x: _forward(of, trees, x)[0])
    run.defvjp(functools.partial(_forward, of), functools.partial(_backward, of))
    return run


class _Steps(NamedTuple):
    """One direction of a walk."""

    fetch: Callable  # (item, after, behind) -> fetched: the gather ahead, after other messages
    step: Callable  # (item, fetched, carry) -> (carry, out)
    lookahead: int
    finish: Callable | None = None  # (item, out) -> out: what may be sent while the next computes
    backwards: bool = False


def _forward(of, trees, x):
    def fetch(tree, after, behind):
        sent = send(_shards_in(tree), of.axes, after, behind)
        return spread(sent, of.axes), sent if of.secondary else None

    def step(tree, fetched, x):
        messages, kept = fetched
        return of.function(_whole(of, tree, messages), x), (x, kept)

    y, saved = _in_turn(_Steps(fetch, step, of.lookahead), trees, x, x)
    return y, (trees, saved, y if of.lookahead else None)


def _backward(of, saved, grad):
    trees, inputs, y = saved

    def fetch(item, after, behind):
        tree, (_, kept) = item
        own = _shards_in(tree)
        sent = send(own, of.axes, after, behind) if kept is None else keep(kept, own, after)
        return spread(sent, of.axes)

    def step(item, messages, grad):
        tree, (x, _) = item
        y, pull = jax.vjp(of.function, _whole(of, tree, messages), x)
        of_params, of_x = map(_of_floats, pull(_with_integers(grad, y)))
        return of_x, of_params

    def finish(item, of_params):
        """Sends gradients of sharded weights to their owners."""
        leaves, treedef = jax.tree.flatten(item[0], is_leaf=is_shard)
        places = [place for place, leaf in enumerate(leaves) if is_shard(leaf)]
        grads = treedef.flatten_up_to(of_params)
        shards = scatter(_shards_in(item[0]), of.axes, [grads[place] for place in places])
        for place, shard in zip(places, shards, strict=True):
            grads[place] = shard
        return treedef.unflatten(grads)

    items = list(zip(trees, inputs, strict=True)) if isinstance(trees, list) else (trees, inputs)
    steps = _Steps(fetch, step, of.lookahead, finish, backwards=True)
    if not of.lookahead:  # only one layer is in memory, and no other layer's gradient
        at_once = lambda *given: (lambda carry, out: (carry, finish(given[0], out)))(*step(*given))
        steps = _Steps(fetch, at_once, 0, backwards=True)
    # The first gathers wait only for the walk's result: they are sent while the loss is computed.
    of_x, of_trees = _in_turn(steps, items, _of_floats(grad), y)
    return of_trees, of_x


def _whole(of, tree, messages):
    received = iter(receive(_shards_in(tree), of.axes, messages, of.dtype))
    return map_shards(lambda _: next(received), tree)


def _in_turn(steps, items, carry, known):
    """Walks over all items; returns the last carry, and each item's `out` at its place.

    The first gathers, for the items that are fetched ahead, wait for `known`. Each is sent after
    the one before: otherwise XLA would combine two of them, and the first would wait for the
    second.
    """
    run = _over_list if isinstance(items, list) else _over_stack
    return run(steps, items, carry, known)


def _over_list(steps, items, carry, known):
    order = range(len(items))[:: -1 if steps.backwards else 1]
    outs, ahead = list(items), list[Any]()
    for index in order[: steps.lookahead]:
        ahead.append(steps.fetch(items[index], known, ahead[-1:]))
    for place, index in enumerate(order):
        for later in order[place + steps.lookahead :][:1]:
            ahead.append(steps.fetch(items[later], carry, ahead[-1:]))
        carry, out = steps.step(items[index], ahead.pop(0), carry)
        outs[index] = steps.finish(items[index], out) if steps.finish else out
    return carry, outs


class _State(NamedTuple):
    """The state of a walk over a stack."""

    carry: Any
    ahead: tuple[Any, ...]  # fetched and not used yet
    unfinished: Any  # the last item's out, if there is something to finish
    outs: Any  # of all items, stacked


def _over_stack(steps, items, carry, known):
    length = len(jax.tree.leaves(items)[0])
    lookahead = min(steps.lookahead, length)
    position = lambda place: length - 1 - place if steps.backwards else place
    at = lambda place: jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, position(place), keepdims=False), items
    )
    put = lambda outs, out, place: jax.tree.map(
        lambda all, one: lax.dynamic_update_index_in_dim(all, one, position(place), 0), outs, out
    )

    def one(state, place, first=False, last=False):
        carry, ahead, out, outs = state
        if not last:
            ahead = (*ahead, steps.fetch(at(place + lookahead), carry, ahead[-1:]))
        if steps.finish and not first:
            outs = put(outs, steps.finish(at(place - 1), out), place - 1)
        carry, out = steps.step(at(place), ahead[0], carry)
        if not steps.finish:
            out, outs = None, put(outs, out, place)
        return _State(carry, ahead[1:], out, outs), None

    ahead: tuple[Any, ...] = ()
    for place in range(lookahead):
        ahead = (*ahead, steps.fetch(at(place), known, ahead[-1:]))
    state = _State(carry, ahead, None, _places(steps, at(0), carry, length))
    # A loop runs the layers that both finish and fetch.
    begun = 1 if steps.finish and length > lookahead else 0
    if begun:
        state, _ = one(state, 0, first=True)
    if length - lookahead > begun:
        state, _ = lax.scan(one, state, jnp.arange(begun, length - lookahead))
    for place in range(max(begun, length - lookahead), length):
        state, _ = one(state, place, first=place == 0, last=True)
    if steps.finish:
        state = state._replace(
            outs=put(state.outs, steps.finish(at(length - 1), state.unfinished), length - 1)
        )
    return state.carry, state.outs


def _places(steps, item, carry, length):
    """Zeros for each item's `out`: a scan's own outputs would lack those of the last layers."""

    def out(item, carry):
        found = steps.step(item, steps.fetch(item, carry, ()), carry)[1]
        return steps.finish(item, found) if steps.finish else found

    return jax.tree.map(
        lambda out: vary_like(jnp.zeros((length, *out.shape), out.dtype), out),
        jax.eval_shape(out, item, carry),
    )


def _shards_in(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def _of_floats(grads):
    """Gradients without those of integers, which no loop can carry."""
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, grads)


def _with_integers(grads, like):
    """Undoes `_of_floats`; `like` has the tree of the differentiated values."""
    nothing = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    fill = lambda g, x: nothing(x) if g is None else g
    return jax.tree.map(fill, grads, like, is_leaf=lambda g: g is None)
