"""Runs whose replicas hold all parameters: any transformation that averages over them."""

import functools
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from train.config import Config
from train.config.run import AXIS_NAME, update
from train.models import build
from train.placement.base import Functions, Placement
from train.plan import counts
from train.processes.devices import fast_axis_of


def resolve(config: Config) -> Placement:
    """Evaluates what `optimizer.update` describes.

    Raises:
      ValueError: If it is no transformation.
    """
    alone = update(config)
    tx = jaxcomp.per_replica(_per_layer(config, alone), AXIS_NAME)
    return Placement(
        update=alone,
        tx=tx,
        functions=functools.partial(_functions, config, tx),
        rounds=lambda state: counts.rounds(alone, config.steps),
        spread=lambda params, mesh: jaxcomp.replica_spread(params, mesh, mesh.axis_names),
        row_axes=(AXIS_NAME,),
        dense=(2, "ring all-reduce"),  # a scatter and a gather
    )


def _per_layer(config: Config, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    pattern = config.model.stacked
    if pattern is None or not config.per_layer:
        return tx
    return jaxcomp.per_layer(tx, jaxcomp.by_path((pattern, True), (".*", False)))


def _functions(config: Config, tx: optax.GradientTransformation, mesh: Mesh) -> Functions:
    make = jaxcomp.overlapped_train_step if config.overlap else jaxcomp.train_step
    loss_fn = build.loss_of(config)
    fast_axis = fast_axis_of(config)
    made = make(loss_fn, tx, mesh, AXIS_NAME, fast_axis=fast_axis, accumulate=config.accumulate)
    return Functions(
        init=lambda params: (params, made.init(params)),
        step=made.step,
        mean=lambda params, state: jaxcomp.mean_params(
            params, state, mesh, AXIS_NAME, fast_axis=fast_axis
        ),
        whole=lambda params: params,
        shardings=functools.partial(_shardings, tx, mesh, fast_axis),
    )


def _shardings(
    tx: optax.GradientTransformation, mesh: Mesh, fast_axis: str | None, params: Any
) -> tuple[Any, Any]:
    specs = jaxcomp.state_specs(tx, params, mesh, AXIS_NAME, fast_axis=fast_axis)
    place = lambda spec: NamedSharding(mesh, spec)
    return jax.tree.map(lambda _: place(P()), params), jax.tree.map(place, specs)
