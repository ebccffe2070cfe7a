"""SLAMB: LAMB for large batches that averages a tenth of the momentum per step."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import schedules
from jaxcomp._checks import is_count, require
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy, policy_of
from jaxcomp.compressors.sparse import random_k
from jaxcomp.exchange import averaging, buckets, masks
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods import mean_variance, moments, step_bound
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.replicas.finite import any_of, failing, unless
from jaxcomp.replicas.layers import broadcast_over, in_batches, own_axes
from jaxcomp.replicas.protocol import KeepsRounding
from jaxcomp.replicas.types import num_replicas, sums_over_shards, to_varying


@KeepsRounding.register
class SlambState(NamedTuple):
    """State of `slamb`; trees have leaves of the parameters' shapes, float32 except `stale`."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    momentum: Any  # this replica's own, except where it was just exchanged
    variance: Any  # this replica's own, or that of the mean gradient
    # The mean momentum of each entry when it was last exchanged; None if variances are the
    # replicas' own.
    last_mean: Any
    drift: Any  # this replica's parameters minus the consensus, since the last synchronization
    # f32[numel / R] per bucket of drifts, not passed on yet; None for buckets sent in float32.
    owner_residual: Any
    # u16, steps since an entry was exchanged, equal on all replicas; None for leaves without a
    # mask.
    stale: Any
    rounds: Any  # {"all", "momentum", "synchronize"}: i32[], how often each was sent
    skipped: jax.Array  # i32[], this replica's steps whose gradient was not finite


class Rescaling(NamedTuple):
    """How `slamb` scales its steps, and blends in entries that were not just exchanged.

    `slamb` has the formulas.

    Attributes:
      form: The authors' "quadratic" or "linear"; or "masked", for comparison: entries that were not
        just exchanged do not move.
      b3: Decay of the freshness in a step, in [0, 1]; 1 switches rescaling off.
      trust_bounds: Least and greatest trust ratio. Unless the form is linear, those of leaves with
        fewer than two axes are not clipped.
      step_bound: Most of a coordinate of u before the decay, in units of the most that Adam's can
        be with any gradients; None: no bound, as in the paper. A replica that has not seen a token
        has a variance near zero for its row, and gets the momentum of those that have. See
        `jaxcomp.methods.step_bound`.
    """

    form: Literal["quadratic", "linear", "masked"] = "quadratic"
    b3: float = 0.99
    trust_bounds: tuple[float, float] = (0.01, 1000.0)
    step_bound: float | None = 1.0


