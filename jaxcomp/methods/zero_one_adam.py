"""0/1 Adam: a variance learned now and then, 1-bit synchronization, and local steps."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import schedules
from jaxcomp._checks import require
from jaxcomp.compressors.base import Compressor, require_compressor
from jaxcomp.compressors.platforms import by_platform
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.quantize import quantize
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods import moments
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.methods.one_bit import signs_by_row
from jaxcomp.methods.step_bound import bounded, kept_back, sendable
from jaxcomp.replicas.finite import any_of, failing, unless
from jaxcomp.replicas.protocol import MethodState
from jaxcomp.replicas.types import to_varying, zeros_of


@MethodState.register
class ZeroOneAdamState(NamedTuple):
    """State of `zero_one_adam`; trees have float32 leaves of the parameters' shapes."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    momentum: Any  # this replica's own
    variance: Any  # equal on all replicas
    variance_steps: jax.Array  # i32[], steps done when it was last learned
    variance_weight: jax.Array  # f32[], the weight of all gradients in it: 1 - b2^n in Adam
    # This replica's parameters minus the consensus, since the last synchronization; an
    # `optax.MaskedNode` if every step synchronizes.
    drift: Any
    rate_sum: jax.Array  # f32[], sum of the learning rates since then
    residual: Any  # not sent yet
    owner_residual: Any  # f32[numel / R] per bucket: not passed on yet
    rounds: Any  # {"all", "synchronize", "variance", "warmup"}: i32[], how often each was sent
    skipped: jax.Array  # i32[], this replica's steps whose gradient was not finite


_EIGHT_BITS = quantize(8)
_CHECKED_STEPS = 2**16  # of both schedules, when the state is made
# Greatest share of one gradient in a variance that learns rarely: about 15 count at any time.
_LARGEST_SHARE = 1 / 8


