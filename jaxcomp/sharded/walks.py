"""Gathers trees of shards: once, or layer after layer in a walk that gathers ahead.

A walk has one VJP. The gather of a layer waits for the input of the layer `lookahead` places before
it, and for nothing later. So it can be sent while those layers compute, and no more layers than
these are in memory.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.shards import is_shard, map_shards
from jaxcomp.replicas.types import to_varying, vary_like
from jaxcomp.sharded.gathering import keep, pass_on, receive, scatter, send, weight_dtype


def gather_tree(tree: Any, axes: tuple[str, ...], but: str | None = None) -> Any:
    """Gathers the shards of a tree, which must have keys; see `QSDP.gather`."""
    keyed, treedef = jax.tree.flatten_with_path(tree, is_leaf=is_shard)
    leaves = [leaf for _, leaf in keyed]
    stacks: dict[tuple[int, ...], list[int]] = {}
    for index, (path, leaf) in enumerate(keyed):
        if is_shard(leaf) and not (but and re.search(but, path_of(path))):
            stacks.setdefault(leaf.data.shape[:-1], []).append(index)
    one = lambda shards: receive(shards, axes, pass_on(send(shards, axes), axes))
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
    run_shards = _walk(_Walk(function, axes, secondary, lookahead, dtype))
    cast = lambda w: w.astype(weight_dtype(w.shape, w.dtype, dtype))
    run_whole = jax.checkpoint(lambda params, x: function(jax.tree.map(cast, params), x))

    def run(trees, x):
        found = [leaf for leaf in jax.tree.leaves(trees, is_leaf=is_shard) if is_shard(leaf)]
        if not isinstance(trees, list):
            _require_stacked(found)
        if found:
            return run_shards(trees, to_varying(x, axes))
        if not isinstance(trees, list):
            return lax.scan(lambda x, params: (run_whole(params, x), None), x, trees)[0]
        for params in trees:
            x = run_whole(params, x)
        return x

    return run


def _require_stacked(shards):
    if any(shard.data.ndim < 2 for shard in shards):
        raise ValueError(
            "got one tree of shards that are not stacked; give a list of trees, one per layer, or "
            "cut stacked parameters by fsdp.shard(params, mesh, stacked)."
        )
    if len(numbers := {shard.data.shape[0] for shard in shards}) > 1:
        raise ValueError(
            f"got one tree of stacks of {sorted(numbers)} layers, and a layer needs a slice of "
            "each; stack as many of all, or give a list of trees, one per layer."
        )


class _Walk(NamedTuple):
    """A function of one layer's whole parameters, and how layers are gathered for it."""

    function: Callable  # (params, x) -> x
    axes: tuple[str, ...]  # as in `QSDP.axes`
    secondary: bool  # whether what crossed the slow axis is kept between the passes
    lookahead: int
    dtype: Any = None  # as in `receive`


def _walk(walk: _Walk) -> Callable:
    """`(trees, x) -> x`, for a list of trees of shards, one per layer, or one stacked tree."""
    forward, backward = _forward_steps(walk), _backward_steps(walk)

    def run_forward(trees, x):
        y, saved = _in_turn(forward, trees, x, x)
        return y, (trees, saved, y if walk.lookahead else None)

    def run_backward(saved, grad):
        trees, inputs, y = saved
        listed = isinstance(trees, list)
        items = list(zip(trees, inputs, strict=True)) if listed else (trees, inputs)
        # The first gathers wait only for the walk's result: they are sent while the loss is
        # computed.
        x_grads, tree_grads = _in_turn(backward, items, _float_grads(grad), y)
        return tree_grads, x_grads

    run = jax.custom_vjp(lambda trees, x: run_forward(trees, x)[0])
    run.defvjp(run_forward, run_backward)
    return run


class _Steps(NamedTuple):
    """One direction of a walk. Layers alike are traced once, by `jax.jit`."""

    fetch: Callable  # (item, after, behind) -> fetched: the gather ahead, after other messages
    step: Callable  # (item, fetched, carry) -> (carry, out)
    lookahead: int
    finish: Callable | None = None  # (item, out) -> out: what may be sent while the next computes
    backwards: bool = False


def _forward_steps(walk):
    @jax.jit
    def fetch(tree, after, behind):
        sent = send(_shards_in(tree), walk.axes, after, behind)
        return pass_on(sent, walk.axes), sent if walk.secondary else None

    @jax.jit
    def step(tree, fetched, x):
        messages, kept = fetched
        return walk.function(_whole(walk, tree, messages), x), (x, kept)

    return _Steps(fetch, step, walk.lookahead)


def _backward_steps(walk):
    @jax.jit
    def fetch(item, after, behind):
        tree, (_, kept) = item
        own = _shards_in(tree)
        sent = send(own, walk.axes, after, behind) if kept is None else keep(kept, own, after)
        return pass_on(sent, walk.axes)

    @jax.jit
    def step(item, messages, grad):
        tree, (x, _) = item
        y, pull = jax.vjp(walk.function, _whole(walk, tree, messages), x)
        param_grads, x_grads = map(_float_grads, pull(_with_integers(grad, y)))
        return x_grads, param_grads

    @jax.jit
    def finish(item, param_grads):
        """Sends gradients of sharded weights to their owners."""
        leaves, treedef = jax.tree.flatten(item[0], is_leaf=is_shard)
        places = [place for place, leaf in enumerate(leaves) if is_shard(leaf)]
        grads = treedef.flatten_up_to(param_grads)
        shards = scatter(_shards_in(item[0]), walk.axes, [grads[place] for place in places])
        for place, shard in zip(places, shards, strict=True):
            grads[place] = shard
        return treedef.unflatten(grads)

    if walk.lookahead:
        return _Steps(fetch, step, walk.lookahead, finish, backwards=True)

    def step_and_finish(item, messages, grad):
        """Leaves only one layer in memory, and no other layer's gradient."""
        x_grads, param_grads = step(item, messages, grad)
        return x_grads, finish(item, param_grads)

    return _Steps(fetch, step_and_finish, 0, backwards=True)


def _whole(walk, tree, messages):
    received = iter(receive(_shards_in(tree), walk.axes, messages, walk.dtype))
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
        lambda out: vary_like(lax.full((length, *out.shape), 0, out.dtype), out),
        jax.eval_shape(out, item, carry),
    )


def _shards_in(tree):
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_shard) if is_shard(leaf)]


def _float_grads(grads):
    """Gradients without those of integers, which no loop can carry."""
    return jax.tree.map(lambda g: None if g.dtype == jax.dtypes.float0 else g, grads)


def _with_integers(grads, like):
    """Undoes `_float_grads`; `like` has the tree of the differentiated values."""
    nothing = lambda x: np.zeros(x.shape, jax.dtypes.float0)
    fill = lambda g, x: nothing(x) if g is None else g
    return jax.tree.map(fill, grads, like, is_leaf=lambda g: g is None)
