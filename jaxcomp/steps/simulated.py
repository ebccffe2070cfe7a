"""Many replicas on one device: the training step of a mesh, with `jax.vmap`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import is_count
from jaxcomp.replicas import protocol
from jaxcomp.replicas.state import per_replica
from jaxcomp.steps.compiling import Donating, Initial
from jaxcomp.steps.gradient import Given, Gradient, as_metrics, local_gradient, placed_batch
from jaxcomp.steps.loss import averaged
from jaxcomp.steps.placing import is_cut
from jaxcomp.steps.train import TrainStep
from jaxcomp.steps.update import Update, checked_specs, local_update, update_specs


def simulated_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    num_replicas: int,
    axis_name: str,
    *,
    accumulate: int = 1,
    has_aux: bool = False,
    batch_specs: Any = None,
) -> TrainStep:
    """Makes the `init` and `step` of `jaxcomp.train_step`, with all replicas on one device.

    Results equal those of a mesh up to rounding, and the state has the same form: it can be moved
    to a mesh with this many devices and back. Nothing is sent. The device holds `num_replicas`
    copies of what differs between replicas, such as gradients, residuals and drift, and one copy of
    the rest.

    Args:
      loss_fn: As for `jaxcomp.train_step`, like `tx` and `accumulate`.
      tx: The transformation.
      num_replicas: Replicas to simulate, at least 1.
      axis_name: Name of the axis that `tx` averages over.
      accumulate: Microbatches.
      has_aux: As for `jaxcomp.train_step`, like `batch_specs`.
      batch_specs: Over the axis `axis_name` only.

    Returns:
      The functions of `jaxcomp.train_step`, with all their arguments, for arrays on one device.

    Raises:
      ValueError: For `num_replicas` or `accumulate` that is no positive integer; at the first call,
        if the batch cannot be divided. JAX raises one at the first call if the updates of `tx`
        differ between replicas because it does not average. A loss that is averaged over the
        replicas is right here; a mesh refuses it.
    """
    if not (is_count(num_replicas) and is_count(accumulate)):
        raise ValueError(
            f"got num_replicas={num_replicas!r}, accumulate={accumulate!r}; write at least 1 for "
            "both, as integers."
        )
    mesh = AbstractMesh((num_replicas,), (axis_name,), axis_types=(AxisType.Auto,))
    gradient = Gradient(loss_fn, mesh, axis_name, accumulate, has_aux, batch_specs)
    update = Update(per_replica(tx, axis_name), mesh, axis_name)
    return TrainStep(
        Initial(jax.jit(functools.partial(_init, update))),
        Donating(jax.jit(functools.partial(_step, gradient, update), donate_argnums=(0, 1))),
    )


def _init(update, params):
    axes = _axes_of_state(update, params)
    return _replicas(update, update.tx.init, in_axes=None, out_axes=axes)(params)


def _step(gradient, update, params, state, batch, rng=None, model_state=None, extra_args=None):
    size, axis_name = update.mesh.size, update.axis_name
    batch, specs = placed_batch(gradient, batch)
    cut = jax.tree.map(lambda x, spec: is_cut(spec, axis_name), batch, specs)
    rows = lambda x, cut: x.reshape(size, x.shape[0] // size, *x.shape[1:]) if cut else x
    # Values that must be equal on all replicas have no axis; JAX raises if they differ.
    axes = _axes_of_state(update, params, state)
    params, state, (loss, skipped, aux, model_state) = _replicas(
        update,
        functools.partial(_one_replica, gradient, update),
        in_axes=(None, axes, jax.tree.map(lambda cut: 0 if cut else None, cut), None, None, None),
        out_axes=(None, axes, (0, None, 0, None)),
    )(params, state, jax.tree.map(rows, batch, cut), rng, model_state, extra_args)
    # One row for each call of the loss, as on a mesh.
    aux = jax.tree.map(lambda x: x.reshape(size * x.shape[1], *x.shape[2:]), aux)
    return params, state, as_metrics(loss, skipped, aux, model_state)


def _one_replica(gradient, update, params, state, batch, rng, model_state, extra_args):
    scale = protocol.loss_scale(state)
    given = Given(protocol.drifts(state), batch, rng, model_state, scale)
    loss, grads, extra = local_gradient(gradient, params, given)
    params, state, skipped = local_update(update, params, state, grads, loss, extra_args)
    mean = averaged(model_state, extra.model_state, skipped, update.axis_name)
    return params, state, (loss[0], skipped, extra.aux, mean)


def _replicas(update, function, in_axes, out_axes):
    size = update.mesh.size
    return jax.vmap(function, in_axes, out_axes, axis_name=update.axis_name, axis_size=size)


def _axes_of_state(update, params, state=None):
    """0 for state leaves that differ between replicas, None for the others; checks a state."""
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    _, specs = (
        update_specs(update, shapes) if state is None else checked_specs(update, shapes, state)
    )
    return jax.tree.map(lambda spec: 0 if spec == P(update.axis_name) else None, specs)