def zero_one_adam(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    sync_at: schedules.Schedule = schedules.always,
    variance_at: schedules.Schedule | None = None,
    compressor: Compressor | Policy | Transport | None = None,
    variance_compressor: Compressor | Policy | Transport = averaging.EXACT,
    warmup_steps: int = 0,
    warmup_compressor: Compressor = _EIGHT_BITS,
    deviations: moments.Deviations | None = moments.Deviations(),
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam whose replicas take local steps and synchronize now and then with 1-bit messages.

    `params` are the consensus; gradients are taken at `jaxcomp.local_params`, which adds this
    replica's `drift`. With rate r, momentum m_i, shared variance v, D = sqrt(v) + eps, every step
    does m_i <- b1 m_i + (1 - b1) g_i and drift_i <- drift_i - r m_i / D. A step of `sync_at` then
    averages the buffers u_i = -drift_i D with compressed messages and error feedback in both
    directions. The consensus moves by -u / D, and all drifts become zero. A step of `variance_at`
    first averages g_i exactly, for v <- b2 v + (1 - b2) g^2.

    Messages hold u / D, the difference of the parameters itself (`precondition`). Steps are linear
    in momenta, since all divide by one D: the consensus is Adam's but for what messages hold back.

    Gradients, and what clips them before it, are each replica's own, of a batch R times smaller.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the square root of the variance.
      sync_at: When the replicas synchronize; see `jaxcomp.schedules.halving`.
      variance_at: When the variance is learned: in the first step, and only in steps of `sync_at`.
        Default: those in `jaxcomp.schedules.growing()`, to the end; in the paper to the warm-up's.
      compressor: Compressor, or a policy, or a transport such as `jaxcomp.gathered(compressor)`.
        Default: `sign(block=1024)`, by row for embeddings.
      variance_compressor: Compressor of the gradients that the variance learns from, float32 in
        the paper; `jaxcomp.quantize(8)` is enough.
      warmup_steps: First steps, at least 0, in which `warmup_compressor` sends the buffers, with
        the same error feedback: with one bit a model may stay on a plateau that it starts on.
      warmup_compressor: Compressor of the buffers in those steps. Leaves with a linear code, as
        `random_k`, are sent in float32 instead.
      deviations: Where it differs from the paper, see `jaxcomp.Deviations`. None: nowhere, but for
        `variance_at`, which is `schedules.growing(until=...)` there.
      weight_decay: Weight decay of the consensus, decoupled, outside the buffer.
      mask: Which leaves decay, as for `optax.adamw`.

    Returns:
      A `GradientTransformationExtraArgs` whose updates move the consensus. It keeps 3 + 1/R float32
      values per parameter: momentum, variance, residual and the owner's residual; with another
      `sync_at` than the default also the drift.

      A replica whose gradient is not finite in some leaves keeps their momentum and drift, and
      counts the step in `skipped`. If replicas synchronize in every step, no leaf's message waits
      for the gradient of another.

    Raises:
      ValueError: At construction for arguments out of range; in `init` if `variance_at` lacks the
        first step, or has one that `sync_at` lacks, up to 65,536; at trace time without `params`,
        for an unknown axis, gradients that are already reduced, or leaves that are not floating.

    References:
      Lu et al., `Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam
      <https://arxiv.org/abs/2202.06009>`_, ICLR 2023, algorithm 1. Deviations: buckets are
      compressed, not tensors, with an l1 scale per block (theirs: l2 per tensor); `deviations`; an
      optional warm-up; x and u move by this step's momentum, as in the authors' code; the first
      variance is used at once; decay is decoupled; an interval whose rates sum to zero keeps its
      momenta.
    """
    name, given = "zero_one_adam", {"sync_at": sync_at, "variance_at": variance_at}
    adam = moments.adam(name, learning_rate, b1, b2, eps, weight_decay, mask, deviations)
    are_schedules = callable(sync_at) and (variance_at is None or callable(variance_at))
    write = "sync_at=jaxcomp.schedules.every(4, steps)"
    require(are_schedules, name, "schedules", write, **given)
    if variance_at is None:
        variance_at = schedules.both(schedules.growing(), sync_at)
    require(warmup_steps >= 0, name, "at least 0", "warmup_steps=0", warmup_steps=warmup_steps)
    require_compressor(f"{name} for warmup_compressor", warmup_compressor)
    code = signs_by_row if compressor is None else compressor
    transport = transport_of(code, axis_name)
    learning = transport_of(variance_compressor, axis_name)
    always = sync_at is schedules.always

    def init_fn(params):
        schedules.plan(sync_at, variance_at, _CHECKED_STEPS)
        zero, zeros = jnp.zeros([], jnp.int32), jax.tree.map(moments.zeros, params)
        own = to_varying(zeros, axis_name)
        residual, owner_residual = averaging.nothing_sent(transport, own)
        return ZeroOneAdamState(
            count=zero,
            momentum=own,
            variance=zeros,
            variance_steps=zero,
            variance_weight=jnp.zeros([], moments.dtype_of(zeros)),
            drift=optax.MaskedNode() if always else own,
            rate_sum=jnp.zeros([], moments.dtype_of(zeros)),
            residual=residual,
            owner_residual=owner_residual,
            rounds=no_rounds("synchronize", "variance", "warmup"),
            skipped=to_varying(zero, axis_name),
        )

    def averaged(state, buffer):
        """The mean buffer with error feedback; the warm-up has a code of its own."""
        rounds, kept = state.rounds, averaging.feedback(state)
        if warmup_steps:
            is_warm = state.count < warmup_steps
            kept["instead"] = averaging.Instead(is_warm, warmup_compressor, "warmup")
        number = rounds["synchronize"] + rounds["warmup"]
        return averaging.average(transport, buffer, number, "synchronize", **kept)

    def update_fn(updates, state, params, **_):
        count = state.count
        grads = jax.tree.map(lambda g, v: g.astype(v.dtype), updates, state.variance)
        bad = failing(jax.tree.map(jnp.square, grads), axis_name)  # a variance learns from squares
        learns, meets, is_warm = variance_at(count), sync_at(count), count < warmup_steps
        learned, root, rootless = _learned(adam, state, grads, bad, learns, learning)
        still = jax.tree.map(jnp.logical_or, bad, rootless)
        start = jax.tree.map(zeros_of, state.momentum) if always else state.drift
        own = _own_step(adam, state, start, grads, still, root, axis_name)
        together = functools.partial(_together, adam, averaged, axis_name, always)
        if always:
            change, moved = together(state, own, root)
        else:
            apart = functools.partial(_apart, adam)
            change, moved = lax.cond(meets, together, apart, state, own, root)
        sent = {"synchronize": meets & ~is_warm, "variance": learns, "warmup": meets & is_warm}
        return adam.decayed(change, adam.rate_of(count), params), state._replace(
            count=optax.safe_increment(count),
            rounds=counted(state.rounds, all=meets, **sent),
            skipped=state.skipped + any_of(bad),
            **learned,
            **moved,
        )

    return method(name, axis_name, init_fn, update_fn)


def _own_step(adam, state, start, grads, still, root, axis_name):
    """The state with this replica's momentum, drift and sum of rates after a step from `start`."""
    rate = adam.rate_of(state.count)
    if adam.deviations.bias_correction:
        rate = rate / (1 - moments.power(adam.b1, state.count + 1, state.momentum))
    moved = lambda m, g: adam.b1 * m + (1 - adam.b1) * g
    whole = jax.tree.map(moved, state.momentum, grads)
    momentum = sendable(adam, state.count + 1, whole, root, state.residual, axis_name)
    momentum = unless(still, momentum, state.momentum)
    drifted = lambda d, m, s: d - rate * m / s
    drift = unless(still, jax.tree.map(drifted, start, momentum, root), start)
    return state._replace(momentum=momentum, drift=drift, rate_sum=state.rate_sum + rate)


def _together(adam, averaged, axis_name, always, state, own, root):
    """A synchronization: the consensus moves by the mean drift, and the fields that it changes.

    Args:
      adam: The constants.
      averaged: `(state, buffer) -> Averaged`.
      axis_name: Mesh axis of the replicas.
      always: Whether every step synchronizes.
      state: The state before the step.
      own: The same with this replica's own step.
      root: D in the step.
    """
    differs = adam.deviations
    if differs.fresh_variance and not always:
        root = _mean_root(adam, state, own, root)
    buffer, most = own.drift, own.rate_sum
    if not differs.precondition:
        buffer = jax.tree.map(jnp.multiply, buffer, root)
        most = jax.tree.map(lambda d: own.rate_sum * d, root)
    got = averaged(state, buffer)
    change = bounded(adam, state.count + 1, got.mean, most)
    got = got._replace(residual=kept_back(got.residual, got.mean, change))
    if not differs.precondition:
        change = jax.tree.map(jnp.divide, change, root)
    momentum = own.momentum
    if differs.mean_momentum:
        mean = lambda c, d, m: jnp.where(own.rate_sum > 0, -c * d / own.rate_sum, m)
        momentum = jax.tree.map(mean, change, root, momentum)
        # A `where` on an empty array loses the varying type.
        momentum = to_varying(momentum, axis_name)
    drift, rate_sum = jax.tree.map(zeros_of, (state.drift, own.rate_sum))
    new = {"momentum": momentum, "drift": drift, "rate_sum": rate_sum}
    return change, new | averaging.feedback(got)


def _apart(adam, state, own, root):
    """A step without synchronization: what the bound cuts off waits for the next message."""
    step = jax.tree.map(jnp.subtract, own.drift, state.drift)
    kept = bounded(adam, state.count + 1, step, own.rate_sum - state.rate_sum)
    moved = lambda d, new, step, kept: jnp.where(step == kept, new, d + kept)
    drift = jax.tree.map(moved, state.drift, own.drift, step, kept)
    if not adam.deviations.precondition:
        step, kept = (jax.tree.map(jnp.multiply, x, root) for x in (step, kept))
    residual = kept_back(state.residual, step, kept)
    new = {"momentum": own.momentum, "drift": drift, "rate_sum": own.rate_sum}
    new |= averaging.feedback(state) | {"residual": residual}
    return jax.tree.map(zeros_of, state.variance), new


def _learned(adam, state, grads, bad, learns, transport):
    """The variance's fields after a step, D in it, and which leaves have only eps: bool[] each.

    Args:
      adam: The constants.
      state: The state before the step.
      grads: This replica's own gradients.
      bad: bool[] for each leaf, whether this replica's counts as zeros.
      learns: bool[], whether the step learns the variance.
      transport: How gradients are exchanged.
    """
    count, weight = state.count, state.variance_weight
    steps = count + 1 - state.variance_steps if adam.deviations.weigh_steps else jnp.int32(1)
    keeps, new_weight = aged(adam.b2, steps, weight)
    variance = _after_mean_gradient(grads, bad, state, keeps, learns, transport)
    new, old = (variance, new_weight), (state.variance, weight)
    root, rootless = _learned_root(adam, new, old, learns)
    fields = {
        "variance": variance,
        "variance_steps": jnp.where(learns, count + 1, state.variance_steps),
        "variance_weight": jnp.where(learns, new_weight, weight),
    }
    return fields, root, rootless


def aged(b2: float, steps: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a variance keeps of itself when it is learned some steps after the last time.

    That is b2^steps, but the new squared gradient is never more than an eighth of the variance, or
    its share in Adam if that is larger. Without this bound a gradient weighs 1 - b2^steps, and a
    variance learned every thousand steps is one noisy square, near zero somewhere.

    Args:
      b2: Decay of the variance in a step, in [0, 1).
      steps: i32[], since it was last learned, at least 1.
      weight: f32[], the weight of all gradients in it; 0 before the first.

    Returns:
      The share kept, f32[] in [0, b2], and the new `weight`.
    """
    least = (1 - _LARGEST_SHARE) / (1 - _LARGEST_SHARE * (1 - weight))
    keeps = jnp.minimum(jnp.maximum(moments.power(b2, steps, weight), least), b2)
    return keeps, keeps * weight + (1 - keeps)


def _after_mean_gradient(grads, bad, state, b2, due, transport):
    """The variance after the mean gradient, if `due`; otherwise nothing is sent.

    A program that sends only in some steps needs a branch. Each bucket has its own, so that its
    message can be sent before the whole gradient is known.
    """
    count, variance = state.rounds["variance"], state.variance
    instead = averaging.Instead(~due)
    mean = averaging.average(transport, grads, count, "variance", instead=instead, zeroed=bad).mean
    new = unless(~due, optax.tree_utils.tree_update_moment(mean, variance, b2, 2), variance)
    # On a GPU each reader would compute it again from the mean and the old variance.
    once = functools.partial(by_platform, cpu=lambda v: v, default=lax.optimization_barrier)
    return jax.tree.map(once, new)


def _learned_root(adam, new, old, learns):
    """D in a step that may learn the variance, and which leaves have only eps: bool[] each.

    No leaf waits for the gradients of the others: a leaf without any gradient so far gets the mean
    of the others' old variances. In the first step there are none, and a leaf's mean gradient may
    be zero although the gradients are not.

    Args:
      adam: The constants.
      new: `(variance, weight)` after the step.
      old: The same before it.
      learns: bool[], whether the step has learned it. There is none to use before the first one.
    """
    is_first, fresh = old[1] == 0, adam.deviations.fresh_variance
    # A step that has not learned has the same variance before and after: nothing to choose.
    variance = new[0] if fresh else unless(is_first, old[0], new[0])
    weight = unless(is_first | (learns & fresh), old[1], new[1])
    guarded = is_first & learns & (adam.deviations.variance_floor > 0)
    rootless = [guarded & (total == 0) for total in moments.sums(variance)]
    # Without the barrier XLA sums old and new variances of a leaf in one kernel, and all would
    # wait.
    others = jax.tree.map(lax.optimization_barrier, old[0])
    root = adam.root(variance, weight, others=others)
    return root, jax.tree.unflatten(jax.tree.structure(variance), rootless)


def _mean_root(adam, state, own, root):
    """The D that turns the drift since a synchronization into a sum of rate * momentum.

    The last step used `root`. If it has just learned the variance, earlier steps used an older one.

    Args:
      adam: The constants.
      state: Has the `variance` before the step, its `variance_weight`, and `rate_sum`.
      own: Has `rate_sum` after it.
      root: D in the step.
    """
    before, rate = state.rate_sum, own.rate_sum - state.rate_sum
    differ = (state.variance_weight > 0) & (before > 0)

    def mean(old, new):
        return jnp.where(differ, own.rate_sum / (before / old + rate / new), new)

    return jax.tree.map(mean, adam.root(state.variance, state.variance_weight), root)
