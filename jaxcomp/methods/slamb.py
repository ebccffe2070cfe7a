"""SLAMB: LAMB for large batches whose replicas agree on a tenth of the momentum a step."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import schedules
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import policy_of
from jaxcomp.exchange import averaging, masks, wire
from jaxcomp.methods import moments
from jaxcomp.replicas.types import num_replicas, require_varying, sums_over_shards, to_varying


class SlambState(NamedTuple):
    """State of `slamb`; trees have leaves of the parameters' shapes, float32 but for `stale`."""

    count: jax.Array  # i32[], steps so far
    momentum: Any  # this replica's own, but where it was exchanged just now
    variance: Any  # this replica's own
    drift: Any  # this replica's parameters minus the consensus: what it did since they met
    # One f32[numel / R] a bucket of drifts, None for those that travel exact: not passed on yet.
    owner_residual: Any
    # u16, steps since an entry was exchanged, equal on all replicas; None for leaves that always
    # are.
    stale: Any
    # {"all", "momentum", "synchronize"}: i32[], how often each was sent; of several densities
    # "momentum_0", "momentum_1" and so on.
    rounds: Any
    skipped: jax.Array  # i32[], this replica's steps whose gradient was not finite


def slamb(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    *,
    density: float | Sequence[tuple[int, float]] | None = None,
    b3: float = 0.99,
    sync_every: int | schedules.Schedule = 100,
    weight_decay: float = 0.0,
    rescaling: Literal["quadratic", "linear", "masked"] = "quadratic",
    trust_bounds: tuple[float, float] = (0.01, 1000.0),
    compressor: Compressor | Callable[[str, Any], Compressor] | None = None,
    drift_compressor: Compressor | Callable[[str, Any], Compressor] | None = None,
    exact_numel: int = 9000,
    exchange: wire.Exchange = wire.two_shot,
    bucket_numel: int = 2**22,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """LAMB with a variance of each replica's own, and momenta that are averaged on a mask.

    `params` are the consensus; gradients are taken at `jaxcomp.local_params`, which adds this
    replica's `drift`. A step moves m_i and v_i by the local gradient, and replaces m_i by its
    mean over the replicas at the entries of a mask that all replicas share: dense values, no
    positions, no residual, since what is not sent goes on as local momentum. With c the steps
    since an entry was exchanged, its freshness is s = b3^c. With N replicas, rate r, and u the
    direction of Adam plus weight_decay * x, each layer of x_i = params + drift_i moves by

        -clip(s p + (1 - s) q) (s r + (1 - s) r / sqrt(N)) u               ("quadratic")
        -(s clip(p) r + (1 - s) min(q, greatest) r / sqrt(N)) u            ("linear")
        -[s = 1] clip(p) r u                                               ("masked")

    where p and q are the trust ratios ||x|| / ||u|| of the layer's entries on the mask and off it;
    "masked" is there to compare with: what was not exchanged just now stands still.
    A step of `sync_every` then moves the consensus by the mean drift, and all drifts become zero.

    With equal gradients on all replicas and density 1 it is LAMB. b3 = 1 switches rescaling off.

    Gradients are each replica's own, of a batch N times smaller, and so is what a clipping before
    this in a chain clips.

    Args:
      learning_rate: Rate, or schedule of the step.
      axis_name: Mesh axis of the replicas.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).
      eps: Added to the root of the variance.
      density: Share of the entries on the mask, 1 over an integer; 0.1 by default. Stands for
        `compressor=random_k(density)`: every entry comes once in 1 / density steps. Or pairs of
        the step from which on it holds and the density, as `((0, 0.5), (100, 0.1))`.
      b3: Decay of the freshness, in [0, 1].
      sync_every: Steps from one averaging of parameters to the next, at the end of which they
        meet; or a schedule. What replicas do after the last of them is in no consensus: let it
        divide the steps of the run.
      weight_decay: Rate of decay; outside of the trust ratio if the rescaling is linear, else in
        it as in LAMB.
      rescaling: How stale entries are blended in, see above.
      trust_bounds: Least and greatest trust ratio. Unless the form is linear, those of leaves with
        fewer than two axes are not clipped.
      compressor: What of the momentum travels, instead of `density`: a `random_k`, alone or first
        in a `compose` that codes its values, as `compose(random_k(0.1), quantize(8))`; or a
        policy `(path, leaf) -> Compressor`, in which `identity()` means the whole leaf. Of
        `random_k(0.1, pattern="random")` the masks are drawn anew each step.
      drift_compressor: What of the drifts travels where replicas meet, as `quantize(8)`, or a
        policy; all of it, exact, by default. What codes leave stays in `drift` and with the
        owners, so that nothing is lost. Drifts are small: 8 bits a value, and a meeting four times
        as often, cost the bytes of an exact one.
      exact_numel: Leaves of fewer elements, over all their shards, and those with fewer than two
        axes are exchanged whole in every step, and exact.
      exchange: How coded values travel: `wire.two_shot`, or `wire.gathered` for two replicas.
        Float32 values are summed on the wire in any case.
      bucket_numel: Most elements of one message's bucket.
      seed: Of drawn masks and of the codes' noise; equal on all replicas.

    Returns:
      A `GradientTransformationExtraArgs` whose updates move the consensus, in float32: zeros
      between synchronizations. It keeps 14 bytes a parameter, and for coded drifts 4/R more.

      A replica whose gradient is not finite keeps its moments and stands still for that step, and
      counts it in `skipped`; the exchange goes on with what it had.

      Of a leaf that other mesh axes shard, the norms are those of all shards. Each shard has the
      mask by itself: it is that of the whole leaf if shards are of consecutive rows and 1 /
      density divides their size.

    Raises:
      ValueError: At construction for arguments out of range; at trace time without `params`, for
        a compressor whose entries the replicas do not share, an unknown axis, gradients that are
        already reduced, or leaves that are not floating.

    References:
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23v.html>`_, ICML 2023, algorithm 1, after the authors'
      code: `Slamb` (quadratic) and `Slamb_V2` (linear). Deviations: the parameters meet at the
      end of an interval and not after its first step, also where it is of one step; the default
      mask is strided, rolled by one each step (theirs: chunks of one random permutation, or
      independent draws); the linear form adds eps after the bias correction; drifts may be coded.
    """
    moments.check("slamb", b1, b2, eps, 0.0)
    _check(density, b3, sync_every, rescaling, trust_bounds, compressor)
    stages = masks.stages_of(density, compressor)
    transport = averaging.Transport(stages[0].policy, exchange, axis_name, bucket_numel, seed)
    rate_of = moments.schedule_of(learning_rate)
    sync_at = _sync_at(sync_every)
    coded = policy_of(averaging.EXACT if drift_compressor is None else drift_compressor)

    def drift_policy(path, leaf):
        whole = masks.is_whole(leaf, exact_numel, axis_name)
        return averaging.EXACT if whole else coded(path, leaf)

    meeting = transport._replace(policy=drift_policy)

    def init(params):
        zeros = to_varying(jax.tree.map(moments.zeros, params), axis_name)
        leaves, treedef = jax.tree.flatten(params)
        first = masks.masks_of(params, stages[0].policy, exact_numel, axis_name)
        fresh = [
            None if mask is None else jnp.zeros_like(leaf, jnp.uint16)
            for leaf, mask in zip(leaves, first.values(), strict=True)
        ]
        zero = jnp.zeros([], jnp.int32)
        return SlambState(
            count=zero,
            momentum=zeros,
            variance=zeros,
            drift=zeros,
            owner_residual=averaging.nothing_sent(meeting, zeros)[1],
            stale=treedef.unflatten(fresh),
            rounds=dict.fromkeys(("all", *(stage.part for stage in stages), "synchronize"), zero),
            skipped=to_varying(zero, axis_name),
        )

    def steps(momentum, variance, params, stale, on_mask, count):
        """What each leaf of this replica's parameters loses in this step."""
        corrections = [1 - moments.power(b, count + 1, params) for b in (b1, b2)]
        directions = [
            m / corrections[0] / (jnp.sqrt(v / corrections[1]) + eps)
            for m, v in zip(momentum, variance, strict=True)
        ]
        if rescaling != "linear":
            directions = [u + weight_decay * x for u, x in zip(directions, params, strict=True)]
        sums = [
            _squares(*of)
            for of in zip(params, directions, on_mask(params), on_mask(directions), strict=True)
        ]
        sums = sums_over_shards(sums, axis_name)
        rate, slower, kept = rate_of(count), 1 / math.sqrt(num_replicas(axis_name)), b3
        if rescaling == "masked":
            slower, kept = 0.0, 0.0
        decay = math.log(max(kept, 1e-30))  # XLA:CPU has no vector instruction for powers
        out = []
        for u, x, squares, old in zip(directions, params, sums, stale, strict=True):
            s = 1.0 if old is None else jnp.exp(decay * old.astype(u.dtype))
            least, greatest = trust_bounds
            if rescaling != "linear":
                p, q = (moments.trust_ratio(*squares[2 * i : 2 * i + 2]) for i in range(2))
                trust = s * p + (1 - s) * q
                trust = trust if x.ndim < 2 else jnp.clip(trust, least, greatest)
                out.append(rate * (s + (1 - s) * slower) * trust * u)
            else:
                p = jnp.clip(moments.trust_ratio(*squares[:2]), least, greatest)
                q = jnp.clip(moments.trust_ratio(*squares[2:], otherwise=0.0), 0.0, greatest)
                out.append(rate * (s * p + (1 - s) * slower * q) * (u + weight_decay * x))
        return out

    def together(drift, owner_residual, params, count):
        """The replicas meet, but for what codes leave and a narrow consensus rounds off."""
        nothing = jax.tree.map(lambda x: None, drift)  # A drift is its own residual.
        met = averaging.mean_with_feedback(meeting, drift, nothing, owner_residual, count)
        lost = to_varying(jax.tree.map(averaging.rounded_off, params, met.mean), axis_name)
        rest = jax.tree.map(
            lambda x, unsent: x if unsent is None else x + unsent, lost, met.residual
        )
        return met.mean, rest, met.owner_residual

    def apart(drift, owner_residual, params, count):
        del count
        return jax.tree.map(moments.zeros, params), drift, owner_residual

    def update(updates, state, params=None, **extra_args):
        del extra_args
        averaging.require_params("slamb", params)
        require_varying(updates, axis_name, params)
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, state.momentum)
        own = (
            jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.momentum, grads),
            jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.variance, grads),
        )
        bad = averaging.not_finite(own[1], axis_name)  # If it is not, neither is a square of it.
        keep = lambda old, new: jnp.where(bad, old, new)
        momentum, variance = jax.tree.map(keep, (state.momentum, state.variance), own)
        treedef = jax.tree.structure(params)
        in_stage = lambda function, leaves: masks.in_stage(
            function, leaves, params, stages, exact_numel, transport, state.count
        )
        momentum, where = in_stage(masks.mean_on_masks, jax.tree.leaves(momentum))
        stale = [
            None if on is None else jnp.where(on, 0, jnp.minimum(old, 65534) + 1).astype(old.dtype)
            for on, old in zip(where, treedef.flatten_up_to(state.stale), strict=True)
        ]
        local = jax.tree.map(jnp.add, params, state.drift)
        lost = steps(
            *(momentum, jax.tree.leaves(variance), jax.tree.leaves(local)),
            *(stale, functools.partial(in_stage, masks.squares_on_masks), state.count),
        )
        moved = lambda d, u: jnp.where(bad, d, d - u)
        drift = jax.tree.map(moved, state.drift, treedef.unflatten(lost))
        meets, of = sync_at(state.count), (drift, state.owner_residual, params, state.count)
        if sync_at is schedules.always:
            change, drift, owner_residual = together(*of)
        else:
            change, drift, owner_residual = lax.cond(meets, together, apart, *of)
        return change, SlambState(
            optax.safe_increment(state.count),
            treedef.unflatten(momentum),
            variance,
            drift,
            owner_residual,
            treedef.unflatten(stale),
            averaging.counted(
                state.rounds, all=True, synchronize=meets, **masks.holding(stages, state.count)
            ),
            state.skipped + bad,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _squares(x, u, x_on, u_on) -> jax.Array:
    """f32[4]: sums of squares of x and u on the mask, and of both off it, which is what is left."""
    off = [jnp.maximum(jnp.sum(y * y) - on, 0) for y, on in ((x, x_on), (u, u_on))]
    return jnp.stack([x_on, u_on, *off])


def _sync_at(sync_every: int | schedules.Schedule) -> schedules.Schedule:
    if callable(sync_every):
        return sync_every
    if sync_every == 1:
        return schedules.always
    return lambda count: count % sync_every == sync_every - 1


def _check(density, b3, sync_every, rescaling, trust_bounds, compressor):
    if density is not None and compressor is not None:
        raise ValueError(
            f"slamb got density={density} and a compressor; needs one of them; write "
            "compressor=compose(random_k(0.1), ...) without density, or density alone."
        )
    if not 0 <= b3 <= 1:
        raise ValueError(f"slamb got b3={b3}; needs [0, 1]; write b3=0.99.")
    if not callable(sync_every) and sync_every < 1:
        raise ValueError(f"slamb got sync_every={sync_every}; needs at least 1; write 100.")
    if rescaling not in ("quadratic", "linear", "masked"):
        raise ValueError(
            f"slamb got rescaling={rescaling!r}; write 'quadratic', 'linear' or 'masked'."
        )
    least, greatest = trust_bounds
    if not 0 <= least <= greatest:
        raise ValueError(
            f"slamb got trust_bounds={trust_bounds}; needs 0 <= least <= greatest; write "
            "trust_bounds=(0.01, 1000.0)."
        )
