"""0/1 Adam as in DeepSpeed's code, made of this library's parts, to replay its traces."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax.tree_utils import tree_update_moment

from jaxcomp import schedules
from jaxcomp.compressors.base import Compressor
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods import moments
from jaxcomp.methods.common import counted, method
from jaxcomp.methods.moments import NONE
from jaxcomp.methods.zero_one_adam import ZeroOneAdamState, zero_one_adam
from jaxcomp.replicas.types import to_varying


class ZeroOneAdamDeepSpeedState(NamedTuple):
    """State of `zero_one_adam_deepspeed`."""

    # f32 leaves of the parameters' shapes, equal on all replicas until the variance is frozen.
    shared_momentum: Any
    local: ZeroOneAdamState


def zero_one_adam_deepspeed(
    learning_rate: optax.Schedule,
    axis_name: str,
    b1: float,
    b2: float,
    eps: float,
    *,
    freeze_step: int,
    sync_at: schedules.Schedule,
    variance_at: schedules.Schedule,
    compressor: Compressor | Transport,
) -> optax.GradientTransformationExtraArgs:
    """0/1 Adam whose replicas stay equal until `freeze_step`, exchanging 1-bit gradients.

    Before `freeze_step`, a step of `variance_at` is Adam's on the exact mean gradient; any other
    step moves the momentum by the mean of 1-bit gradients, with error feedback, and does not change
    the variance. From `freeze_step` on it is `jaxcomp.zero_one_adam` with that variance, and
    residuals start at zero. There is no weight decay: no trace has one.

    Args:
      learning_rate: A schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum.
      b2: Decay of the variance.
      eps: Added to the square root of the variance.
      freeze_step: Steps with 1-bit gradients; `var_freeze_step` in DeepSpeed.
      sync_at: When the replicas synchronize after that.
      variance_at: When the variance is learned before that; the first step must be one.
      compressor: Of all parameters.

    References:
      DeepSpeed 0.19.6, `ZeroOneAdam`, which left DeepSpeed in September 2026. It differs from that
      code: the first gradient is not dropped; the consensus is kept, not recovered by subtraction;
      intervals come from `sync_at`, not from a count of steps.
    """
    adam = moments.adam("adam", learning_rate, b1, b2, eps, deviations=NONE)
    transport = transport_of(compressor, axis_name)
    after_freeze = zero_one_adam(
        learning_rate,
        axis_name,
        b1,
        b2,
        eps,
        sync_at=sync_at,
        variance_at=schedules.never,
        compressor=transport,
        deviations=NONE._replace(fresh_variance=True, weigh_steps=True),
    )

    def init_fn(params):
        zeros = jax.tree.map(moments.zeros, params)
        return ZeroOneAdamDeepSpeedState(shared_momentum=zeros, local=after_freeze.init(params))

    def exact(grads, local):
        mean = averaging.average(averaging.exact(transport), grads, local.count, "variance").mean
        return mean, local.residual, local.owner_residual

    def compressed(grads, local):
        kept = averaging.feedback(local)
        got = averaging.average(transport, grads, local.count, "synchronize", **kept)
        return got.mean, got.residual, got.owner_residual

    def before_freeze(grads, state):
        local = state.local
        learns = variance_at(local.count)
        mean, *residuals = lax.cond(learns, exact, compressed, grads, local)
        learned = lambda v, g: jnp.where(learns, b2 * v + (1 - b2) * g * g, v)
        variance = jax.tree.map(learned, local.variance, mean)
        root = adam.root(variance, jnp.float32(1.0))
        momentum = tree_update_moment(mean, state.shared_momentum, b1, 1)
        ends = local.count == freeze_step - 1
        residual, owner_residual = jax.tree.map(lambda r: jnp.where(ends, 0.0, r), residuals)
        rate = adam.rate_of(local.count)
        change = jax.tree.map(lambda m, root: -rate * (m / root), momentum, root)
        sent = {"synchronize": ~learns, "variance": learns, "warmup": False}
        local = local._replace(
            count=optax.safe_increment(local.count),
            momentum=to_varying(momentum, axis_name),
            variance=variance,
            residual=residual,
            owner_residual=owner_residual,
            rounds=counted(local.rounds, all=True, **sent),
        )
        return change, ZeroOneAdamDeepSpeedState(shared_momentum=momentum, local=local)

    def update_fn(updates, state, params, **_):
        def apart(grads, state):
            change, local = after_freeze.update(grads, state.local, params)
            return change, state._replace(local=local)

        is_before = state.local.count < freeze_step
        return lax.cond(is_before, before_freeze, apart, updates, state)

    return method("zero_one_adam_deepspeed", axis_name, init_fn, update_fn)
