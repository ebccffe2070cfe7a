"""A whole training step over a mesh: local gradients, exchange, update, all or nothing."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxcomp.replicas import protocol
from jaxcomp.replicas.state import per_replica
from jaxcomp.replicas.types import names_of
from jaxcomp.steps.compiling import jitted
from jaxcomp.steps.gradient import Gradient, all_gradients, check_accumulate, metrics_of
from jaxcomp.steps.interleaved import interleaved
from jaxcomp.steps.interleaved_shards import interleaved_shards
from jaxcomp.steps.update import Update, all_updates, init_state, placed_params, whole_drifts


class TrainStep(NamedTuple):
    """The jitted functions of one training run."""

    init: Callable[[Any], Any]  # params -> state
    step: Any  # params, state, batch, ... -> params, state, metrics; jitted, or like it


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
    accumulate: int = 1,
    has_aux: bool = False,
    batch_specs: Any = None,
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
        replica's own: no `jax.lax.pmean` of it. It gets `rng=` and `model_state=` as well where
        `step` is called with them, and returns a tuple where there is more than the loss: the
        loss, `aux` by `has_aux`, the new model state.
      tx: Transformation that averages over `axis_name`; `per_replica` is put around it. Its
        `update` gets extra arguments: `axis_name`, and `value`, the mean loss of all replicas,
        for `optax.contrib.reduce_on_plateau`; 4 bytes are sent where something uses it.
      mesh: Its axis `axis_name` is the slow one; over other axes `param_specs` say how parameters
        are sharded, and XLA partitions `loss_fn`, for which they have the type Auto.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters, a tree or a prefix; replicated by default.
      fast_axis: The mesh axis of the devices of one replica, as those of a host, if it has
        several: they share its batch. Each of F devices averages the gradient of its 1/F of
        every parameter over the others, sends and updates it, keeps its state, and gets the rest of
        the new parameters from them. Together they send what one device would. `tx` sees these
        shares, cut along the axis of a parameter that leaves the least to fill up, never the
        first of several.
      accumulate: Microbatches that a device's batch is cut into, in turn; one exchange a step.
      has_aux: Whether the loss returns something beside, a tree of arrays of any kind.
      batch_specs: PartitionSpecs of the batch, a tree or a prefix; by default its first axis is
        cut over the replicas, and XLA is told nothing else. `P()` is for leaves that all replicas,
        and all microbatches, use alike. Behind the axes of the replicas a spec may have other ones:
        `P(("replica", "fsdp"))` divides a replica's batch among the devices that share its weights.

    Returns:
      `init(params) -> state` and `step(params, state, batch, rng=None, model_state=None,
      extra_args=None) -> (params, state, metrics)`, which donates params and state.
      `batch` is a pytree of global arrays whose first axis is divisible by num_replicas *
      accumulate. `rng` is a key, or a tree of keys, others in each step, as
      `jax.random.fold_in(key, step)`: the loss gets them folded with the numbers of the replica
      and of the microbatch. `model_state` is a tree that the loss returns anew, as BatchNorm's
      statistics; microbatches hand it on to each other. `extra_args` are further arguments of the
      update of `tx`, equal on all replicas, or a `value` of yours; those without a default, but
      for `value`, fail in `init`.
      Metrics: `loss`, f32[num_replicas], the loss on each replica's part of the batch before the
      update, not averaged, so that it costs no message; `skipped`, bool[], whether all left this
      step out: False for methods whose state counts `skipped`; `aux`, with a leading axis of
      num_replicas * accumulate, a row for each call of the loss; `model_state`, the mean of the
      replicas' in one exact message, the part `model_state` of the report, over those whose is
      finite (the others count by the old one), and the old one if the step is left out.
      With a fast axis of F, batch, `loss` and `aux` are those of num_replicas * F, over both axes.

    Raises:
      ValueError: At construction for `accumulate` below 1. At the first call, if an axis is none of
        the mesh, `param_specs` use `fast_axis`, the batch cannot be divided, the loss is equal on
        all replicas or returns something else than it must, or the updates that reach or leave
        `tx` are not what they must be.
    """
    check_accumulate(accumulate)
    update = Update(per_replica(tx, axis_name), mesh, axis_name, param_specs, fast_axis)
    gradient = Gradient(loss_fn, mesh, update.axes, accumulate, has_aux, batch_specs)
    return TrainStep(
        jax.jit(functools.partial(init_state, update)),
        jitted(functools.partial(_step, gradient, update), mesh, donate_argnums=(0, 1)),
    )


def _step(gradient, update, params, state, batch, rng=None, model_state=None, extra_args=None):
    params = placed_params(update, params)
    drifts = whole_drifts(update, params, protocol.drifts(state))
    given = drifts, batch, rng, model_state
    scale = protocol.loss_scale(state)
    is_alone = set(update.mesh.axis_names) == {*names_of(update.axes)}
    if protocol.exchanges_ahead(state) and scale is None:
        make = interleaved if is_alone else interleaved_shards
        new = make(gradient, update, params, state, *given, extra_args)
        params, state, skipped, loss, extra = new
    else:
        loss, grads, extra = all_gradients(gradient, params, *given, scale)
        params, state, skipped = all_updates(update, params, state, grads, loss, extra_args)
    return params, state, metrics_of(gradient, loss, skipped, extra, model_state)
