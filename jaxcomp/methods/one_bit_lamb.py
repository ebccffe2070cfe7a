"""1-bit LAMB: dense LAMB first, then 1-bit momenta with the trust ratios learned there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from optax.tree_utils import tree_update_moment

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import policy_of
from jaxcomp.compressors.sign import sign
from jaxcomp.exchange import averaging, wire
from jaxcomp.methods import moments
from jaxcomp.methods.common import counted, method, no_rounds, require
from jaxcomp.replicas.finite import poisoned
from jaxcomp.replicas.protocol import MethodState
from jaxcomp.replicas.types import largest, size_over_shards, sums_over_shards


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


class Trust(NamedTuple):
    """The trust ratio of one leaf, f32[] each."""

    ratio: jax.Array  # decayed sum of the warm-up's ratios
    weight: jax.Array  # of these: 1 - decay^n after n of them
    factor: jax.Array  # correction of the frozen ratio in the last step
    scale: jax.Array  # of the momentum on the wire, without `precondition`


def one_bit_lamb(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    *,
    freeze_step: int | None = None,
    freeze_ratio: float = 0.96,
    trust_bounds: tuple[float, float] = (0.01, 10.0),
    trust_decay: float = 0.9,
    factor_bounds: tuple[float, float] = (0.5, 4.0),
    factor_change: float = 0.1,
    compressor: Compressor | Callable[[str, Any], Compressor] | None = None,
    precondition: bool = True,
    variance_floor: float = 1e-4,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    mask: Any = None,
    exchange: wire.Exchange = wire.two_shot,
    bucket_numel: int | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """LAMB on exact mean gradients until the variance is stable, then on 1-bit mean momenta.

    With D = sqrt(v) + eps and u = m / D + weight_decay * x, a step of the warm-up is LAMB's: each
    layer moves by -rate c u, with its trust ratio c = clip(||x|| / ||u||), of which a moving
    average C is kept. Later steps do m_i <- b1 m + (1 - b1) g_i and m <- the compressed mean of
    m_i, with error feedback in both directions, and move by -rate C f u with the frozen v. The
    factor f follows how v would have changed: it is the largest quotient of D and the D of a
    variance that goes on with gradients estimated from m, and closer to 1 if decay is most of u. It
    stays in `factor_bounds`, and changes by at most a share `factor_change` per step.

    One bit cannot encode zero: coordinates that never had a gradient get +-scale. So m_i / D is
    compressed (`precondition`). There this noise is as large as a step in every coordinate, and
    error feedback removes it again. A layer whose norm, or whose update's norm, was zero in the
    whole warm-up has no trust ratio, and does not move after it.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the square root of the variance.
      freeze_step: Steps of the warm-up, at least 1; a sixth of a run in the paper. See
        `freeze_ratio` for None.
      freeze_ratio: Share in (0, 1) that ends the warm-up, see `jaxcomp.one_bit_adam`.
      trust_bounds: Least and greatest trust ratio of the warm-up.
      trust_decay: Decay of its moving average, in [0, 1).
      factor_bounds: Least and greatest factor.
      factor_change: Greatest change of a factor in a step, as a share of itself, in (0, 1).
      compressor: Compressor of all parameters; or a policy `(path, leaf) -> Compressor`. Default:
        `jaxcomp.sign(block=1024)`.
      precondition: Whether m / D is sent; the paper sends m, with each layer scaled to the mean
        magnitude of all.
      variance_floor: Least variance to divide by after the warm-up, a share of the leaf's mean.
      bias_correction: Whether moments are divided by 1 - b^n, as in LAMB, and the average of trust
        ratios likewise. Off in the authors' code.
      weight_decay: Weight decay, inside u.
      mask: Which leaves decay, a tree of bool or a function of the parameters as for `optax.adamw`.
      exchange: `wire.two_shot`, or `wire.gathered` for two replicas.
      bucket_numel: Most elements of one message's bucket; by default at most 8 buckets a code.
      seed: Seed of the compressor's noise, if it has any.

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
      l1 scale per block of a bucket (theirs: one l2 scale for all); `precondition`,
      `variance_floor` and `bias_correction` (off: `precondition=False, variance_floor=0.0,
      bias_correction=False`); the mean magnitude leaves out layers whose momentum is zero; empty
      layers do not divide by zero; the first step is not dropped.
    """
    rest = variance_floor, bias_correction, weight_decay, mask
    adam = moments.adam("one_bit_lamb", learning_rate, b1, b2, eps, *rest)
    freeze = moments.freeze("one_bit_lamb", freeze_step, freeze_ratio)
    policy = policy_of(sign(block=1024) if compressor is None else compressor)
    transport = averaging.Transport(policy, exchange, axis_name, bucket_numel, seed)
    bounds = trust_bounds, trust_decay, factor_bounds, factor_change
    settings = _Settings(adam, freeze, transport, precondition, *bounds)
    _check(settings)
    init, update = (functools.partial(function, settings) for function in (_init, _update))
    return method("one_bit_lamb", axis_name, init, update)


class _Settings(NamedTuple):
    adam: moments.Adam
    freeze: moments.Freeze
    transport: averaging.Transport
    precondition: bool
    trust_bounds: tuple[float, float]
    trust_decay: float
    factor_bounds: tuple[float, float]
    factor_change: float


def _check(settings):
    name, decay, change = "one_bit_lamb", settings.trust_decay, settings.factor_change
    for bounds, default in (("trust_bounds", (0.01, 10.0)), ("factor_bounds", (0.5, 4.0))):
        least, greatest = got = getattr(settings, bounds)
        write = f"{bounds}={default}"
        require(0 <= least <= greatest, name, "0 <= least <= greatest", write, **{bounds: got})
    require(0 <= decay < 1, name, "[0, 1)", "trust_decay=0.9", trust_decay=decay)
    require(0 < change < 1, name, "(0, 1)", "factor_change=0.1", factor_change=change)


def _init(settings, params):
    zeros = jax.tree.map(moments.zeros, params)
    residual, owner_residual = averaging.nothing_sent(settings.transport, zeros)
    unseen = lambda moment: Trust(*(jnp.asarray(x, moment.dtype) for x in (0, 0, 1, 1)))
    return OneBitLambState(
        count=jnp.zeros([], jnp.int32),
        momentum=zeros,
        variance=zeros,
        fresh_variance=zeros,
        residual=residual,
        owner_residual=owner_residual,
        layers=jax.tree.map(unseen, zeros),
        rounds=no_rounds("synchronize", "variance"),
        frozen=jnp.zeros([], bool),
        norms=settings.freeze.no_norms(settings.adam.b2, zeros),
    )


def _update(settings, updates, state, params, **_):
    grads, bad = moments.gradients(updates, state.variance, settings.transport.axis_name)
    frozen = settings.freeze.holds(state)
    ways = (functools.partial(way, settings) for way in (_compressed, _warm_up))
    change, new = lax.cond(frozen, *ways, state, poisoned(bad, grads), params)
    freezes, norms = settings.freeze.after(frozen, state, new["variance"])
    return change, state._replace(
        count=optax.safe_increment(state.count),
        rounds=counted(state.rounds, all=True, synchronize=frozen, variance=~frozen),
        frozen=freezes,
        norms=norms,
        **new,
    )


def _warm_up(settings, state, grads, params):
    """A step of LAMB, and the trust ratios of its layers."""
    adam, transport = settings.adam, averaging.exact(settings.transport)
    mean = averaging.average(transport, grads, state.count, "variance").mean
    momentum = tree_update_moment(mean, state.momentum, adam.b1, 1)
    variance = tree_update_moment(mean, state.variance, adam.b2, 2)
    root = adam.root(variance, adam.weight(state.rounds["variance"] + 1, variance), floor=0.0)
    directions, squares = _directions(settings, state.count, momentum, root, params)
    layers, trust = [], []
    scales = _scales(jax.tree.leaves(momentum), transport.axis_name)
    for old, (x, _, u), scale in zip(_layers(state), squares, scales, strict=True):
        seen = (x > 0) & (u > 0)
        ratio = jnp.clip(moments.trust_ratio(x, u), *settings.trust_bounds)
        decay = jnp.where(seen, settings.trust_decay, 1.0)
        ratios, weight = (
            decay * was + (1 - decay) * now for was, now in ((old.ratio, ratio), (old.weight, 1.0))
        )
        layers.append(Trust(ratios, weight, old.factor, scale))
        trust.append(jnp.where(seen, ratio, 1.0))
    change, layers = _stepped(settings, params, state, layers, trust, directions)
    new = {"momentum": momentum, "variance": variance, "fresh_variance": variance}
    return change, new | {"layers": layers} | averaging.feedback(state)


def _compressed(settings, state, grads, params):
    """A step with a mean momentum of few bits, and the frozen variance and ratios."""
    adam, axis_name = settings.adam, settings.transport.axis_name
    root = adam.root(state.variance, adam.weight(state.rounds["variance"], state.variance))
    unit = root
    if not settings.precondition:
        scales = [1 / layer.scale for layer in _layers(state)]
        unit = jax.tree.unflatten(jax.tree.structure(params), scales)
    local = tree_update_moment(grads, state.momentum, adam.b1, 1)
    local, kept = jax.tree.map(jnp.divide, local, unit), averaging.feedback(state)
    got = averaging.average(settings.transport, local, state.count, "synchronize", **kept)
    momentum = jax.tree.map(jnp.multiply, got.mean, unit)
    gradient = jax.tree.map(
        lambda new, old: (new - adam.b1 * old) / (1 - adam.b1), momentum, state.momentum
    )
    fresh = tree_update_moment(gradient, state.fresh_variance, adam.b2, 2)
    fresh_root = adam.root(fresh, adam.weight(state.count + 1, fresh))
    quotients = jax.tree.map(
        lambda old, new: largest(jnp.max(old / new, initial=0.0), axis_name), root, fresh_root
    )
    directions, squares = _directions(settings, state.count, momentum, root, params)
    layers, trust = [], []
    for old, (_, m, u), quotient in zip(
        _layers(state), squares, jax.tree.leaves(quotients), strict=True
    ):
        factor = _factor(settings, old.factor, quotient, m, u)
        layers.append(old._replace(factor=factor))
        whole = jnp.where(old.weight > 0, old.weight, 1.0) if adam.bias_correction else 1.0
        trust.append(old.ratio / whole * factor)
    change, layers = _stepped(settings, params, state, layers, trust, directions)
    new = {"momentum": momentum, "variance": state.variance, "fresh_variance": fresh}
    return change, new | {"layers": layers} | averaging.feedback(got)


def _factor(settings, old, quotient, moment_square, update_square):
    """The correction of a layer's frozen ratio: f32[]."""
    factor = quotient
    if settings.adam.weight_decay:
        share = jnp.minimum(moments.trust_ratio(moment_square, update_square), 1.0)
        factor = factor * share + 1 - share
    factor = jnp.clip(factor, *settings.factor_bounds)
    least, greatest = (old * (1 + way * settings.factor_change) for way in (-1, 1))
    return jnp.clip(factor, least, greatest)


