"""0/1 Adam as in DeepSpeed's code: 1-bit gradients until the variance is frozen."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax.tree_utils import tree_update_moment

from jaxcomp import schedules
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.sign import sign
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods import moments
from jaxcomp.methods.common import counted, method, require
from jaxcomp.methods.moments import NONE
from jaxcomp.methods.step_bound import bounded, kept_back, sendable
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
    compressor: Compressor | Policy | Transport | None = None,
    step_bound: float | None = 1.0,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """0/1 Adam whose replicas stay equal until `freeze_step`, exchanging 1-bit gradients.

    Before `freeze_step`, a step of `variance_at` is Adam's on the exact mean gradient; any other
    step moves the momentum by the mean of 1-bit gradients, with error feedback, and does not change
    the variance. From `freeze_step` on it is `jaxcomp.zero_one_adam` with that variance, and
    residuals start at zero; but weight decay is part of what is averaged.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the square root of the variance.
      freeze_step: Steps with 1-bit gradients, at least 1; `var_freeze_step` in DeepSpeed.
      sync_at: When the replicas synchronize after that; see `jaxcomp.schedules.halving`.
      variance_at: When the variance is learned before that; the first step must be one. Default:
        `jaxcomp.schedules.growing()`.
      compressor: Compressor of all parameters; or a policy `(path, leaf) -> Compressor`; or
        a transport, such as `jaxcomp.gathered(compressor)`. Default: `jaxcomp.sign(block=1024)`.
      step_bound: Most that a coordinate moves in a step, decay aside, in units of the most that
        Adam could move it with any gradients; None: no bound, as in DeepSpeed.
      weight_decay: Weight decay. After the freeze each replica decays its own parameters, as part
        of its drift. From there the decay enters the momenta and acts again: replicas that
        synchronize every H steps decay 1 / (1 - mean of b1, ..., b1^H) times as fast as written, 10
        times for H = 1 and b1 = 0.9. In `zero_one_adam` it acts as written.
      mask: Which leaves decay, a tree of bool or a function of the parameters as for `optax.adamw`.

    Returns:
      A `GradientTransformationExtraArgs`. It keeps 5 + 1/R float32 values per parameter. One of
      them, `shared_momentum`, has a type that JAX can prove to be equal everywhere.

    Raises:
      ValueError: As `zero_one_adam`; also at construction for `freeze_step` below 1, and in `init`
        if `variance_at` does not include the first step.

    References:
      DeepSpeed 0.19.6, `ZeroOneAdam`, which left DeepSpeed in September 2026. It shares these
      differences from the paper: until the freeze gradients are compressed, not buffers; a step of
      `variance_at` sends no 1-bit message; the variance is learned before its use; the residual
      starts again at zero at the freeze; there is no bias correction; the buffer is kept as the
      change of the parameters, including their decay; the state is not cut over the replicas
      (ZeRO). It differs from that code: `step_bound` (off: None); the first gradient is not
      dropped; the consensus is kept, not recovered by subtraction; a sum of rates that is zero is
      not a divisor; buckets are compressed, not tensors, with an l1 scale per block (theirs: l2 per
      tensor); there is no
      `exp_avg_mask`, so leaves with rows that never have a gradient need `identity()` through a
      policy; checkpoints keep the residuals; the count tells whether a loaded state is before or
      after the freeze (theirs: a key that nobody reads); intervals come from `sync_at`, not from a
      count of steps.
    """
    name = "zero_one_adam_deepspeed"
    differs = NONE._replace(step_bound=step_bound)
    adam = moments.adam(name, learning_rate, b1, b2, eps, weight_decay, mask, differs)
    write = "the steps of the learning rate's warm-up"
    require(freeze_step >= 1, name, "at least 1", write, freeze_step=freeze_step)
    variance_at = schedules.growing() if variance_at is None else variance_at
    transport = transport_of(sign(block=1024) if compressor is None else compressor, axis_name)
    after_freeze = zero_one_adam(
        learning_rate,
        axis_name,
        b1,
        b2,
        eps,
        sync_at=sync_at,
        variance_at=schedules.never,
        compressor=transport,
        deviations=differs._replace(fresh_variance=True, weigh_steps=True),
    )

    def init_fn(params):
        # Only the steps before the freeze.
        learned_at = schedules.both(variance_at, schedules.until(freeze_step))
        schedules.plan(schedules.always, learned_at, steps=1)
        zeros = jax.tree.map(moments.zeros, params)
        return ZeroOneAdamDeepSpeedState(shared_momentum=zeros, local=after_freeze.init(params))

    def exact(grads, state):
        local = state.local
        mean = averaging.average(averaging.exact(transport), grads, local.count, "variance").mean
        return mean, local.residual, local.owner_residual

    def compressed(grads, state):
        old, local = state.shared_momentum, state.local
        root, kept = adam.root(local.variance, jnp.float32(1.0)), averaging.feedback(local)
        whole = tree_update_moment(grads, old, b1, 1)
        own = sendable(adam, local.count + 1, whole, root, local.residual, axis_name)
        # The gradient of the bounded momentum; a difference from a huge one would be rounded off.
        implied = lambda g, m, own, old: jnp.where(m == own, g, (own - b1 * old) / (1 - b1))
        grads = jax.tree.map(implied, grads, whole, own, old)
        got = averaging.average(transport, grads, local.count, "synchronize", **kept)
        return got.mean, got.residual, got.owner_residual

    def before_freeze(grads, state, params):
        local = state.local
        learns = variance_at(local.count)
        mean, residual, owner_residual = lax.cond(learns, exact, compressed, grads, state)
        learned = lambda v, g: jnp.where(learns, b2 * v + (1 - b2) * g * g, v)
        variance = jax.tree.map(learned, local.variance, mean)
        root = adam.root(variance, jnp.float32(1.0))
        whole = tree_update_moment(mean, state.shared_momentum, b1, 1)
        momentum = bounded(adam, local.count + 1, whole, root)
        cut = unless(learns, _kept_back(adam, residual, whole, momentum), residual)
        ends = local.count == freeze_step - 1
        residual, owner_residual = jax.tree.map(
            lambda r: jnp.where(ends, 0.0, r), (cut, owner_residual)
        )
        rate = adam.rate_of(local.count)
        moved = lambda m, root, p, decay: -rate * (m / root + decay * p)
        change = jax.tree.map(moved, momentum, root, params, adam.decays(params))
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
        grads, bad = moments.gradients(updates, state.shared_momentum, axis_name)

        def together(grads):
            # A gradient that is not finite is dropped, as `zero_one_adam` does later on.
            grads = jax.tree.map(lambda g: jnp.where(bad, 0.0, g), grads)
            change, new = before_freeze(grads, state, params)
            return change, new._replace(local=new.local._replace(skipped=state.local.skipped + bad))

        def apart(grads):
            local = _decayed(adam, state.local, params, bad)
            change, local = after_freeze.update(grads, local, params)
            return change, state._replace(local=local)

        return lax.cond(state.local.count < freeze_step, together, apart, grads)

    return method(name, axis_name, init_fn, update_fn)


def _kept_back(adam, grads, whole, moved):
    """As `kept_back` of momenta, in gradients: before the freeze, these are sent."""
    in_gradients = lambda momentum: jax.tree.map(lambda m: m / (1 - adam.b1), momentum)
    return kept_back(grads, in_gradients(whole), in_gradients(moved))


def _decayed(adam, local, params, bad):
    """The state with the decay of this replica's own parameters in its drift.

    The step only adds to the drift, so the decay may come first.
    """
    rate = adam.rate_of(local.count)
    less = lambda d, p, decay: d - decay * rate * (p + d)
    shrunk = jax.tree.map(less, local.drift, params, adam.decays(params))
    return local._replace(drift=unless(bad, shrunk, local.drift))
