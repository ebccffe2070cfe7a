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
    mean: Callable[[Any, Any], Any]  # params, state -> mean of the replicas' own parameters
    whole: Callable[[Any], Any]  # params -> natural parameters, on all devices
    shardings: Callable[[Any], tuple[Any, Any]]  # natural parameters' shapes -> of params, state
    # their shapes -> their shardings for `init`; None: replicated
    places: Callable[[Any], Any] | None = None


class Placement(NamedTuple):
    """The evaluated expressions of a config."""

    update: optax.GradientTransformationExtraArgs  # from `optimizer.update`
    tx: optax.GradientTransformationExtraArgs  # the same, but it sees stacked layers one by one
    functions: Callable[[Mesh | AbstractMesh], Functions]  # an abstract mesh is enough for shapes
    rounds: Callable[[Any], dict[str, int]]  # state's shapes -> how often the run sends each part
    spread: Callable[[Any, Mesh], jax.Array] | None  # of copies of params; None without copies
    row_axes: tuple[str, ...]  # mesh axes that a state has rows over; others must keep their sizes
    dense: tuple[int, str]  # sends of all values per step without compression, and the collective
