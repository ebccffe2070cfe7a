"""CocktailSGD: exchanges compressed model differences, one step late, with any optimizer."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import is_count, require, require_static
from jaxcomp.compressors.base import Compressor, Key
from jaxcomp.compressors.compose import cocktail
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.quantize import quantize
from jaxcomp.exchange import averaging, buckets, wire
from jaxcomp.exchange.journeys import at_once
from jaxcomp.exchange.wire import Transport
from jaxcomp.methods import moments
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.methods.inner import Synchronization, inner_step
from jaxcomp.replicas.protocol import ExchangesAhead, KeepsRounding, with_extra_args
from jaxcomp.replicas.types import to_varying, zeros_of


@ExchangesAhead.register
@KeepsRounding.register
class CocktailSGDState(NamedTuple):
    """State of `cocktail_sgd`."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    # f32 leaves of the parameters' shapes: this replica's parameters minus the consensus.
    drift: Any
    owner_residual: Any  # f32[numel / R] per bucket: what this owner has not passed on yet
    inner: Any  # state of the inner optimizer, this replica's own
    rounds: Any  # {"all", "synchronize", "warmup"}: i32[], how often each was sent
    skipped: jax.Array  # i32[], this replica's steps whose inner update was not finite


def cocktail_sgd(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    compressor: Compressor | Policy | Transport | None = None,
    warmup_steps: int = 0,
    sync_every: int = 1,
    delayed: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Lets each replica train alone, and exchanges compressed model differences.

    `params` are the consensus, equal on all replicas; gradients are taken at
    `jaxcomp.local_params`, the consensus plus this replica's `drift`. With d_i the drift, e the
    owners' residual, C the compressor and u_i the inner update of replica i, one step is

        c = C[mean_i C[d_i] + e],  e <- mean_i C[d_i] + e - c,
        params <- params + c,  d_i <- d_i - C[d_i] + u_i.

    What C[d_i] loses stays in d_i: there is no other residual. For any C, the mean of the replicas'
    parameters plus e moves exactly by the mean inner update. The exchange does not depend on this
    step's gradient, so both may run at once; the other replicas' updates arrive a step late.

    Moments are never exchanged, and `inner` sees local gradients: a clipping in it clips those,
    from a batch R times smaller. A replica whose inner update is not finite skips it, keeps its
    inner state, and counts it in `skipped`; the exchange goes on.

    Args:
      inner: Any optax optimizer, with its learning rate. It must not average over the replicas.
      axis_name: Mesh axis of the replicas.
      compressor: Compressor of all parameters; or a policy `(path, leaf) -> Compressor`, for
        example from `jaxcomp.by_path`; or a transport, such as `jaxcomp.gathered(compressor)`.
        Default: `jaxcomp.cocktail()`, 0.184 bits per parameter and direction.
      warmup_steps: First steps in which `inner` sees the exact mean gradient, so that all replicas
        take the same step. `compressor` is not used. Such a step sends 1.13 times the bytes of a
        dense float32 all-reduce: the gradient in both directions, then the owners' step at 8 bits,
        which makes it equal by JAX's types. The drift, equal everywhere, keeps the rounding error,
        under 1% of the largest of 128 neighbouring steps.
      sync_every: Steps from one exchange to the next.
      delayed: Whether updates of other replicas arrive one step late, as in the paper, so that the
        exchange may overlap with the gradient. If not, d_i + u_i is sent instead of d_i, at the end
        of an interval of `sync_every`, which gives a lower loss from scratch.

    Returns:
      A `GradientTransformationExtraArgs` whose updates move the consensus, in float32. It
      keeps the inner state, a float32 drift and 1/R of a float32 residual. `update` takes an extra
      argument `ahead`, see `jaxcomp.overlapped_train_step`.

    Raises:
      ValueError: At construction for `warmup_steps` or `sync_every` out of range; at trace time
        without `params`, for an unknown axis, gradients that are already reduced, leaves that are
        not floating, or an inner optimizer that averages over the replicas.

    References:
      J. Wang et al., `CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks
      <https://proceedings.mlr.press/v202/wang23t.html>`_, ICML 2023, algorithm 1. Deviations: the
      consensus keeps the dtype of `params`, and the drift keeps what it rounds off (the authors'
      code has a float16 consensus and loses that); the model is cut into buckets, each with
      its own top-K; the residual is float32 (theirs: float16); the warm-up averages
      gradients (theirs: sums them).
    """
    name, steps = "cocktail_sgd", {"warmup_steps": warmup_steps, "sync_every": sync_every}
    require_static(name, "optax.adam(learning_rate)", **steps)
    needs, write = "integers of at least 0 and 1", "warmup_steps=0, sync_every=1"
    require(is_count(warmup_steps, 0) and is_count(sync_every), name, needs, write, **steps)
    transport = wire.transport_of(cocktail() if compressor is None else compressor, axis_name)
    inner = with_extra_args(inner, name)
    always = sync_every == 1 and not warmup_steps  # then nothing needs a branch

    def init_fn(params):
        zero = jnp.zeros([], jnp.int32)
        drift = to_varying(jax.tree.map(moments.zeros, params), axis_name)
        # In the dtypes of the updates; all of it is this replica's own from the start.
        inner_state = inner.init(jax.tree.map(moments.to_moment_dtype, params))
        return CocktailSGDState(
            count=zero,
            drift=drift,
            owner_residual=averaging.nothing_sent(transport, drift)[1],
            inner=to_varying(inner_state, axis_name),
            rounds=no_rounds("synchronize", "warmup"),
            skipped=to_varying(zero, axis_name),
        )

    def exchanged(state, drift, pace=at_once):
        """What the owners send to all, what this replica sends, and the owners' residual."""
        # Masks roll once per exchange, not per step: else some entries might never be sent.
        rounds, kept = state.count // sync_every, state.owner_residual
        got = averaging.average(
            transport, drift, rounds, "synchronize", owner_residual=kept, pace=pace
        )
        return got.mean, got.sent, got.owner_residual

    def waiting(state, drift):
        zeros = jax.tree.map(zeros_of, jax.eval_shape(exchanged, state, drift)[:2])
        return *zeros, state.owner_residual

    def exchanged_if(due, state, drift, pace=at_once):
        # Inside a branch nothing else can be computed, so the exchange has no pace.
        if always:
            return exchanged(state, drift, pace)
        return lax.cond(due, exchanged, waiting, state, drift)

    def update_fn(updates, state, params, *, ahead=lambda make: make(), **extra_args):
        # Below 2e-4 the square of a float16 gradient is zero, and Adam's step would be m / eps.
        updates = jax.tree.map(moments.to_moment_dtype, updates)
        is_warm = state.count < warmup_steps
        due = (state.count % sync_every == (0 if delayed else sync_every - 1)) & ~is_warm
        if delayed:
            sent_ahead = ahead(functools.partial(exchanged_if, due, state, state.drift))
        if warmup_steps:
            dense = functools.partial(_dense, transport)
            updates = lax.cond(is_warm, dense, lambda grads: grads, updates)
        step, inner_state, is_bad = inner_step(
            name,
            inner,
            updates,
            state.inner,
            jax.tree.map(jnp.add, params, state.drift),
            axis_name,
            Synchronization(
                due=True if always else due,
                part="synchronize",
                always=sync_every == 1,
                step=state.count,
                alike=is_warm,
            ),
            extra_args,
        )
        if delayed:
            consensus, sent, owner_residual = sent_ahead
        else:
            drift = jax.tree.map(jnp.add, state.drift, step)
            consensus, sent, owner_residual = exchanged_if(due, state, drift)
        if warmup_steps:
            whole = functools.partial(_from_owners, transport)
            nothing = lambda *both: jax.tree.map(zeros_of, jax.eval_shape(whole, *both))
            warm = lax.cond(is_warm, whole, nothing, state.drift, step)
            consensus, sent = (jax.tree.map(jnp.add, x, warm) for x in (consensus, sent))

        def drifted(drift, sent, step, param, change):
            left = drift - sent + step if delayed else drift + step - sent
            return left + averaging.rounded_off(param, change)

        return consensus, CocktailSGDState(
            count=optax.safe_increment(state.count),
            drift=jax.tree.map(drifted, state.drift, sent, step, params, consensus),
            owner_residual=owner_residual,
            inner=inner_state,
            rounds=counted(state.rounds, all=due | is_warm, synchronize=due, warmup=is_warm),
            skipped=state.skipped + is_bad,
        )

    return method(name, axis_name, init_fn, update_fn)


def _dense(transport, grads):
    """The exact mean gradient, of a type that varies like local gradients."""
    mean = averaging.average(averaging.exact(transport), grads, jnp.int32(0), "warmup").mean
    return to_varying(mean, transport.axis_name)


def _from_owners(transport, drift, step):
    """Equal drifts plus equal steps, encoded, and equal by type: each owner sends its chunk."""
    axis_name, tree = transport.axis_name, jax.tree.map(jnp.add, drift, step)
    plan = averaging.plan_of(transport._replace(code=quantize(8)), tree)

    def whole(key, bucket, flat):
        chunk = flat.reshape(lax.axis_size(axis_name), -1)[lax.axis_index(axis_name)]
        return wire.gather(chunk, bucket.label.compressor, key, axis_name)[0]

    shared, flat = Key(jnp.int32(0), jnp.uint32(0)), buckets.flatten(plan, tree)
    with jax.named_scope("jaxcomp.warmup"):
        return buckets.unflatten(plan, averaging.map_buckets(whole, plan, shared, flat))
