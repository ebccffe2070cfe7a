"""What all methods share: making a transformation from two functions, and checks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.replicas.layers import common_values
from jaxcomp.replicas.protocol import require_registered
from jaxcomp.replicas.types import require_varying


def method(
    name: str,
    axis_name: str,
    init_fn: Callable,
    update_fn: Callable,
    *,
    needs_params: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation from two functions, and checks their arguments.

    Args:
      name: The method's name, for errors.
      axis_name: Mesh axis of the replicas.
      init_fn: `params -> state`.
      update_fn: `(updates, state, params, **extra_args) -> (updates, state)`.
      needs_params: Whether the update needs the parameters.

    Returns:
      The transformation. Its update raises a ValueError for missing parameters, for an unknown
      axis, and for updates that are already reduced or scaled by norms of local shards. Its init
      raises one for a state that has fields of the protocol but is not a registered `MethodState`.
    """

    def started(params):
        state = init_fn(params)
        require_registered(state)
        return state

    def checked(updates, state, params=None, **extra_args):
        if needs_params and params is None:
            raise ValueError(f"{name} needs the parameters; write tx.update(grads, state, params).")
        require_varying(updates, axis_name, params)
        return update_fn(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(started, checked)


def decays(weight_decay: float, mask: Any, params: Any) -> Any:
    """The weight decay of each leaf: `weight_decay`, or 0 where masked.

    Args:
      weight_decay: The decay of unmasked leaves.
      mask: Tree of bool like `params`, or a prefix of it, whether a leaf decays; or a function that
        makes one from the parameters, as for `optax.adamw`. None: all leaves decay.
      params: The parameters. A function sees the layers of stacks one by one.
    """
    if mask is None or not weight_decay:
        return jax.tree.map(lambda _: weight_decay, params)
    decays_of = lambda decays, branch: jax.tree.map(
        lambda _: weight_decay if decays else 0.0, branch
    )
    return jax.tree.map(decays_of, common_values(mask, params) if callable(mask) else mask, params)


def no_rounds(*parts: str) -> dict[str, Any]:
    """The state's field `rounds` before the first step: how often each part was sent."""
    return dict.fromkeys(("all", *parts), jnp.zeros([], jnp.int32))


def counted(rounds: dict[str, Any], **sent: Any) -> dict[str, Any]:
    """Adds one to the count of every part that was sent; "all" counts steps that send anything."""
    return {name: n + jnp.asarray(sent[name], n.dtype) for name, n in rounds.items()}
