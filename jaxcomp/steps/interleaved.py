"""A step that overlaps exchange and gradient in one program.

If a method does not exchange this step's gradient, the forward pass runs between the start and
the end of the first messages, and the backward pass between those of the second.

Compilers do not find this order on their own: they optimize for memory, or assume fast links.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P

from jaxcomp.exchange.journeys import Pace
from jaxcomp.replicas.specs import over_others, over_some
from jaxcomp.replicas.state import add_drifts
from jaxcomp.replicas.types import names_of, tied, to_varying, varying_axes, zeros_of
from jaxcomp.steps.gradient import (
    Given,
    Gradient,
    added,
    in_rows,
    loss_of_part,
    no_gradients,
    own_batch,
    parts_of,
    placed_given,
    specs_of_extra,
)
from jaxcomp.steps.loss import Extra, own_floats, require_local
from jaxcomp.steps.placing import over_axes
from jaxcomp.steps.update import Update, local_update, own_params, update_specs, with_shares

_HOP = "jaxcomp_hop"  # the name of a message's function, where stages are cut


def interleaved(
    gradient: Gradient, update: Update, params: Any, state: Any, given: Given, extra_args: Any
) -> tuple[Any, Any, jax.Array, jax.Array, Extra]:
    """A whole step, inside `shard_map`: `(params, state, skipped, losses, extra)`.

    For a mesh with only the axes of the replicas and their devices, which are manual throughout;
    `interleaved_shards` is for others. Arguments are those of the two halves of a step.
    """
    parts = Parts(*halves(gradient, params, given))
    made = iter(exchanged(update, params, state, parts.pace, extra_args))
    loss, extra, grads = parts.finished()
    require_local(loss, *names_of(gradient.axis_name))
    rows, ahead = jax.tree.map(lambda g: g[None], grads), lambda make: next(made)
    new = local_update(update, params, state, rows, loss[None], extra_args, ahead=ahead)
    return *new, loss[None], in_rows(gradient, extra)


def exchanged(
    update: Update, params: Any, state: Any, pace: Pace | None = None, extra_args: Any = None
) -> list[Any]:
    """The exchanges that an update makes ahead of the gradient, in order.

    Runs inside `shard_map`. Empty for a method that exchanges nothing ahead.
    """
    made = []

    def record(make):
        made.append(make() if pace is None else make(pace))
        return made[-1]

    params = own_params(update, params)
    grads = to_varying(jax.tree.map(jnp.zeros_like, params), update.axis_name)
    # The rest is never computed: it does not reach the program's results.
    given = {"axis_name": update.axis_name, "value": jnp.zeros([])} | (extra_args or {})
    update.tx.update(grads, state, params, ahead=record, **given)
    return made


class Parts:
    """A computation in parts, each of which may run while messages are sent.

    Args:
      start: Argument of the first part.
      parts: Functions; each takes the result of the one before.
    """

    def __init__(self, start: Any, *parts: Callable[[Any], Any]):
        self._value, self._parts = start, list(parts)

    def pace(self, travel, messages):
        """Sends messages, and computes the next part between their start and their end."""
        if not self._parts:
            return travel(messages)
        # The messages bypass the barrier: XLA:GPU starts a message as soon as it is computed, but
        # schedules a barrier's outputs late, which was after the part.
        _, value = tied(messages, self._value)
        received, self._value = tied(travel(messages), self._parts.pop(0)(value))
        return received

    def finished(self) -> Any:
        """The result of the last part; runs the parts that have not run yet."""
        while self._parts:
            self._value = self._parts.pop(0)(self._value)
        return self._value


def halves(gradient, params, given):
    """`(start, first, second)`: the gradient as a forward and a backward pass, or microbatches.

    Drifts are added in the first part. Before it, a barrier would make XLA write the sums.
    """
    batch, drifts = own_batch(gradient, given.batch), given.drifts
    model_state = own_floats(given.model_state, gradient.axis_name)
    loss_of = loss_of_part(gradient, batch, given.rng)
    if gradient.accumulate > 1:
        return _half_the_microbatches(gradient, loss_of, params, drifts, batch, model_state)

    def forward(inputs):
        params, drifts, batch, model_state = inputs
        loss_at = lambda params: loss_of(params, 0, batch, model_state)
        return jax.vjp(loss_at, add_drifts(params, drifts, gradient.axis_name), has_aux=True)

    def backward(passed):
        loss, pullback, extra = passed
        (grads,) = pullback(zeros_of(loss) + 1)
        return loss, extra._replace(aux=jax.tree.map(lambda x: x[None], extra.aux)), grads

    return (params, drifts, batch, model_state), forward, backward


def _half_the_microbatches(gradient, loss_of, params, drifts, batch, model_state):
    count = gradient.accumulate
    parts = parts_of(gradient, batch)
    cut = lambda *ends: jax.tree.map(lambda x: x[slice(*ends)], parts)

    def at(local):
        grad = jax.value_and_grad(loss_of, has_aux=True)
        return lambda *part: grad(local, *part)

    def first(inputs):
        params, drifts, model_state, parts, later = inputs
        local = add_drifts(params, drifts, gradient.axis_name)
        return *added(at(local), (no_gradients(local), model_state), parts), local, later

    def second(passed):
        carry, seen, local, later = passed
        (total, model_state), rest = added(at(local), carry, later)
        losses, aux = jax.tree.map(lambda *x: jnp.concatenate(x), seen, rest)
        grads = jax.tree.map(lambda t: t / count, total)
        return jnp.mean(losses), Extra(aux, model_state), grads

    return (params, drifts, model_state, cut(count // 2), cut(count // 2, count)), first, second


def interleaved_shards(
    gradient: Gradient, update: Update, params: Any, state: Any, given: Given, extra_args: Any
) -> tuple[Any, Any, jax.Array, jax.Array, Extra]:
    """As `interleaved`, for global arrays on a mesh that also has other axes.

    XLA partitions the loss over these, so they may not be manual there; an exchange needs them
    manual. So the exchange is cut into stages at its hops, each of which makes all axes manual.
    Without the stages XLA computes nothing beside the messages: compiled for H100, no matrix
    product of the gradient lies between the start and the end of one, with either scheduler.
    """
    names = names_of(gradient.axis_name)
    given, given_specs = placed_given(gradient, given)
    specs = update_specs(update, params)
    made = P(), P(names), specs_of_extra(gradient, given.model_state)
    own = functools.partial(
        _in_shards, gradient, with_shares(update, params), over_others(specs, names)
    )
    over_replicas = over_some(specs, names)
    whole = over_axes(
        gradient.mesh,
        names,
        own,
        in_specs=(*over_replicas, over_some(given_specs, names), P()),
        out_specs=(*over_replicas, *made),
        full_out_specs=(*specs, *made),
    )
    return whole(params, state, given, extra_args)


def _in_shards(gradient, update, specs, params, state, given, extra_args):
    others = _others(gradient)
    parts = Parts(*halves(gradient, params, given))
    ahead = lambda params, state, extra: exchanged(update, params, state, cut_here, extra)
    extra_args_specs = jax.tree.map(lambda _: P(), extra_args)
    args_specs = *specs, extra_args_specs
    made = in_stages(ahead, others, args_specs, parts.pace, params, state, extra_args)
    loss, extra, grads = parts.finished()
    require_local(loss, *names_of(gradient.axis_name))

    def updated(params, state, grads, loss, extra_args, arrays):
        own = iter(inside(made, arrays))
        rows = jax.tree.map(lambda g: g[None], grads)
        ahead = lambda make: next(own)
        return local_update(update, params, state, rows, loss[None], extra_args, ahead=ahead)

    is_value = lambda x: isinstance(x, Value)
    arrays, made_specs = (
        jax.tree.map(lambda value, at=at: value[at], made, is_leaf=is_value) for at in (0, 1)
    )
    params_specs, own_state_specs = specs
    new = jax.shard_map(
        updated,
        in_specs=(params_specs, own_state_specs, params_specs, P(), extra_args_specs, made_specs),
        out_specs=(params_specs, own_state_specs, P()),
        axis_names=set(others),
    )(params, state, grads, loss, extra_args, arrays)
    return *new, loss[None], in_rows(gradient, extra)


def _others(gradient):
    """The mesh axes that XLA partitions over."""
    mine = names_of(gradient.axis_name)
    return tuple(name for name in gradient.mesh.axis_names if name not in mine)


class Value(NamedTuple):
    """How an array outside `shard_map` is cut inside it."""

    array: jax.Array
    spec: P  # over the axes
    is_row: bool = False  # whether it is a scalar, which got an axis for `shard_map`


def cut_here(travel: Callable[[list[Any]], list[Any]], messages: list[Any]) -> list[Any]:
    """The pace of journeys inside `in_stages`: each hop is a stage."""

    def hop(messages):
        return travel(messages)

    hop.__name__ = _HOP
    return jax.jit(hop)(messages)


def in_stages(
    function: Callable[..., Any], axes: tuple[str, ...], in_specs: Any, pace: Pace, *args: Any
) -> Any:
    """Runs a function inside `shard_map` over further axes, and leaves that at each message.

    It is traced once, and evaluated stage by stage, so no value is computed twice.

    Args:
      function: Takes shards; its journeys have the pace `cut_here`.
      axes: Mesh axes that are not manual yet.
      in_specs: PartitionSpecs of the arguments over these axes, a tree like the arguments.
      pace: What is computed outside the axes while messages are sent.
      *args: The arguments.

    Returns:
      The function's result, each array as a `Value`, which `inside` undoes.
    """
    manual = functools.partial(jax.shard_map, axis_names=set(axes))
    jaxpr, treedef = _traced(function, manual, in_specs, args)
    flat = zip(jax.tree.leaves(args), jax.tree.leaves(in_specs), strict=True)
    known = dict(zip(jaxpr.jaxpr.invars, (Value(x, spec) for x, spec in flat), strict=True))
    for stage, is_hop in _stages(jaxpr):
        takes, makes = stage.jaxpr.invars, stage.jaxpr.outvars
        values = [known[var] for var in takes]
        specs = [_row_spec(var.aval, axes) for var in makes]
        run = functools.partial(_run, manual, stage, values, specs)
        arrays = [value.array for value in values]
        made = pace(run, arrays) if is_hop else run(arrays)
        known |= {
            var: Value(x, spec, _needs_row(var.aval))
            for var, x, spec in zip(makes, made, specs, strict=True)
        }
    return treedef.unflatten([known[var] for var in jaxpr.jaxpr.outvars])


def inside(values: Any, arrays: Any) -> Any:
    """The values inside `shard_map` over the axes, from arrays that the specs have cut."""
    own = lambda value, x: x[0] if value.is_row and tuple(value.spec) else x
    return jax.tree.map(own, values, arrays, is_leaf=lambda x: isinstance(x, Value))


def _run(manual, stage, values, specs, arrays):
    def local(*arrays):
        made = core.jaxpr_as_fun(stage)(*inside(values, list(arrays)))
        given = zip(made, specs, strict=True)
        return [x[None] if tuple(spec) and _needs_row(x) else x for x, spec in given]

    in_specs = tuple(value.spec for value in values)
    return manual(local, in_specs=in_specs, out_specs=specs)(*arrays)


def _needs_row(x):
    # Shards of arrays are concatenated. With an axis more, a barrier would get a view of each
    # message, which nobody else uses: XLA takes it out of the barrier, and then codes too late.
    return not x.shape


def _traced(function, manual, in_specs, args):
    """The jaxpr of a function of shards, and the tree of its results."""
    traced = []

    def note(*args):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        traced.append((jaxpr, jax.tree.structure(shape)))
        return ()

    jax.eval_shape(manual(note, in_specs=in_specs, out_specs=()), *args)
    return traced[0]


def _stages(closed: core.ClosedJaxpr) -> Iterator[tuple[core.ClosedJaxpr, bool]]:
    """A jaxpr in parts, and whether each is a hop."""
    parts: list[tuple[list, bool]] = [([], False)]
    for eqn in closed.jaxpr.eqns:
        if eqn.params.get("name") == _HOP:
            parts += [([eqn], True), ([], False)]
        else:
            parts[-1][0].append(eqn)
    needed = [set(map(id, closed.jaxpr.outvars))]
    for eqns, _ in reversed(parts):
        needed.append(needed[-1] | {id(x) for eqn in eqns for x in eqn.invars})
    constants = {id(var) for var in closed.jaxpr.constvars}
    for (eqns, is_hop), later in zip(parts, reversed(needed[:-1]), strict=True):
        made = {id(var): var for eqn in eqns for var in eqn.outvars}
        used = {id(x): x for eqn in eqns for x in eqn.invars if not isinstance(x, core.Literal)}
        takes = [var for key, var in used.items() if key not in made and key not in constants]
        makes = [var for key, var in made.items() if key in later]
        debug_info = closed.jaxpr.debug_info.with_unknown_names()
        part = closed.jaxpr.replace(invars=takes, outvars=makes, eqns=eqns, debug_info=debug_info)
        yield core.ClosedJaxpr(part, closed.consts), is_hop


def _row_spec(aval: Any, axes: tuple[str, ...]) -> P:
    names = tuple(name for name in axes if name in varying_axes(aval))
    return P(names) if names else P()
