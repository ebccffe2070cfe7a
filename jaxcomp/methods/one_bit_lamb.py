"""1-bit LAMB: dense LAMB first, then 1-bit momenta with the trust ratios learned there."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.tree_utils import tree_update_moment

from jaxcomp._checks import require
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.sign import sign
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods import moments, one_bit
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.replicas.finite import poisoned, unless
from jaxcomp.replicas.layers import broadcast_over, in_batches, own_axes
from jaxcomp.replicas.protocol import MethodState
from jaxcomp.replicas.types import largest, sums_over_shards


@MethodState.register
class OneBitLambState(NamedTuple):
    """State of `one_bit_lamb`; trees have float32 leaves of the parameters' shapes or of none."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    momentum: Any  # equal on all replicas
    variance: Any  # equal on all replicas, frozen after the warm-up
    fresh_variance: Any  # goes on after it, from gradients estimated from momenta
    residual: Any  # not sent yet
    owner_residual: Any  # f32[numel / R] per bucket: not passed on yet
    layers: Any  # a `Trust` per leaf
    rounds: Any  # {"all", "synchronize", "variance"}: i32[], how often each was sent
    frozen: jax.Array  # bool[], whether the warm-up has ended
    norms: Any  # f32[1 / (1 - b2)], of the last variances, l1; None with a given freeze_step


class TrustRatio(NamedTuple):
    """How `one_bit_lamb` learns a layer's trust ratio in its warm-up, and corrects it later.

    Attributes:
      bounds: Least and greatest trust ratio of the warm-up.
      decay: Decay of its moving average, in [0, 1).
      factor_bounds: Least and greatest factor that corrects the average later.
      factor_change: Greatest change of a factor in a step, as a share of itself, in (0, 1).
    """

    bounds: tuple[float, float] = (0.01, 10.0)
    decay: float = 0.9
    factor_bounds: tuple[float, float] = (0.5, 4.0)
    factor_change: float = 0.1


