"""0/1 Adam as DeepSpeed's code has it: 1-bit gradients until the variance is frozen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import schedules
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import policy_of
from jaxcomp.compressors.sign import sign
from jaxcomp.exchange import averaging, wire
from jaxcomp.methods import moments
from jaxcomp.methods.common import counted, method, require
from jaxcomp.methods.zero_one_adam import ZeroOneAdamState, zero_one_adam
from jaxcomp.replicas.finite import unless
from jaxcomp.replicas.types import to_varying


class ZeroOneAdamDeepSpeedState(NamedTuple):
    """State of `zero_one_adam_deepspeed`."""

    # f32 leaves of the parameters' shapes, equal on all replicas until the variance is frozen.
    shared_momentum: Any
    local: ZeroOneAdamState


def zero_one_adam_deepspeed(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    freeze_step: int,
    sync_at: schedules.Schedule = schedules.always,
    variance_at: schedules.Schedule | None = None,
    compressor: Compressor | Callable[[str, Any], Compressor] | None = None,
    weight_decay: float = 0.0,
    mask: Any = None,
    exchange: wire.Exchange = wire.two_shot,
    bucket_numel: int | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """0/1 Adam whose replicas stay together until `freeze_step`, exchanging 1-bit gradients.

    Before `freeze_step`, a step of `variance_at` is Adam's on the exact mean gradient; any other
    moves the momentum by the mean of 1-bit gradients, with error feedback, at the variance as it
    is. From then on it is `jaxcomp.zero_one_adam` with that variance, and residuals from zero; but
    weight decay is part of what is averaged.

    Args:
      learning_rate: Rate, or schedule of the step.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the root of the variance.
      freeze_step: Steps with 1-bit gradients, at least 1; `var_freeze_step` there.
      sync_at: When the replicas meet after that; see `jaxcomp.schedules.halving`.
      variance_at: When the variance is learned before it, in the first step too. Default:
        `jaxcomp.schedules.growing()`.
      compressor: Compressor of all parameters; or a policy `(path, leaf) -> Compressor`. Default:
        `jaxcomp.sign(block=1024)`.
      weight_decay: Rate of decay. After the freeze each replica decays its own parameters, as part
        of its drift, from where the decay enters the momenta and acts again: replicas that meet
        every H steps decay 1 / (1 - mean of b1, ..., b1^H) times as fast as written, 10 times for
        H = 1 and b1 = 0.9. That of `zero_one_adam` acts as written.
      mask: Which leaves decay, a tree of bool or a function of the parameters as for `optax.adamw`.
      exchange: How buckets travel: `wire.two_shot`, or `wire.gathered` for two replicas.
      bucket_numel: Most elements of one message's bucket; by default at most 8 buckets a code.
      seed: Seed of the compressor's noise, if it has any.

    Returns:
      A `GradientTransformationExtraArgs`. It keeps five float32 values a parameter (of which
      `shared_momentum` for a type that JAX can prove to be equal everywhere) and 1/R of one.

    Raises:
      ValueError: As `zero_one_adam`, and at construction for `freeze_step` under 1; in `init` if
        `variance_at` does not hold in the first step.

    References:
      DeepSpeed 0.19.6, `ZeroOneAdam`, which left DeepSpeed in September 2026. It differs
      from the paper as that does: gradients and not buffers are compressed until the freeze; a
      step of `variance_at` sends no 1-bit message; the variance is learned before its use; the
      residual starts anew at the freeze; there is no bias correction; the buffer is kept as what
      the parameters moved by, their decay too; the state is not cut over the replicas (ZeRO). Not
      taken over: the first gradient is not dropped; the consensus is kept, and not rolled back to
      by subtraction; rates that sum to zero are not divided by; buckets and not tensors are
      compressed, by an l1 scale per block (there: l2 per tensor); there is no
      `exp_avg_mask`, so that leaves with rows that never have a gradient need `identity()`, by a
      policy; the residuals are kept in checkpoints; a loaded state is before or after the freeze
      by its count (there by a key that nobody reads); intervals come from `sync_at`, not from a
      count of steps.
    """
    adam = moments.adam(_NAME, learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    write = "the steps of the learning rate's warm-up"
    require(freeze_step >= 1, _NAME, "at least 1", write, freeze_step=freeze_step)
    variance_at = schedules.growing() if variance_at is None else variance_at
    policy = policy_of(sign(block=1024) if compressor is None else compressor)
    after_freeze = zero_one_adam(
        learning_rate,
        axis_name,
        b1,
        b2,
        eps,
        sync_at=sync_at,
        variance_at=schedules.never,
        compressor=policy,
        precondition=False,
        variance_floor=0.0,
        bias_correction=False,
        exchange=exchange,
        bucket_numel=bucket_numel,
        seed=seed,
    )
    transport = averaging.Transport(policy, exchange, axis_name, bucket_numel, seed)
    settings = _Settings(adam, transport, freeze_step, variance_at, after_freeze)
    init, update = (functools.partial(function, settings) for function in (_init, _update))
    return method(_NAME, axis_name, init, update)


_NAME = "zero_one_adam_deepspeed"


class _Settings(NamedTuple):
    adam: moments.Adam
    transport: averaging.Transport
    freeze_step: int
    variance_at: schedules.Schedule
    after_freeze: optax.GradientTransformationExtraArgs


def _init(settings, params):
    # Only the steps before the freeze; not `never` itself, which a plan asks nothing.
    learned_at = schedules.both(settings.variance_at, schedules.until(settings.freeze_step))
    schedules.plan(schedules.always, learned_at, steps=1)
    zeros = jax.tree.map(moments.zeros, params)
    return ZeroOneAdamDeepSpeedState(zeros, settings.after_freeze.init(params))


def _update(settings, updates, state, params, **_):
    grads, bad = moments.gradients(updates, state.shared_momentum, settings.transport.axis_name)

    def together(grads):
        # A gradient that is not finite is left out, as `zero_one_adam` does later on.
        grads = jax.tree.map(lambda g: jnp.where(bad, 0.0, g), grads)
        change, new = _before_freeze(settings, grads, state, params)
        return change, new._replace(local=new.local._replace(skipped=state.local.skipped + bad))

    def apart(grads):
        local = _decayed(settings.adam, state.local, params, bad)
        change, local = settings.after_freeze.update(grads, local, params)
        return change, ZeroOneAdamDeepSpeedState(state.shared_momentum, local)

    return lax.cond(state.local.count < settings.freeze_step, together, apart, grads)


def _before_freeze(settings, grads, state, params):
    adam, local = settings.adam, state.local
    learns = settings.variance_at(local.count)
    ways = (functools.partial(way, settings.transport) for way in (_exact, _compressed))
    mean, *residuals = lax.cond(learns, *ways, grads, local)
    ends = local.count == settings.freeze_step - 1
    residuals = jax.tree.map(lambda r: jnp.where(ends, 0.0, r), residuals)
    momentum = optax.tree_utils.tree_update_moment(mean, state.shared_momentum, adam.b1, 1)
    learned = lambda v, g: jnp.where(learns, adam.b2 * v + (1 - adam.b2) * g * g, v)
    variance = jax.tree.map(learned, local.variance, mean)
    rate = adam.rate_of(local.count)

    def moved(m, v, p, decay):
        return -rate * (m / (jnp.sqrt(v) + adam.eps) + decay * p)

    change = jax.tree.map(moved, momentum, variance, params, adam.decays(params))
    sent = {"synchronize": ~learns, "variance": learns, "warmup": False}
    local = local._replace(
        count=optax.safe_increment(local.count),
        momentum=to_varying(momentum, settings.transport.axis_name),
        variance=variance,
        residual=residuals[0],
        owner_residual=residuals[1],
        rounds=counted(local.rounds, all=True, **sent),
    )
    return change, ZeroOneAdamDeepSpeedState(momentum, local)


def _exact(transport, grads, local):
    mean = averaging.average(averaging.exact(transport), grads, local.count, "variance").mean
    return mean, local.residual, local.owner_residual


def _compressed(transport, grads, local):
    kept = averaging.feedback(local)
    got = averaging.average(transport, grads, local.count, "synchronize", **kept)
    return got.mean, got.residual, got.owner_residual


def _decayed(adam, local, params, bad):
    """The state with the decay of this replica's own parameters in its drift.

    The step itself only adds to the drift, so that the decay may come first.
    """
    rate = adam.rate_of(local.count)
    less = lambda d, p, decay: d - decay * rate * (p + d)
    shrunk = jax.tree.map(less, local.drift, params, adam.decays(params))
    return local._replace(drift=unless(bad, shrunk, local.drift))
