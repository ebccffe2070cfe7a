"""What replicated and sharded runs have in common: the same functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh


class Functions(NamedTuple):
    """How a run begins and steps, on one mesh."""

    init: Callable[[Any], tuple[Any, Any]]  # natural parameters -> params, state
    step: Callable[[Any, Any, Any], tuple[Any, Any, dict]]  # as of `jaxcomp.train_step`
    mean: Callable[[Any, Any], Any]  # params, state -> params as if all replicas met now
    whole: Callable[[Any], Any]  # params -> natural parameters, everywhere
    shardings: Callable[[Any], tuple[Any, Any]]  # natural parameters' shapes -> of params, state
    # their shapes -> the shardings in which `init` takes them; None: all of them on all devices
    places: Callable[[Any], Any] | None = None


class Placement(NamedTuple):
    """What the expressions of a config say, evaluated once."""

    update: optax.GradientTransformationExtraArgs  # that `optimizer.update` describes
    tx: optax.GradientTransformationExtraArgs  # the same, which sees stacked layers one by one
    functions: Callable[[Mesh | AbstractMesh], Functions]  # an abstract mesh is enough for shapes
    rounds: Callable[[Any], dict[str, int]]  # state's shapes -> how often the run sends each part
    spread: Callable[[Any, Mesh], jax.Array] | None  # of params' copies; None without any
    row_axes: tuple[str, ...]  # mesh axes that a state has rows over; others keep their sizes
    dense: tuple[int, str]  # how often a replica sends all without compression, and by what
