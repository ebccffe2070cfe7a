"""Training narrow parameters: float32 masters, kept as rounding errors, and a scale of the loss."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import require, require_static
from jaxcomp.methods.common import method
from jaxcomp.replicas.finite import not_finite, unless
from jaxcomp.replicas.protocol import (
    KeepsRounding,
    MethodState,
    is_narrow,
    keeps_rounding,
    widened,
    with_extra_args,
)


@KeepsRounding.register
class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    # f32 leaves of the parameters' shapes, equal on all replicas: the masters minus the parameters;
    # None for leaves that are float32 or wider.
    remainder: Any
    inner: Any  # state of the transformation, which sees the masters


def master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Trains bfloat16 or float16 parameters as if they were float32.

    A narrow parameter loses every update below half of its last bit: in bfloat16 all updates below
    1/512 of the parameter. Here `tx` sees gradients, parameters and moments in float32. The state
    keeps a remainder: parameters plus remainder are the masters, and the parameters are the masters
    rounded to nearest. So you may load or change parameters outside. With
    `jaxcomp.compact(..., 16, fields=("remainder",))` parameter and remainder together take 4 bytes,
    with 16 more bits of precision than the parameter alone.

    Wrap the whole chain in it, inside `jaxcomp.per_replica`; in `optax.partition`, wrap each group.
    `cocktail_sgd`, `local_steps`, `slamb` and `sharded_optimizer` keep the rounding errors
    themselves, the last one in its owners' pieces, and need no masters.

    If replicas drift, gradients are taken at the narrow parameters plus the drift.

    Args:
      tx: Any transformation, from this library or from optax, or a chain.

    Returns:
      A `GradientTransformationExtraArgs` whose float32 updates are the changes of the narrow
      parameters, mostly zeros in bfloat16. Pass them to `optax.apply_updates` unchanged. It keeps
      one float32 for each narrow parameter, and the moments of `tx` are float32 too.

    Raises:
      ValueError: In `init` if a method in `tx` keeps the rounding errors itself; in `update`
        without `params`.

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, ICLR
      2018, section 3.1. Deviation: the remainder is kept, not the masters.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> mean = jaxcomp.compressed_mean(jaxcomp.quantize(8), "replica")
      >>> tx = jaxcomp.master_weights(optax.chain(mean, optax.adamw(2e-4)))
    """
    tx = with_extra_args(tx, "master_weights")

    def init_fn(params):
        inner = tx.init(jax.tree.map(widened, params))
        if keeps_rounding(inner):
            raise ValueError(
                "master_weights got a method that keeps what narrow parameters round off by "
                "itself, as cocktail_sgd, local_steps, slamb and sharded_optimizer do; leave "
                "master_weights out, or in optax.partition put it around the other groups alone."
            )
        nothing = lambda p: jnp.zeros_like(widened(p)) if is_narrow(p) else None
        return MasterWeightsState(remainder=jax.tree.map(nothing, params), inner=inner)

    def update_fn(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "master_weights needs the parameters; write tx.update(grads, state, params)."
            )
        masters = jax.tree.map(_master, params, state.remainder)
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, masters)
        changes, inner = tx.update(grads, state.inner, masters, **extra_args)
        rounded = jax.tree.map(_rounded, params, masters, changes)
        remainder = jax.tree.map(_remainder, params, masters, changes, rounded)
        moves = jax.tree.map(_moves, params, changes, rounded)
        return moves, MasterWeightsState(remainder=remainder, inner=inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _master(param, remainder):
    return param if remainder is None else widened(param) + remainder


def _rounded(param, master, change):
    """The new parameter, in the dtype of its master."""
    new = master + change
    # The barrier keeps XLA from dropping the cast there and back (excess precision).
    return lax.optimization_barrier(new.astype(param.dtype)).astype(new.dtype)


def _remainder(param, master, change, rounded):
    return master + change - rounded if is_narrow(param) else None


def _moves(param, change, rounded):
    # Wide parameters round nothing off, but a difference of two sums would.
    return rounded - widened(param) if is_narrow(param) else change


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
      initial: The first scale, from 1 to 2**24.
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
    first = "optax.chain(mean, optax.adam(learning_rate))"
    require_static(name, first, initial=initial, growth_steps=growth_steps)
    in_range = 1 <= initial <= _GREATEST
    require(in_range, name, "a scale from 1 to 2**24", "initial=2.0**15", initial=initial)
    grows, needs = {"growth_steps": growth_steps}, "at least 1 and below 2**31"
    require(1 <= growth_steps < 2**31, name, needs, "growth_steps=2000", **grows)
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
            overflows=state.overflows + bad.astype(jnp.int32),
            inner=unless(bad, inner, state.inner),
        )

    return method(name, axis_name, init_fn, update_fn, needs_params=False)