def slamb(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    *,
    density: float | None = None,
    sync_every: int | schedules.Schedule = 100,
    weight_decay: float = 0.0,
    mask: Any = None,
    rescaling: Rescaling = Rescaling(),
    variance: Literal["own", "mean"] = "own",
    compressor: Compressor | Policy | Transport | None = None,
    drift_compressor: Compressor | Policy | Transport | None = None,
    exact_numel: int = 9000,
) -> optax.GradientTransformationExtraArgs:
    """LAMB with local variances, and momenta that are averaged on a mask.

    `params` are the consensus; gradients are taken at `jaxcomp.local_params`, which adds this
    replica's `drift`. A step moves m_i and v_i by the local gradient, and replaces m_i by its mean
    over the replicas at the entries of a mask that all replicas share. It sends values without
    positions, and keeps no residual, since the rest goes on as local momentum. With c the steps
    since an entry was exchanged, its freshness is s = b3^c. With N replicas, rate r, and u the
    direction of Adam plus weight_decay * x, each layer of x_i = params + drift_i moves by

        -clip(s p + (1 - s) q) (s r + (1 - s) r / sqrt(N)) u               ("quadratic")
        -(s clip(p) r + (1 - s) min(q, greatest) r / sqrt(N)) u            ("linear")
        -[s = 1] clip(p) r u                                               ("masked")

    where p and q are the trust ratios ||x|| / ||u|| of the layer's entries on the mask and off it.
    A step of `sync_every` then moves the consensus by the mean drift, and all drifts become zero.
    With equal gradients on all replicas and density 1 it is LAMB.

    Gradients are each replica's own, from a batch N times smaller. A clipping before this in a
    chain clips those.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the square root of the variance.
      density: Share of the entries on the mask, 1 over an integer; 0.1 by default. Short for
        `compressor=random_k(density)`, which sends every entry once in 1 / density steps.
      sync_every: Steps between synchronizations, or a schedule. Local steps after the last one are
        not part of the consensus: choose a divisor of the run's steps.
      weight_decay: Weight decay; outside the trust ratio if the rescaling is linear, else inside as
        in LAMB.
      mask: Which leaves decay, a tree of bool or a function of the parameters as for `optax.adamw`.
      rescaling: How stale entries are blended in, and bounds of a step, as
        `jaxcomp.Rescaling("linear", b3=0.999)`.
      variance: "own", as in the paper: of each replica's own gradients. "mean": of the mean
        gradient. Replicas learn it from the momenta that they exchange, without a byte more, and
        keep 4 bytes per parameter more. It is for large vocabularies. See
        `jaxcomp.methods.mean_variance`.
      compressor: Code of the momentum, instead of `density`: a `random_k`, alone or first in a
        `compose` that encodes its values, such as `compose(random_k(0.1), quantize(8))`; or a
        policy `(path, leaf) -> Compressor`, in which `identity()` means the whole leaf. With
        `random_k(0.1, pattern="random")` each step draws a new mask. Or a transport of one, such as
        `jaxcomp.gathered(compressor)` for two replicas, whose `seed` is that of the masks.
      drift_compressor: Code of the drifts in a synchronization, such as `quantize(8)`, or a policy,
        or a transport; float32 by default. What a code loses stays in `drift` and with the owners.
        Four synchronizations at 8 bits cost the bytes of one in float32.
      exact_numel: Leaves of fewer elements, over all their shards, and those with fewer than two
        axes are exchanged whole in every step, in float32.

    Returns:
      A `GradientTransformationExtraArgs` whose updates move the consensus, in float32: zeros
      between synchronizations. It keeps 14 bytes per parameter, and 4/R more for encoded drifts.

      A replica keeps moments and parameters of leaves whose gradient is not finite, and counts the
      step in `skipped`; the exchange goes on with the old values.

      If other mesh axes shard a leaf, norms are over all shards. Each shard has its own mask.
      Together they are the whole leaf's mask for `random_k(..., "strided")`, if shards are
      consecutive rows and 1 / density divides their size.

    Raises:
      ValueError: At construction for arguments out of range; at trace time without `params`, for
        a compressor whose entries the replicas do not share, an unknown axis, gradients that are
        already reduced, or leaves that are not floating.

    References:
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23v.html>`_, ICML 2023, algorithm 1, after the authors'
      code: `Slamb` (quadratic) and `Slamb_V2` (linear). Deviations: parameters are averaged at the
      end of an interval, not after its first step; the default mask has runs of neighbours, the
      next ones in each step (theirs: chunks of one random permutation, or independent draws); the
      linear form adds eps after the bias correction; `step_bound`; `variance="mean"`; drifts may
      be encoded.
    """
    name = "slamb"
    differs = moments.Deviations(variance_floor=0.0, step_bound=rescaling.step_bound)
    adam = moments.adam(name, learning_rate, b1, b2, eps, weight_decay, mask, differs)
    _check(density, sync_every, rescaling, compressor, variance)
    default = random_k(0.1 if density is None else density)
    code = default if compressor is None else compressor
    drift_code = averaging.EXACT if drift_compressor is None else drift_compressor
    is_mean = variance == "mean"
    is_whole = buckets.small_or_vector(axis_name, numel=exact_numel)
    transport, drifts = (
        averaging.but_exact(transport_of(each, axis_name), is_whole) for each in (code, drift_code)
    )
    masks_of = lambda params: masks.masks_of(params, policy_of(transport.code))
    sync_at = _sync_at(sync_every)

    def root_of(variance, stale, count):
        if is_mean:
            return mean_variance.root(variance, stale, count + 1, b2, eps)
        correction = 1 - moments.power(b2, count + 1, variance)
        return jax.tree.map(lambda v: jnp.sqrt(v / correction) + eps, variance)

    def init_fn(params):
        zero = jnp.zeros([], jnp.int32)
        zeros = to_varying(jax.tree.map(moments.zeros, params), axis_name)
        leaves, treedef = jax.tree.flatten(params)
        fresh = lambda leaf, mask: None if mask is None else jnp.zeros_like(leaf, jnp.uint16)
        return SlambState(
            count=zero,
            momentum=zeros,
            variance=zeros,
            last_mean=zeros if is_mean else None,
            drift=zeros,
            owner_residual=averaging.nothing_sent(drifts, zeros)[1],
            stale=treedef.unflatten(map(fresh, leaves, masks_of(params).values())),
            rounds=no_rounds("momentum", "synchronize"),
            skipped=to_varying(zero, axis_name),
        )

    def update_fn(updates, state, params, **_):
        count = state.count
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, state.momentum)
        moved = lambda m, g: b1 * m + (1 - b1) * g
        squared = lambda v, g: b2 * v + (1 - b2) * g * g
        bad = failing(jax.tree.map(jnp.square, grads), axis_name)  # a variance learns from squares
        momentum = unless(bad, jax.tree.map(moved, state.momentum, grads), state.momentum)
        exchanged = masks.mean_on_masks(masks_of(params), "momentum", momentum, transport, count)
        known = mean_variance.Learned(state.variance, state.last_mean)
        if is_mean:
            known = mean_variance.learned(known, *exchanged, state.stale, b1, b2)
        else:
            own = jax.tree.map(squared, state.variance, grads)
            known = known._replace(variance=unless(bad, own, state.variance))
        older = lambda old, on: jnp.where(on, 0, jnp.minimum(old, 65534) + 1).astype(old.dtype)
        stale = jax.tree.map(older, state.stale, exchanged.on)
        lost = _steps(
            adam,
            rescaling,
            momentum=exchanged.tree,
            root=root_of(known.variance, stale, count),
            params=jax.tree.map(jnp.add, params, state.drift),
            stale=stale,
            count=count,
            axis_name=axis_name,
            decays=adam.decays(params),
        )
        drift = unless(bad, jax.tree.map(jnp.subtract, state.drift, lost), state.drift)
        meets = sync_at(count)
        got = averaging.average(
            drifts,
            drift,
            state.rounds["synchronize"],  # by step a sparse code might never send some entries
            "synchronize",
            owner_residual=state.owner_residual,
            instead=None if sync_at is schedules.always else averaging.Instead(~meets),
        )
        return got.mean, SlambState(
            count=optax.safe_increment(count),
            momentum=exchanged.tree,
            variance=known.variance,
            last_mean=known.known,
            drift=_left(drift, params, got, axis_name),
            owner_residual=got.owner_residual,
            stale=stale,
            rounds=counted(state.rounds, all=True, momentum=True, synchronize=meets),
            skipped=state.skipped + any_of(bad),
        )

    return in_batches(method(name, axis_name, init_fn, update_fn))


