"""1-bit Adam: dense Adam first, then a frozen variance and 1-bit messages of the momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.tree_utils import tree_update_moment

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods import moments, one_bit
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.methods.one_bit import signs_by_row
from jaxcomp.replicas.finite import poisoned, unless
from jaxcomp.replicas.protocol import MethodState


@MethodState.register
class OneBitAdamState(NamedTuple):
    """State of `one_bit_adam`; trees have float32 leaves of the parameters' shapes."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    momentum: Any  # equal on all replicas
    variance: Any  # equal on all replicas, frozen after the warm-up
    residual: Any  # not sent yet
    owner_residual: Any  # f32[numel / R] per bucket: not passed on yet
    rounds: Any  # {"all", "synchronize", "variance"}: i32[], how often each was sent
    frozen: jax.Array  # bool[], whether the warm-up has ended
    # f32[1 / (1 - b2)], the variance's l1 norms of the last steps; None with a given freeze_step.
    norms: Any


def one_bit_adam(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    freeze_step: int | None = None,
    freeze_ratio: float = 0.96,
    compressor: Compressor | Policy | Transport | None = None,
    deviations: moments.Deviations | None = moments.Deviations(),
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam on exact mean gradients until the variance is stable, then on 1-bit mean momenta.

    With D = sqrt(v) + eps, a step of the warm-up is Adam's. Later steps do m_i <- b1 m + (1 - b1)
    g_i and m <- the compressed mean of m_i, with error feedback in both directions and the frozen
    v.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the square root of the variance.
      freeze_step: Steps of the warm-up, at least 1: 15 to 25% of a run in the paper. None: see
        `freeze_ratio`.
      freeze_ratio: The warm-up ends when the variance's l1 norm 1 / (1 - b2) steps ago is this
        share of the current one, in (0, 1). It ignores the learning rate's own warm-up: if that may
        end later, give `freeze_step`.
      compressor: Compressor of all parameters; or a policy `(path, leaf) -> Compressor`; or
        a transport, such as `jaxcomp.gathered(compressor)`. Default: `jaxcomp.sign(block=1024)`,
        for embeddings with a scale for each row.
      deviations: Where it differs from the paper, see `jaxcomp.Deviations`; None: nowhere.
      weight_decay: Weight decay, decoupled.
      mask: Which leaves decay, a tree of bool or a function of the parameters as for `optax.adamw`.

    Returns:
      A `GradientTransformationExtraArgs`. It keeps 3 + 1/R float32 values per parameter: momentum,
      variance and the residuals. A gradient that is not finite makes the update NaN on all
      replicas, for `jaxcomp.train_step` to skip.

    Raises:
      ValueError: At construction for arguments out of range; at trace time for an unknown axis,
        gradients that are already reduced, leaves that are not floating, or `weight_decay`
        without `params`.

    References:
      Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
      Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, algorithm 1. Deviations: buckets are
      compressed, not tensors, with an l1 scale per block (theirs: l2 per tensor); `deviations`;
      the first step is not dropped.
    """
    name = "one_bit_adam"
    adam = moments.adam(name, learning_rate, b1, b2, eps, weight_decay, mask, deviations)
    one_bit.check(name, deviations)
    freeze = one_bit.freeze(name, freeze_step, freeze_ratio)
    code = signs_by_row if compressor is None else compressor
    transport = transport_of(code, axis_name)

    def init_fn(params):
        zeros = jax.tree.map(moments.zeros, params)
        residual, owner_residual = averaging.nothing_sent(transport, zeros)
        return OneBitAdamState(
            count=jnp.zeros([], jnp.int32),
            momentum=zeros,
            variance=zeros,
            residual=residual,
            owner_residual=owner_residual,
            rounds=no_rounds("synchronize", "variance"),
            frozen=jnp.zeros([], bool),
            norms=freeze.no_norms(b2, zeros),
        )

    def update_fn(updates, state, params, **_):
        frozen, learned = freeze.holds(state), state.rounds["variance"]
        root = adam.root(state.variance, adam.weight(learned, state.variance))
        unit = root if adam.deviations.precondition else None
        phase = one_bit.exchanged(adam, transport, frozen, state, updates, root, unit)
        learnt = tree_update_moment(phase.mean, state.variance, b2, 2)
        variance = unless(frozen, learnt, state.variance)
        root = one_bit.root_after(adam, frozen, learned, variance, root)
        rate = poisoned(phase.failed, adam.rate_of(state.count))
        correction = adam.first_correction(state.count + 1, phase.momentum)
        change = jax.tree.map(lambda m, d: -rate * correction * m / d, phase.momentum, root)
        if weight_decay:
            change = adam.decayed(change, rate, params)
        freezes, norms = freeze.after(frozen, state, variance)
        return change, OneBitAdamState(
            count=optax.safe_increment(state.count),
            momentum=phase.momentum,
            variance=variance,
            residual=phase.residual,
            owner_residual=phase.owner_residual,
            rounds=counted(state.rounds, all=True, synchronize=frozen, variance=~frozen),
            frozen=freezes,
            norms=norms,
        )

    return method(name, axis_name, init_fn, update_fn, needs_params=bool(weight_decay))
