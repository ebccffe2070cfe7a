"""The inner step: the optimizer that each replica runs alone, inside a method that exchanges."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.methods import moments
from jaxcomp.replicas.elementwise import with_whole_norms
from jaxcomp.replicas.finite import not_finite, unless
from jaxcomp.replicas.types import is_tracked, varies_over


class Synchronization(NamedTuple):
    """What an inner optimizer may know of the exchange around it, as its extra argument `sync`.

    It is equal on all replicas.
    """

    due: Any  # bool[], or True: whether replicas exchange in this step
    part: str  # the name of what is then sent in `jaxcomp.report`; "" if every step sends it
    always: bool  # whether they do in every step, but for those of a warm-up
    step: Any  # i32[], the number of this step
    alike: Any = False  # bool[], whether the gradient is the mean over the replicas


def inner_step(
    name: str,
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    axis_name: str,
    sync: Synchronization,
    extra_args: dict[str, Any],
) -> tuple[Any, Any, jax.Array]:
    """A replica's own update, which is zero if it is not finite.

    Args:
      name: Name of the method, for errors.
      inner: The optimizer.
      grads: This replica's gradients.
      state: State of the optimizer.
      params: This replica's parameters.
      axis_name: Mesh axis of the replicas.
      sync: When replicas exchange, for optimizers such as `rare_rows`.
      extra_args: Arguments of the method's update.

    Returns:
      The update in float32 or wider, or zero if it is skipped; the state after it, or the old one;
      and whether it is skipped: i32[], 0 or 1.

    Raises:
      ValueError: If the optimizer averages over the replicas, or scales shards by local norms.
    """
    update = functools.partial(inner.update, sync=sync, **extra_args)
    args = grads, state, params
    step, new_state = with_whole_norms(update, *args, axis_name=axis_name)
    _require_local(name, step, axis_name)
    step = jax.tree.map(moments.to_moment_dtype, step)
    bad = not_finite(step, axis_name)
    step = jax.tree.map(lambda u: jnp.where(bad, 0.0, u), step)
    return step, unless(bad, new_state, state), bad


def _require_local(name, step, axis_name):
    for path, leaf in jax.tree.leaves_with_path(step):
        if is_tracked(axis_name) and not varies_over(leaf, axis_name):
            raise ValueError(
                f"the inner update of {jax.tree_util.keystr(path)!r} is equal on all replicas: the "
                f"inner optimizer averages itself. {name} exchanges models, and its inner "
                f"optimizer must be local; write {name}(optax.adamw(learning_rate), "
                f"{axis_name!r}) without compressed_mean in it."
            )