def _left(drift, params, got, axis_name):
    """The drifts after an exchange: what codes lose, and what a narrow consensus rounds off."""
    # Without the barrier XLA takes the sum from the step's new parameters, and copies the old ones.
    params = jax.tree.map(lax.optimization_barrier, params)
    lost = to_varying(jax.tree.map(averaging.rounded_off, params, got.mean), axis_name)
    return jax.tree.map(lambda lost, own, sent: lost + (own - sent), lost, drift, got.sent)


def _sync_at(sync_every: int | schedules.Schedule) -> schedules.Schedule:
    if callable(sync_every):
        return sync_every
    if sync_every == 1:
        return schedules.always
    return lambda count: count % sync_every == sync_every - 1


def _check(density, sync_every, rescaling, compressor, variance):
    name, form, b3 = "slamb", rescaling.form, rescaling.b3
    both = {"density": density, "compressor": getattr(compressor, "name", compressor)}
    write = "compressor=compose(random_k(0.1), ...) without density, or density alone"
    require(None in both.values(), name, "one of them", write, **both)
    require(0 <= b3 <= 1, name, "[0, 1]", "Rescaling(b3=0.99)", b3=b3)
    every = callable(sync_every) or is_count(sync_every)
    require(every, name, "at least 1, as an integer", "sync_every=100", sync_every=sync_every)
    forms = ("quadratic", "linear", "masked")
    require(form in forms, name, "a known form", " or ".join(forms), form=form)
    require(variance in ("own", "mean"), name, "own or mean", "variance='mean'", variance=variance)
    least, greatest = rescaling.trust_bounds
    bounds, write = {"trust_bounds": rescaling.trust_bounds}, "trust_bounds=(0.01, 1000.0)"
    require(0 <= least <= greatest, name, "0 <= least <= greatest", write, **bounds)