def one_bit_lamb(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    *,
    freeze_step: int | None = None,
    freeze_ratio: float = 0.96,
    trust: TrustRatio = TrustRatio(),
    compressor: Compressor | Policy | Transport | None = None,
    deviations: moments.Deviations | None = moments.Deviations(variance_floor=1e-4),
    weight_decay: float = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """LAMB on exact mean gradients until the variance is stable, then on 1-bit mean momenta.

    With D = sqrt(v) + eps and u = m / D + weight_decay * x, a step of the warm-up is LAMB's: each
    layer moves by -rate c u, with its trust ratio c = clip(||x|| / ||u||), of which a moving
    average C is kept. Later steps do m_i <- b1 m + (1 - b1) g_i and m <- the compressed mean of
    m_i, with error feedback in both directions, and move by -rate C f u with the frozen v. The
    factor f follows how v would have changed: it is the largest quotient of D and the D of a
    variance that goes on with gradients estimated from m, and closer to 1 if decay is most of u. It
    stays in its bounds, and changes slowly (`trust`). A layer whose norm, or whose update's norm,
    was zero in the whole warm-up has no trust ratio, and does not move after it.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the square root of the variance.
      freeze_step: Steps of the warm-up, at least 1; a sixth of a run in the paper. See
        `freeze_ratio` for None.
      freeze_ratio: Share in (0, 1) that ends the warm-up, see `jaxcomp.one_bit_adam`.
      trust: Bounds of c and f, and how fast C and f may change, see `jaxcomp.TrustRatio`.
      compressor: Compressor of all parameters; or a policy `(path, leaf) -> Compressor`; or
        a transport, such as `jaxcomp.gathered(compressor)`. Default: `jaxcomp.sign(block=1024)`.
      deviations: Where it differs from the paper, see `jaxcomp.Deviations`; None: nowhere. The
        default has a smaller `variance_floor` than the other methods'.
      weight_decay: Weight decay, inside u.
      mask: Which leaves decay, a tree of bool or a function of the parameters as for `optax.adamw`.

    Returns:
      A `GradientTransformationExtraArgs`. It keeps 4 + 1/R float32 values per parameter: momentum,
      two variances and the residuals. A gradient that is not finite makes the update NaN on all
      replicas, for `jaxcomp.train_step` to skip. Norms are over all shards of a leaf.

    Raises:
      ValueError: At construction for arguments out of range; at trace time without `params`, for
        an unknown axis, gradients that are already reduced, or leaves that are not floating.

    References:
      Li et al., `1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
      Convergence Speed <https://arxiv.org/abs/2104.06069>`_, HiPC 2022, algorithm 1. Deviations: an
      l1 scale per block of a bucket (theirs: one l2 scale for all); `deviations`;
      the mean magnitude leaves out layers whose momentum is zero; empty layers do not divide by
      zero; the first step is not dropped.
    """
    name = "one_bit_lamb"
    adam = moments.adam(name, learning_rate, b1, b2, eps, weight_decay, mask, deviations)
    one_bit.check(name, deviations)
    freeze = one_bit.freeze(name, freeze_step, freeze_ratio)
    code = sign(block=1024) if compressor is None else compressor
    transport = transport_of(code, axis_name)
    _check(name, trust)
    is_preconditioned = adam.deviations.precondition

    def init_fn(params):
        zeros = jax.tree.map(moments.zeros, params)
        residual, owner_residual = averaging.nothing_sent(transport, zeros)
        return OneBitLambState(
            count=jnp.zeros([], jnp.int32),
            momentum=zeros,
            variance=zeros,
            fresh_variance=zeros,
            residual=residual,
            owner_residual=owner_residual,
            layers=_unseen(zeros),
            rounds=no_rounds("synchronize", "variance"),
            frozen=jnp.zeros([], bool),
            norms=freeze.no_norms(b2, zeros),
        )

    def update_fn(updates, state, params, **_):
        frozen, learned = freeze.holds(state), state.rounds["variance"]
        root = adam.root(state.variance, adam.weight(learned, state.variance))
        unit = root if is_preconditioned else _units(state, root)
        phase = one_bit.exchanged(adam, transport, frozen, state, updates, root, unit)
        gradient_of = lambda new, old: (new - b1 * old) / (1 - b1)
        implied = jax.tree.map(gradient_of, phase.momentum, state.momentum)
        gradient = unless(frozen, phase.mean, implied)
        fresh = tree_update_moment(gradient, state.fresh_variance, b2, 2)
        variance = unless(frozen, fresh, state.variance)
        fresh_root = adam.root(fresh, adam.weight(state.count + 1, fresh))
        quotients = largest_quotients(root, fresh_root, axis_name)
        root = one_bit.root_after(adam, frozen, learned, variance, root)
        directions, squares = _directions(
            adam, state.count + 1, phase.momentum, root, params, axis_name
        )
        layers, steps = _trusted(
            adam, trust, frozen, _layers(state), squares, quotients, directions
        )
        if not is_preconditioned:
            layers = _evened(frozen, layers, phase.momentum, axis_name)
        rate = poisoned(phase.failed, -adam.rate_of(state.count))
        treedef = jax.tree.structure(params)
        freezes, norms = freeze.after(frozen, state, variance)
        return treedef.unflatten([rate * step for step in steps]), OneBitLambState(
            count=optax.safe_increment(state.count),
            momentum=phase.momentum,
            variance=variance,
            fresh_variance=fresh,
            residual=phase.residual,
            owner_residual=phase.owner_residual,
            layers=treedef.unflatten(layers),
            rounds=counted(state.rounds, all=True, synchronize=frozen, variance=~frozen),
            frozen=freezes,
            norms=norms,
        )

    return in_batches(method(name, axis_name, init_fn, update_fn))


def _check(name, trust):
    for bounds in ("bounds", "factor_bounds"):
        least, greatest = got = getattr(trust, bounds)
        write = f"TrustRatio({bounds}={getattr(TrustRatio(), bounds)})"
        require(0 <= least <= greatest, name, "0 <= least <= greatest", write, **{bounds: got})
    decay, change = trust.decay, trust.factor_change
    require(0 <= decay < 1, name, "[0, 1)", "TrustRatio(decay=0.9)", decay=decay)
    require(0 < change < 1, name, "(0, 1)", "TrustRatio(factor_change=0.1)", factor_change=change)


def _unseen(zeros):
    """The `Trust` of each leaf before the first step."""

    def trust_of_leaf(moment, axes):
        layers = moment.shape[: moment.ndim - len(axes)]
        zero, one = (jnp.full(layers, x, moment.dtype) for x in (0, 1))
        return Trust(ratio=zero, weight=zero, factor=one, scale=one)

    leaves, treedef = jax.tree.flatten(zeros)
    return treedef.unflatten(map(trust_of_leaf, leaves, own_axes(zeros)))


def _layers(state: OneBitLambState) -> list[Trust]:
    return jax.tree.leaves(state.layers, is_leaf=lambda x: isinstance(x, Trust))


def _units(state, like):
    """What the momentum is divided by on the wire, without `precondition`."""
    scales = jax.tree.unflatten(jax.tree.structure(like), [trust.scale for trust in _layers(state)])
    return jax.tree.map(lambda scale, x: broadcast_over(1 / scale, x), scales, like)


def _trusted(adam, settings, frozen, old, squares, quotients, directions):
    """The trust of all layers, and their change before the rate."""
    layers, steps = [], []
    for was, sums, quotient, u in zip(old, squares, quotients, directions, strict=True):
        trust, ratio = trusted(adam, settings, frozen, was, sums, quotient)
        layers.append(trust)
        steps.append(broadcast_over(ratio, u) * u)
    return layers, steps


def _evened(frozen, layers, momentum, axis_name):
    """The trusts with the scales that momenta will be sent at, known when the warm-up ends."""
    scales = even_scales(momentum, axis_name)
    return [
        trust._replace(scale=unless(frozen, scale, trust.scale))
        for trust, scale in zip(layers, scales, strict=True)
    ]


def _directions(adam, count, momentum, root, params, axis_name):
    """The leaves of u, and for each the squared norms of x, m / D and u: f32[3], or per layer."""
    correction = adam.first_correction(count, momentum)
    plain = jax.tree.map(lambda m, d: correction * m / d, momentum, root)
    whole = lambda u, p, decay: u + decay * p if decay else u
    moves = jax.tree.map(whole, plain, params, adam.decays(params))
    leaves = [jax.tree.leaves(tree) for tree in (params, plain, moves)]
    squares = [
        jnp.stack([jnp.sum(jnp.square(x.astype(u.dtype)), axis=axes) for x in (p, m, u)])
        for p, m, u, axes in zip(*leaves, own_axes(params), strict=True)
    ]
    return leaves[2], sums_over_shards(squares, axis_name)


class Trust(NamedTuple):
    """The trust ratio of one leaf, f32[] each, or f32[layers] of a stack."""

    ratio: jax.Array  # decayed sum of the warm-up's ratios
    weight: jax.Array  # of these: 1 - decay^n after n of them
    factor: jax.Array  # correction of the frozen ratio in the last step
    scale: jax.Array  # of the momentum on the wire, without `precondition`


def trusted(
    adam: moments.Adam,
    settings: TrustRatio,
    frozen: jax.Array,
    old: Trust,
    squares: jax.Array,
    quotient: jax.Array,
) -> tuple[Trust, jax.Array]:
    """A leaf's trust after a step, and the trust ratio of the step: f32[], or f32[layers].

    Args:
      adam: The constants of the moments.
      settings: Those of the ratios.
      frozen: bool[], whether the warm-up has ended.
      old: Its trust before the step.
      squares: Squared norms of the parameters, of m / D and of the update u.
      quotient: The largest one of the frozen D and the D of the variance that goes on.
    """
    x, m, u = squares
    seen = (x > 0) & (u > 0)
    now = jnp.clip(moments.trust_ratio(x, u), *settings.bounds)
    decay = jnp.where(seen & ~frozen, settings.decay, 1.0)
    averaged = lambda was, now: decay * was + (1 - decay) * now
    share = jnp.minimum(moments.trust_ratio(m, u), 1.0) if adam.weight_decay else None
    factor = jnp.where(frozen, _factor(settings, old.factor, quotient, share), old.factor)
    corrected = adam.deviations.bias_correction
    whole = jnp.where(old.weight > 0, old.weight, 1.0) if corrected else 1.0
    ratio = jnp.where(frozen, old.ratio / whole * factor, jnp.where(seen, now, 1.0))
    trust = Trust(averaged(old.ratio, now), averaged(old.weight, 1.0), factor, old.scale)
    return trust, ratio


def _factor(settings, old, quotient, share):
    """The correction of a layer's frozen ratio, given the share of m / D in the update: f32[]."""
    factor = quotient if share is None else quotient * share + 1 - share
    factor = jnp.clip(factor, *settings.factor_bounds)
    least, greatest = (old * (1 + way * settings.factor_change) for way in (-1, 1))
    return jnp.clip(factor, least, greatest)


def largest_quotients(over: Any, under: Any, axis_name: str) -> list[jax.Array]:
    """The largest quotient of two trees' entries in each layer, over all its shards."""
    columns = zip(*map(jax.tree.leaves, (over, under)), own_axes(over), strict=True)
    found = [jnp.max(old / new, axis=axes, initial=0.0) for old, new, axes in columns]
    return [largest(quotient, axis_name) for quotient in found]


def even_scales(momentum: Any, axis_name: str) -> list[jax.Array]:
    """The factor that gives each layer the mean magnitude of all: f32[] or f32[layers]."""
    columns = list(zip(jax.tree.leaves(momentum), own_axes(momentum), strict=True))
    sums = sums_over_shards([jnp.sum(m * m, axis=axes) for m, axes in columns], axis_name)
    sizes = map(jnp.float32, moments.layer_sizes(momentum, axis_name))
    roots = [jnp.sqrt(s / n) for s, n in zip(sums, sizes, strict=True)]
    magnitudes = jnp.concatenate([m.reshape(-1) for m in roots])
    mean = jnp.sum(magnitudes) / jnp.maximum(1, jnp.sum(magnitudes > 0, dtype=magnitudes.dtype))
    return [jnp.where(m > 0, mean / m, 1.0) for m in roots]
