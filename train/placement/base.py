"""The common interface of replicated and sharded runs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh


class Functions(NamedTuple):
    """The functions of a run on one mesh."""

    init: Callable[[Any], tuple[Any, Any]]  # natural parameters -> params, state
    step: Callable[[Any, Any, Any], tuple[Any, Any, dict]]  # as in `jaxcomp.train_step`
    # params, state -> params, state as `eval_step` takes them: what a run evaluates on its way
    evaluated: Callable[[Any, Any], tuple[Any, Any]]
    # params, state -> natural parameters, on all devices: what it ends with, and what is exported
    deployed: Callable[[Any, Any], Any]
    # a function as in `jaxcomp.eval_step` -> natural params, state, batch -> its mean over replicas
    eval_step: Callable[[Callable], Callable[[Any, Any, Any], Any]]
    shardings: Callable[[Any], tuple[Any, Any]]  # natural parameters' shapes -> of params, state
    # their shapes -> their shardings for `init`; None: replicated
    places: Callable[[Any], Any] | None = None


class Placement(NamedTuple):
    """The evaluated expressions of a config."""

    tx: optax.GradientTransformationExtraArgs  # `optimizer.update`; sees stacked layers one by one
    functions: Callable[[Mesh | AbstractMesh], Functions]  # an abstract mesh is enough for shapes
    rounds: Callable[[Any], dict[str, int]]  # state's shapes -> how often the run sends each part
    replica_spread: Callable[[Any, Mesh], jax.Array] | None  # of params; None: no copies
    row_axes: tuple[str, ...]  # mesh axes that a state has rows over; others must keep their sizes
    dense: tuple[int, str]  # sends of all values per step without compression, and the collective
    trains: Callable[[str], bool] = lambda path: True  # whether a parameter is trained, and sent
