"""The model that a config describes: its parameters, its loss, and what it reads."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.config import Config
from train.models.objectives import OBJECTIVES


def model_of(config: Config) -> nn.Module:
    """The model of a run."""
    return OBJECTIVES[config.objective].models[type(config.model)](config.model)


def random_params(config: Config) -> Any:
    """The parameters that a run begins with, in natural shapes."""
    inputs = OBJECTIVES[config.objective].inputs(config.model)
    key, zeros = jax.random.key(config.seed), np.zeros(inputs.shape, inputs.dtype)
    return model_of(config).init(key, zeros)["params"]


def param_shapes(config: Config) -> Any:
    """Shapes and dtypes of a run's parameters."""
    return jax.eval_shape(lambda: random_params(config))


def batch_of(config: Config, mesh: Mesh) -> Any:
    """Shapes, dtypes and shardings of a batch of all replicas."""
    rows, size = NamedSharding(mesh, P(mesh.axis_names)), config.data.batch
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct((size, *row.shape), row.dtype, sharding=rows),
        OBJECTIVES[config.objective].row(config.model),
    )


def measure_of(config: Config, model: nn.Module) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """What a run's objective measures of parameters and a batch; "loss" is minimized."""
    objective = OBJECTIVES[config.objective]

    def measure(params, batch):
        return objective.measure(lambda inputs: model.apply({"params": params}, inputs), batch)

    return measure


def loss_of(config: Config, model: nn.Module) -> Callable[[Any, Any], jax.Array]:
    """What a run minimizes, of parameters and a batch."""
    measure = measure_of(config, model)
    return lambda params, batch: measure(params, batch)["loss"]
