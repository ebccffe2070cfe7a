"""A step that overlaps exchange and gradient in one program.

If a method does not exchange this step's gradient, the forward pass runs between the start and
the end of the first messages, and the backward pass between those of the second.

Compilers do not find this order on their own: they optimize for memory, or assume fast links.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxcomp.exchange.journeys import Pace
from jaxcomp.replicas.state import add_drifts
from jaxcomp.replicas.types import names_of, tied, to_varying, zeros_of
from jaxcomp.steps.gradient import (
    Gradient,
    added,
    in_rows,
    loss_of_part,
    no_gradients,
    parts_of,
    placed_batch,
    specs_of_extra,
)
from jaxcomp.steps.loss import Extra, own_floats, require_local
from jaxcomp.steps.update import Update, local_update, own_params, update_specs, with_shares


def interleaved(
    gradient: Gradient,
    update: Update,
    params: Any,
    state: Any,
    drifts: Any,
    batch: Any,
    rng: Any = None,
    model_state: Any = None,
    extra_args: Any = None,
) -> tuple[Any, Any, jax.Array, jax.Array, Extra]:
    """A whole step: `(params, state, skipped, losses, extra)`, arguments as for its two halves.

    For a mesh with only the axes of the replicas and their devices, which are manual throughout.
    """
    axes, mesh = gradient.axis_name, gradient.mesh
    batch, batch_specs = placed_batch(gradient, batch)
    extra_specs = specs_of_extra(gradient, model_state)
    specs = update_specs(update, params)
    return jax.shard_map(
        functools.partial(_local, gradient, with_shares(update, params)),
        mesh=mesh,
        in_specs=(*specs, P(update.axis_name), batch_specs, P(), P(), P()),
        out_specs=(*specs, P(), P(axes), extra_specs),
    )(params, state, drifts, batch, rng, model_state, extra_args)


def _local(gradient, update, params, state, drifts, batch, rng, model_state, extra_args):
    axes = gradient.axis_name
    parts = Parts(*halves(gradient, params, drifts, batch, rng, own_floats(model_state, axes)))
    made = iter(exchanged(update, params, state, parts.pace, extra_args))
    loss, extra, grads = parts.finished()
    require_local(loss, *names_of(axes))
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


def halves(gradient, params, drifts, batch, rng, model_state):
    """`(start, first, second)`: the gradient as a forward and a backward pass, or microbatches.

    Drifts are added in the first part. Before it, a barrier would make XLA write the sums.
    """
    loss_of = loss_of_part(gradient, batch, rng)
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
