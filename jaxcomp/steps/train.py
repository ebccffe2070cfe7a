"""A whole training step over a mesh: local gradients, exchange, update, all or nothing."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jaxcomp.replicas import protocol
from jaxcomp.replicas.state import per_replica
from jaxcomp.replicas.types import names_of
from jaxcomp.steps.compiling import jitted
from jaxcomp.steps.gradient import Gradient, all_gradients, check_accumulate
from jaxcomp.steps.interleaved import interleaved
from jaxcomp.steps.update import Update, all_updates, init_state, whole_drifts


class TrainStep(NamedTuple):
    """The jitted functions of one training run."""

    init: Callable[[Any], Any]  # params -> state
    step: Any  # params, state, batch -> params, state, metrics; a jitted function, or like one


def train_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
    accumulate: int = 1,
) -> TrainStep:
    """Makes jitted `init` and `step` of a loss and a transformation, over the replicas of a mesh.

    Gradients are taken at each replica's own parameters and never summed by JAX; the
    transformation runs with all mesh axes manual, on local shards. If the update is not finite,
    parameters and state stay as they were on all replicas. Not so if a field of the state counts
    `skipped` (`cocktail_sgd`, `slamb`, `zero_one_adam`): there a replica whose gradient is not
    finite leaves its step out by itself and counts it, and the others go on, unless a method
    beside it, as in `optax.partition`, leaves that to the step.

    Args:
      loss_fn: `(params, batch) -> f32[]`, the mean loss over the batch that it is given, a
        replica's own: no `jax.lax.pmean` of it.
      tx: Transformation that averages over `axis_name`; `per_replica` is put around it. Its
        `update` gets extra arguments: `axis_name`, and `value`, the mean loss of all replicas,
        for `optax.contrib.reduce_on_plateau`; 4 bytes are sent where something uses it.
      mesh: Its axis `axis_name` is the slow one; over other axes, of type Auto, `param_specs`
        say how parameters are sharded and XLA partitions `loss_fn`.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters, a tree or a prefix; replicated by default.
      fast_axis: The mesh axis of the devices of one replica, as those of a host, if it has
        several: they share its batch. Of every parameter, each of F devices averages the gradient
        over the others, sends, updates and keeps the state of 1/F, and gets the rest of the new
        parameters from them. Together they send what one device would. `tx` sees these shares, cut
        along the axis of a parameter that leaves the least to fill up, never the first of several.
      accumulate: Microbatches that a device's batch is cut into, in turn; one exchange a step.

    Returns:
      `init(params) -> state` and `step(params, state, batch) -> (params, state, metrics)`.
      `batch` is a pytree of global arrays whose first axis is divisible by num_replicas *
      accumulate and sharded over `axis_name`. `step` donates params and state. Metrics: `loss`,
      f32[num_replicas], the loss on each replica's part of the batch before the update, not
      averaged, so that it costs no message; `skipped`, bool[], whether all left this step out:
      False for methods whose state counts `skipped`. With a fast axis of F, batch and loss are
      those of num_replicas * F, over both axes.

    Raises:
      ValueError: At construction for `accumulate` below 1. At the first call, if an axis is none of
        the mesh, `param_specs` use `fast_axis`, the batch cannot be divided, the loss is equal on
        all replicas, or the updates that reach or leave `tx` are not what they must be.
    """
    check_accumulate(accumulate)
    update = Update(per_replica(tx, axis_name), mesh, axis_name, param_specs, fast_axis)
    gradient = Gradient(loss_fn, mesh, update.axes, accumulate)
    return TrainStep(
        jax.jit(functools.partial(init_state, update)),
        jitted(functools.partial(_step, gradient, update), mesh, donate_argnums=(0, 1)),
    )


def _step(gradient, update, params, state, batch):
    drifts = whole_drifts(update, params, protocol.drifts(state))
    if protocol.exchanges_ahead(state) and set(update.mesh.axis_names) == {*names_of(update.axes)}:
        params, state, skipped, loss = interleaved(gradient, update, params, state, drifts, batch)
        return params, state, {"loss": loss, "skipped": skipped}
    loss, grads = all_gradients(gradient, params, drifts, batch)
    params, state, skipped = all_updates(update, params, state, grads, loss)
    return params, state, {"loss": loss, "skipped": skipped}
