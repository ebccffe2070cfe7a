"""A step whose exchange and gradient are one program, each in the other's gaps.

Of a method that exchanges nothing of this step's gradient, the forward pass stands between the
start and the end of the first messages, and the backward pass between those of the second.
Compilers do not find that by themselves: they order what is free to move by memory, or by links
that they take for fast ones.
"""

import functools
import itertools
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
    check_batch,
    microbatches,
    no_gradients,
    require_local,
)
from jaxcomp.steps.update import Update, local_update, own_params, update_specs, with_shares


def interleaved(
    gradient: Gradient, update: Update, params: Any, state: Any, drifts: Any, batch: Any
) -> tuple[Any, Any, jax.Array, jax.Array]:
    """A whole step: `(params, state, skipped, losses)`, arguments as for its two halves.

    On a mesh without other axes than those of the replicas and their devices, which are manual
    from the beginning to the end.
    """
    axes, mesh = gradient.axis_name, gradient.mesh
    check_batch(batch, axes, mesh.size, gradient.accumulate)
    specs = update_specs(update, params)
    return jax.shard_map(
        functools.partial(_local, gradient, with_shares(update, params)),
        mesh=mesh,
        in_specs=(*specs, P(update.axis_name), P(axes)),
        out_specs=(*specs, P(), P(axes)),
    )(params, state, drifts, batch)


def _local(gradient, update, params, state, drifts, batch):
    axes = gradient.axis_name
    parts = _Parts(*_halves(gradient, add_drifts(params, drifts, axes), batch))
    # Again and again: the step may trace an update once more, to look at its norms.
    made = itertools.cycle(exchanged(update, params, state, parts.pace))
    loss, grads = parts.finished()
    require_local(loss, *names_of(axes))
    rows = jax.tree.map(lambda g: g[None], grads)
    new = local_update(update, params, state, rows, loss[None], ahead=lambda make: next(made))
    return *new, loss[None]


def exchanged(update: Update, params: Any, state: Any, pace: Pace | None = None) -> list[Any]:
    """What an update makes ahead of the gradient, in the order in which it asks for it.

    Inside `shard_map`. Empty for a method that exchanges nothing ahead.
    """
    made = []

    def record(make):
        made.append(make() if pace is None else make(pace))
        return made[-1]

    params = own_params(update, params)
    grads = to_varying(jax.tree.map(jnp.zeros_like, params), update.axis_name)
    # What is not recorded is computed by nobody: it does not reach the program's results.
    extra_args = {"axis_name": update.axis_name, "value": jnp.zeros([]), "ahead": record}
    update.tx.update(grads, state, params, **extra_args)
    return made


class _Parts:
    """A computation in parts, each of which may run while messages travel.

    Args:
      start: What the first part gets.
      parts: Each gets what the one before it has returned.
    """

    def __init__(self, start: Any, *parts: Callable[[Any], Any]):
        self._value, self._parts = start, list(parts)

    def pace(self, travel, messages):
        """Sends messages, and computes the next part between their start and their end."""
        if not self._parts:
            return travel(messages)
        # The messages themselves go around the barrier: XLA:GPU starts what is made right away, but
        # takes what leaves a barrier when it likes, and that was behind the part.
        _, value = tied(messages, self._value)
        received, self._value = tied(travel(messages), self._parts.pop(0)(value))
        return received

    def finished(self) -> Any:
        """What the last part returns; what has not run beside a message runs now."""
        while self._parts:
            self._value = self._parts.pop(0)(self._value)
        return self._value


def _halves(gradient, local, batch):
    """`(start, first, second)`: the gradient as a forward and a backward pass, or microbatches."""
    if gradient.accumulate > 1:
        return _half_the_microbatches(gradient, local, batch)

    def forward(inputs):
        local, batch = inputs
        return jax.vjp(lambda params: gradient.loss_fn(params, batch), local)

    def backward(passed):
        loss, pullback = passed
        (grads,) = pullback(zeros_of(loss) + 1)
        return loss, grads

    return (local, batch), forward, backward


def _half_the_microbatches(gradient, local, batch):
    count = gradient.accumulate
    parts = jnp.arange(count), microbatches(count, batch)
    cut = lambda *ends: jax.tree.map(lambda x: x[slice(*ends)], parts)
    at = lambda local: lambda _, part: jax.value_and_grad(gradient.loss_fn)(local, part)

    def first(inputs):
        local, parts, later = inputs
        return *added(at(local), no_gradients(local), parts), local, later

    def second(passed):
        total, losses, local, later = passed
        total, others = added(at(local), total, later)
        loss = jnp.mean(jnp.concatenate([losses, others]))
        return loss, jax.tree.map(lambda t: t / count, total)

    return (local, cut(count // 2), cut(count // 2, count)), first, second