def _steps(
    adam: moments.Adam,
    rescaling: Rescaling,
    momentum: Any,
    root: Any,
    params: Any,
    stale: Any,
    count: jax.Array,
    axis_name: str,
    decays: Any,
) -> Any:
    """The amount that a step subtracts from each leaf of this replica's parameters.

    Args:
      adam: The constants of the moments.
      rescaling: How stale entries are blended in.
      momentum, root, params: This replica's own trees; momenta are divided by the roots.
      stale: Steps since each entry was exchanged; None for leaves without a mask.
      count: i32[], steps before this one.
      axis_name: Mesh axis of the replicas.
      decays: The weight decay of each leaf.
    """
    is_linear = rescaling.form == "linear"
    correction = 1 - moments.power(adam.b1, count + 1, params)
    momentum = step_bound.bounded(adam, count + 1, momentum, root)

    def direction(m, d, x, decay):
        return _decayed(m / correction / d, x, 0.0 if is_linear else decay)

    directions = jax.tree.map(direction, momentum, root, params, decays)
    leaves, treedef = jax.tree.flatten(params)
    columns = leaves, *map(treedef.flatten_up_to, (directions, stale)), own_axes(params)
    sums = sums_over_shards(list(map(_squares, *columns)), axis_name)
    step = _linear_step if is_linear else _quadratic_step
    rate, bounds = adam.rate_of(count), rescaling.trust_bounds
    slower, kept = 1 / math.sqrt(num_replicas(axis_name)), rescaling.b3
    if rescaling.form == "masked":
        slower, kept = 0.0, 0.0
    log = math.log(max(kept, 1e-30))  # XLA:CPU has no vector instruction for powers
    lost = []
    for x, u, old, axes, squares, decay in zip(
        *columns, sums, jax.tree.leaves(decays), strict=True
    ):
        squares = [broadcast_over(square, u) for square in squares]
        fresh = 1.0 if old is None else jnp.exp(log * old.astype(u.dtype))
        moves = _decayed(u, x, decay if is_linear else 0.0)
        lost.append(step(bounds, rate, moves, len(axes), squares, fresh, (1 - fresh) * slower))
    return treedef.unflatten(lost)


def _decayed(u, x, decay):
    return u + decay * x if decay else u


def _quadratic_step(bounds, rate, u, ndim, squares, fresh, slow):
    p, q = (moments.trust_ratio(*squares[2 * i : 2 * i + 2]) for i in range(2))
    trust = fresh * p + (1 - fresh) * q
    trust = trust if ndim < 2 else jnp.clip(trust, *bounds)
    return rate * (fresh + slow) * trust * u


def _linear_step(bounds, rate, u, ndim, squares, fresh, slow):
    least, greatest = bounds
    p = jnp.clip(moments.trust_ratio(*squares[:2]), least, greatest)
    q = jnp.clip(moments.trust_ratio(squares[2], squares[3], otherwise=0.0), 0.0, greatest)
    return rate * (fresh * p + slow * q) * u


def _squares(x, u, stale, axes) -> jax.Array:
    """f32[4], or f32[4, layers]: sums of squares of x and u on the mask, and of both off it."""
    total = lambda y: jnp.sum(y, axis=axes)
    if stale is None:
        sums = [total(x * x), total(u * u)]
        return jnp.stack([*sums, *map(jnp.zeros_like, sums)])
    parts = [jnp.where(stale == 0, y * y, 0) for y in (x, u)]
    parts += [jnp.where(stale == 0, 0, y * y) for y in (x, u)]
    return jnp.stack([total(part) for part in parts])
