"""Many replicas on one device: the training step of a mesh, by `jax.vmap` instead of devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.specs import state_specs
from jaxcomp.replicas.state import fields, per_replica
from jaxcomp.steps.train import TrainStep, apply_update, check_batch, local_gradients


def simulated_train_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    num_replicas: int,
    axis_name: str,
    *,
    accumulate: int = 1,
) -> TrainStep:
    """Makes the `init` and `step` of `jaxcomp.train_step`, with all replicas on one device.

    What the replicas compute is that of a mesh, to rounding, and the state has the same form: it
    can be moved to a mesh of as many devices and back. Nothing is sent. The device holds
    `num_replicas` copies of what differs between replicas, as gradients, residuals and drift, and
    one of all else.

    Args:
      loss_fn: As for `jaxcomp.train_step`.
      tx: As for `jaxcomp.train_step`.
      num_replicas: Replicas to simulate, at least 1.
      axis_name: Name of the axis that `tx` averages over.
      accumulate: As for `jaxcomp.train_step`.

    Returns:
      `init` and `step` as of `jaxcomp.train_step`, for arrays on one device.

    Raises:
      ValueError: For `num_replicas` or `accumulate` below 1; at the first call, if the batch
        cannot be divided, or the loss is equal on all replicas. At the first call JAX itself
        refuses a `tx` whose updates differ between replicas, as one that does not average.
    """
    if num_replicas < 1 or accumulate < 1:
        raise ValueError(
            f"got num_replicas={num_replicas}, accumulate={accumulate}; write at least 1 for both."
        )
    tx = per_replica(tx, axis_name)
    mesh = AbstractMesh((num_replicas,), (axis_name,), axis_types=(AxisType.Auto,))
    replicas = functools.partial(jax.vmap, axis_name=axis_name, axis_size=num_replicas)

    def axes_of(params):
        """0 for state leaves that differ between replicas, None for the others."""
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        specs = state_specs(tx, shapes, mesh, axis_name)
        return jax.tree.map(lambda spec: 0 if spec == P(axis_name) else None, specs)

    def one(params, state, batch):
        drifts = fields(state, "drift")
        loss, grads = local_gradients(loss_fn, axis_name, accumulate, params, drifts, batch)
        params, state, skipped = apply_update(tx, axis_name, params, state, grads, loss)
        return params, state, {"loss": loss[0], "skipped": skipped}

    @jax.jit
    def init(params):
        return replicas(tx.init, in_axes=None, out_axes=axes_of(params))(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        check_batch(batch, axis_name, num_replicas, accumulate)
        rows = jax.tree.map(lambda x: x.reshape(num_replicas, -1, *x.shape[1:]), batch)
        # What must be equal on all replicas has no axis, and JAX refuses to drop one that differs.
        axes = axes_of(params)
        metrics = {"loss": 0, "skipped": None}
        return replicas(one, in_axes=(None, axes, 0), out_axes=(None, axes, metrics))(
            params, state, rows
        )

    return TrainStep(init, step)