def _directions(settings, count, momentum, root, params):
    """The leaves of u, and for each the squared norms of x, m / D and u: f32[3]."""
    correction = settings.adam.first_correction(count + 1, momentum)
    decays = settings.adam.decays(params)
    plain = jax.tree.map(lambda m, d: correction * m / d, momentum, root)
    whole = jax.tree.map(lambda u, p, decay: u + decay * p, plain, params, decays)
    leaves = [jax.tree.leaves(tree) for tree in (params, plain, whole)]
    squares = [
        jnp.stack([jnp.sum(jnp.square(x.astype(u.dtype))) for x in (p, m, u)])
        for p, m, u in zip(*leaves, strict=True)
    ]
    return leaves[2], sums_over_shards(squares, settings.transport.axis_name)


def _stepped(settings, params, state, layers, trust, directions):
    """Each leaf's change, and the new layers as a tree."""
    rate, treedef = settings.adam.rate_of(state.count), jax.tree.structure(params)
    change = [-rate * c * u for c, u in zip(trust, directions, strict=True)]
    return treedef.unflatten(change), treedef.unflatten(layers)


def _layers(state: OneBitLambState) -> list[Trust]:
    return jax.tree.leaves(state.layers, is_leaf=lambda x: isinstance(x, Trust))


def _scales(momentum: list[jax.Array], axis_name: str) -> list[jax.Array]:
    """The factor that gives each leaf the mean magnitude of all: f32[], 1 for zeros."""
    sums = sums_over_shards([jnp.sum(m * m) for m in momentum], axis_name)
    sizes = [jnp.float32(max(1, size_over_shards(m, axis_name))) for m in momentum]
    roots = [jnp.sqrt(s / n) for s, n in zip(sums, sizes, strict=True)]
    magnitudes = jnp.stack(roots)
    mean = jnp.sum(magnitudes) / jnp.maximum(jnp.sum(magnitudes > 0), 1)
    return [jnp.where(m > 0, mean / m, 1.0) for m in roots]
