"""The model of a config: its parameters, its loss, and its batches."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train.config import Config
from train.models import modules
from train.models.objectives import OBJECTIVES


def model_of(config: Config) -> nnx.Module:
    """The initial model of a run."""
    model = OBJECTIVES[config.objective].models[type(config.model)]
    return model(config.model, rngs=modules.PathRngs(config.seed))


def random_params(config: Config) -> Any:
    """The initial parameters of a run, in natural shapes."""
    return modules.split(model_of(config))[1]


def param_shapes(config: Config) -> Any:
    """Shapes and dtypes of a run's parameters."""
    return jax.eval_shape(lambda: random_params(config))


def placed(like: Any, shardings: Any) -> Any:
    """Shapes and dtypes with the sharding of each."""
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, like, shardings)


def batch_of(config: Config, mesh: Mesh) -> Any:
    """Shapes, dtypes and shardings of a batch of all replicas."""
    rows, size = NamedSharding(mesh, P(mesh.axis_names)), config.data.batch
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct((size, *row.shape), row.dtype, sharding=rows),
        OBJECTIVES[config.objective].row(config.model, config.data),
    )


def loss_of(config: Config, **options: Any) -> Callable[[Any, Any], jax.Array]:
    """The loss of a run, as a function of parameters and a batch.

    Args:
      config: The run.
      **options: Further arguments of the model.
    """
    apply, _ = modules.split(nnx.eval_shape(lambda: model_of(config)))
    measure = OBJECTIVES[config.objective].measure
    return lambda params, batch: measure(lambda *x: apply(params, *x, **options), batch)["loss"]


def totals_of(config: Config) -> Callable[[Any, Any], tuple[dict[str, jax.Array], jax.Array]]:
    """All measures of a run's objective, as sums over a batch's targets, and their number."""
    apply, _ = modules.split(nnx.eval_shape(lambda: model_of(config)))
    totals = OBJECTIVES[config.objective].totals
    return lambda params, batch: totals(lambda *x: apply(params, *x), batch)
