"""A loss scale that all replicas agree on, for gradients of float16."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.methods.common import method, require
from jaxcomp.replicas.finite import not_finite, unless
from jaxcomp.replicas.protocol import MethodState
from jaxcomp.replicas.wrapping import widened, with_extra_args

_GREATEST = 2.0**24


@MethodState.register
class LossScaleState(NamedTuple):
    """State of `loss_scale`; its scalars are equal on all replicas."""

    loss_scale: jax.Array  # f32[], the factor of the loss
    good_steps: jax.Array  # i32[], since the scale last changed
    overflows: jax.Array  # i32[], steps that all replicas skipped
    inner: Any


def loss_scale(
    tx: optax.GradientTransformation,
    axis_name: str,
    *,
    initial: float = 2.0**15,
    growth_steps: int = 2000,
) -> optax.GradientTransformationExtraArgs:
    """Keeps the gradients of float16 parameters in float16's range by scaling the loss.

    `jaxcomp.train_step` multiplies the loss by the scale in the state, and the gradients that reach
    `tx` are divided by it again, in float32. If the gradient of any replica is not finite, all
    replicas skip the step, parameters and the state of `tx` do not change, and the scale halves,
    down to 1. After `growth_steps` good steps it doubles, up to 2**24.

    This rule takes precedence over those of the methods: replicas that would skip a step on their
    own skip it together. `overflows` counts these steps; the metrics' `skipped` does not. In your
    own step, multiply the loss by the state's field `loss_scale`. Float16 also rounds off small
    updates: see `jaxcomp.master_weights`, which may be inside or around this.

    Args:
      tx: The whole chain.
      axis_name: Mesh axis of the replicas.
      initial: The first scale, at least 1.
      growth_steps: Good steps after which it doubles, at least 1.

    Returns:
      A `GradientTransformationExtraArgs`. It sends 4 bytes per step, and decides before `tx` runs,
      so the exchange cannot overlap with the gradient.

    Raises:
      ValueError: At construction for arguments out of range; at trace time for an unknown axis, or
        gradients that are already reduced.

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, ICLR
      2018, section 3.2.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> mean = jaxcomp.compressed_mean(jaxcomp.quantize(8), "replica")
      >>> tx = jaxcomp.master_weights(optax.chain(mean, optax.adamw(2e-4)))
      >>> tx = jaxcomp.loss_scale(tx, "replica")
    """
    name = "loss_scale"
    require(initial >= 1, name, "at least 1", "initial=2.0**15", initial=initial)
    require(growth_steps >= 1, name, "at least 1", "growth_steps=2000", growth_steps=growth_steps)
    tx = with_extra_args(tx, name)

    def init_fn(params):
        zero = jnp.zeros([], jnp.int32)
        return LossScaleState(
            loss_scale=jnp.float32(initial), good_steps=zero, overflows=zero, inner=tx.init(params)
        )

    def update_fn(updates, state, params, **extra_args):
        bad = lax.pmax(not_finite(updates, axis_name), axis_name) > 0
        grads = jax.tree.map(lambda g: widened(g) / state.loss_scale, updates)
        changes, inner = tx.update(grads, state.inner, params, **extra_args)
        changes = jax.tree.map(lambda c: jnp.where(bad, 0, c), changes)
        grows = state.good_steps + 1 >= growth_steps
        grown = jnp.where(grows, jnp.minimum(2 * state.loss_scale, _GREATEST), state.loss_scale)
        return changes, LossScaleState(
            loss_scale=jnp.where(bad, jnp.maximum(state.loss_scale / 2, 1), grown),
            good_steps=jnp.where(bad | grows, 0, state.good_steps + 1),
            overflows=state.overflows + bad,
            inner=unless(bad, inner, state.inner),
        )

    return method(name, axis_name, init_fn, update_fn, needs_params=False)
