"""What all methods share: how a transformation is made of two functions, and what it checks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from jaxcomp.replicas.types import require_varying


def method(
    name: str, axis_name: str, init: Callable, update: Callable, *, needs_params: bool = True
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation whose update gets what it can average.

    Args:
      name: Of the method, for errors.
      axis_name: Mesh axis of the replicas.
      init: `params -> state`.
      update: `(updates, state, params, **extra_args) -> (updates, state)`.
      needs_params: Whether it cannot do without parameters.

    Returns:
      The transformation. Its update raises a ValueError without parameters that it needs, for an
      unknown axis, and for updates that are already reduced or scaled by norms of local shards.
    """

    def checked(updates, state, params=None, **extra_args):
        if needs_params and params is None:
            raise ValueError(f"{name} needs the parameters; write tx.update(grads, state, params).")
        require_varying(updates, axis_name, params)
        return update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, checked)


def require(holds: bool, name: str, needs: str, write: str, **got: Any) -> None:
    """Raises a ValueError for an argument of a method that is out of its range."""
    if not holds:
        values = ", ".join(f"{argument}={value!r}" for argument, value in got.items())
        raise ValueError(f"{name} got {values}; needs {needs}; write {write}.")


def no_rounds(*parts: str) -> dict[str, Any]:
    """The state's field `rounds` before the first step: how often each part was sent."""
    return dict.fromkeys(("all", *parts), jnp.zeros([], jnp.int32))


def counted(rounds: dict[str, Any], **sent: Any) -> dict[str, Any]:
    """Adds one to the count of every part that was sent; "all" counts steps that send anything."""
    return {name: n + jnp.asarray(sent[name], n.dtype) for name, n in rounds.items()}
