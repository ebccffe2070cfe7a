"""Evaluation on a mesh: each replica at the parameters of its next gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas import protocol
from jaxcomp.replicas.specs import require_axis
from jaxcomp.replicas.state import add_drifts
from jaxcomp.replicas.types import names_of, to_varying
from jaxcomp.steps import placing
from jaxcomp.steps.compiling import jitted
from jaxcomp.steps.gradient import Gradient, on_replicas
from jaxcomp.steps.update import Update, placed_params, whole_drifts


def eval_step(
    measure_fn: Callable[[Any, Any], Any],
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
    batch_specs: Any = None,
) -> Any:
    """Makes a jitted `(params, state, batch) -> measures` for validation during a run.

    Each replica measures its rows of the batch at its own parameters, `params` plus its drift, and
    the measures are averaged: a few numbers are sent, no parameters. With a method whose replicas
    differ, the consensus lags behind: it lacks what replicas have not exchanged yet. The drift of
    `local_steps` is left out: what a replica did since the last outer step is not yet a step of the
    model. At the end of a run, evaluate and export `jaxcomp.mean_params`.

    Args:
      measure_fn: `(params, batch) -> measures`, any tree of arrays, of one replica's rows. Sums,
        with a number of targets next to them, also suit rows of unlike numbers of targets.
      mesh: As for `jaxcomp.train_step`, like the other arguments.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters.
      fast_axis: The step's `fast_axis`, if it has one.
      batch_specs: PartitionSpecs of the batch.

    Returns:
      The jitted function. `state` is that of `train_step`, of any `per_replica`, or (), and is not
      donated. Measures are means over the replicas, equal everywhere.

    Raises:
      ValueError: As `train_step`, at construction for the axis, at the first call for parameters
        and batch.
    """
    require_axis(mesh, axis_name)
    update = Update(_NO_UPDATE, mesh, axis_name, param_specs, fast_axis)
    on = Gradient(measure_fn, mesh, update.axes, batch_specs=batch_specs)
    return jitted(functools.partial(_measured, on, update), mesh)


_NO_UPDATE = optax.with_extra_args_support(optax.identity())


def _measured(on, update, params, state, batch):
    params = placed_params(update, params)
    drifts = whole_drifts(update, params, protocol.evaluated_drifts(state))
    rows = P(names_of(on.axis_name))
    measures = on_replicas(on, functools.partial(_own_measures, on), rows, rows)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), measures(params, drifts, batch))


def _own_measures(on, params, drifts, batch):
    """One replica's measures, as a row."""
    local = add_drifts(params, drifts, on.axis_name)
    batch = placing.sharded_batch(batch, on.batch_specs, on.axis_name)
    measured = jax.tree.map(jnp.asarray, on.loss_fn(local, batch))
    return jax.tree.map(lambda x: x[None], to_varying(measured, on.axis_name))
