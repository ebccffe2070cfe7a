"""What replicated and sharded runs have in common: the same functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax


class Functions(NamedTuple):
    """How a run begins and steps, on one mesh."""

    init: Callable[[Any], tuple[Any, Any]]  # natural parameters -> params, state
    step: Callable[[Any, Any, Any], tuple[Any, Any, dict]]  # as of `jaxcomp.train_step`
    whole: Callable[[Any], Any]  # params -> natural parameters, everywhere
    shardings: Callable[[Any], tuple[Any, Any]]  # natural parameters' shapes -> of params, state


class Placement(NamedTuple):
    """What the expressions of a config say, evaluated once.

    Attributes:
      update: The transformation that `optimizer.update` describes.
      tx: The same, for the run's parameters: it sees stacked layers one by one.
      functions: `mesh -> Functions`. An abstract mesh is enough for shapes.
      rounds: `state -> {part: count}`, how often the run sends each part; {} if it sends
        everything in every step. The state's shapes are enough.
      spread: `(params, mesh) -> u32[]`, as `jaxcomp.replica_spread`; None if nothing is held twice.
      dense: How often parameters or gradients leave a replica without compression, and by what.
    """

    update: optax.GradientTransformationExtraArgs
    tx: optax.GradientTransformationExtraArgs
    functions: Callable[[jax.sharding.Mesh | jax.sharding.AbstractMesh], Functions]
    rounds: Callable[[Any], dict[str, int]]
    spread: Callable[[Any, jax.sharding.Mesh], jax.Array] | None
    dense: tuple[int, str]
