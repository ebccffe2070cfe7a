"""Trees averaged over the replicas: planned, flattened, exchanged and unflattened, in one place."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Compressor, Key, identity
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.policies import Policy
from jaxcomp.exchange import buckets, wire
from jaxcomp.exchange.journeys import Pace, alone, at_once, completed
from jaxcomp.replicas.finite import not_finite, poisoned
from jaxcomp.replicas.types import num_replicas, to_varying, varying_axes, zeros_of

EXACT = identity()


class Transport(NamedTuple):
    """How the trees of one method travel."""

    policy: Policy
    exchange: wire.Exchange
    axis_name: str  # the mesh axis of the replicas
    bucket_numel: int | None  # most elements of one message's bucket; None: `buckets.default_numel`
    seed: int  # of masks, shifts and stochastic rounding


class Instead(NamedTuple):
    """Another way of the buckets of a tree, while something holds.

    Each bucket has a branch of its own: its message waits for what it sends, not for all leaves.
    """

    holds: jax.Array  # bool[], equal on all replicas
    # For all codes but linear ones; None: nothing is sent, and the means are zeros.
    code: Compressor | None = None
    part: str = ""  # by which `jaxcomp.report` names what is sent then


class Averaged(NamedTuple):
    """A tree after its exchange; trees have float32 leaves, or wider ones."""

    mean: Any  # equal on all replicas
    sent: Any  # what this replica's messages decode to: what is lost is the rest
    residual: Any  # as `nothing_sent` has it, for the next exchange; None without one
    owner_residual: tuple[jax.Array | None, ...]  # the same of what this owner passes on
    failed: Any  # bool[], whether `bad` is known to hold on any replica; None without one


class Label(NamedTuple):
    """What the leaves of one bucket have in common."""

    compressor: Compressor
    # Other mesh axes that shard them: what varies over none may not be mixed with what does.
    axes: frozenset[str]


def plan_of(transport: Transport, tree: Any) -> buckets.Plan:
    """Plans the buckets of a tree; see `buckets.make_plan`."""
    policy, _, axis_name, bucket_numel, _ = transport

    def label(path, leaf):
        return Label(policy(path, leaf), varying_axes(leaf) - {axis_name})

    return buckets.make_plan(tree, label, num_replicas(axis_name), bucket_numel)


def exact(transport: Transport) -> Transport:
    """The same way for float32 values, in one all-reduce a bucket."""
    return transport._replace(policy=lambda path, leaf: EXACT, exchange=wire.summed)


def average(
    transport: Transport,
    tree: Any,
    count: jax.Array,
    part: str,
    *,
    residual: Any = None,
    owner_residual: Any = None,
    instead: Instead | None = None,
    bad: jax.Array | None = None,
    pace: Pace = at_once,
) -> Averaged:
    """Averages a tree over the replicas: the one way through which all methods send.

    With both residuals, nothing is lost: over any number of calls the means, plus the mean
    residual over replicas, plus the owners' residuals are the sum of the mean trees.

    Args:
      transport: How it travels.
      tree: Floating leaves that vary over the replicas.
      count: i32[], equal on all replicas; another one draws other masks and noise.
      part: By which `jaxcomp.report` names what is sent; "" for what every step sends.
      residual: What this replica has not sent yet, which is sent along; None: nothing is kept.
      owner_residual: What this owner has not passed on yet; None: nothing.
      instead: Another way, in a branch of each bucket, which no pace stops.
      bad: bool[] of each replica, whether its tree fails. Then one bucket of it is NaN, and so is
        a part of the mean on all replicas; the other buckets leave before this is known. That
        bucket is an exact one if there is one: norms and biases of all layers are complete last
        in any case.
      pace: What a step computes while the messages travel.

    Returns:
      The `Averaged`.
    """
    plan = plan_of(transport, tree)
    if owner_residual is None:
        owner_residual = zero_owner_residual(plan, transport)
    total = tree if residual is None else _paired(_plus, residual, tree)
    leaves = plan.treedef.flatten_up_to(total)
    carrier = _carrier(plan)

    def journey(key, bucket, residual, code=None):
        x = buckets.fill(bucket, leaves)
        if bad is not None and bucket is plan.buckets[carrier]:
            x = poisoned(bad, x)
        way = _exchange_of(bucket, transport, code).journey
        return way(x, residual, _code(bucket, code), key, transport.axis_name)

    columns = plan, Key(count, jnp.uint32(transport.seed)), owner_residual
    if instead is None:
        with named(part):
            means = completed(map_buckets(journey, *columns), pace)
    else:
        means = map_buckets(functools.partial(_either, instead, part, journey), *columns)
    wide = [jnp.promote_types(dtype, jnp.float32) for dtype in plan.dtypes]
    means_of = buckets.unflatten(plan, [m.mean for m in means], wide)
    sent = buckets.unflatten(plan, [m.sent for m in means], wide)
    left = None if residual is None else _paired(_lost, residual, total, sent)
    failed = None if bad is None else not_finite([m.mean for m in means[carrier:][:1]]) > 0
    return Averaged(means_of, sent, left, tuple(m.owner_residual for m in means), failed)


def _carrier(plan):
    """The number of the bucket whose mean tells that a tree fails."""
    exact = (i for i, bucket in enumerate(plan.buckets) if _code(bucket) == EXACT)
    return next(exact, len(plan.buckets) - 1)


def _either(instead, part, journey, key, bucket, residual):
    """One bucket's mean, by one of two ways."""

    def along(part, code=None):
        with named(part):
            return alone(journey(key, bucket, residual, code))

    def nowhere():
        like = jax.eval_shape(lambda: along(part))
        return wire.Mean(zeros_of(like.mean), zeros_of(like.sent), residual)

    other = functools.partial(along, instead.part, instead.code)
    return lax.cond(
        instead.holds, nowhere if instead.code is None else other, functools.partial(along, part)
    )


def named(part: str) -> contextlib.AbstractContextManager[Any]:
    """The scope by which `jaxcomp.report` knows what sends a part; none of ""."""
    return jax.named_scope(f"jaxcomp.{part}") if part else contextlib.nullcontext()


def nothing_sent(transport: Transport, tree: Any) -> tuple[Any, Any]:
    """The residual and the owners' residual before the first `average` of a tree."""
    plan = plan_of(transport, tree)
    return zero_residual(plan, transport.axis_name), zero_owner_residual(plan, transport)


def feedback(state: Any) -> dict[str, Any]:
    """The residuals of a state, or of an `Averaged`, as arguments of `average`."""
    return {"residual": state.residual, "owner_residual": state.owner_residual}


def zero_residual(plan: buckets.Plan, axis_name: str) -> Any:
    """A tree of zeros that varies, float32 or wider; None for float32 or empty leaves."""
    leaves = [
        _zeros(shape, jnp.promote_types(dtype, jnp.float32), label, axis_name)
        if label.compressor != EXACT and math.prod(shape) > 0  # the others lose nothing
        else None
        for label, shape, dtype in zip(plan.labels, plan.shapes, plan.dtypes, strict=True)
    ]
    return plan.treedef.unflatten(leaves)


def zero_owner_residual(plan: buckets.Plan, transport: Transport) -> tuple[jax.Array | None, ...]:
    """One `f32[numel / R]` of zeros a bucket, varying; None for buckets without owners."""
    axis_name = transport.axis_name
    return tuple(
        _zeros(bucket.numel // num_replicas(axis_name), bucket.dtype, bucket.label, axis_name)
        if _exchange_of(bucket, transport).owns_chunks
        else None
        for bucket in plan.buckets
    )


def rounded_off(param: jax.Array, change: jax.Array) -> jax.Array:
    """What `param + change` loses in the dtype of `param`, in that of `change`."""
    if param.dtype == change.dtype:
        return change - ((param + change) - param)
    # The barrier keeps XLA from leaving out the cast there and back (excess precision).
    rounded = lax.optimization_barrier((param + change).astype(param.dtype))
    return change - (rounded.astype(change.dtype) - param)


def map_buckets(function: Callable, plan: buckets.Plan, shared: Key, *columns: Any) -> list:
    """`function(key, bucket, *values)` of every bucket, with a key of its own, as a list.

    Each of the columns has one array a bucket, or None.
    """
    rows = zip(plan.buckets, *columns, strict=True)
    return [function(fold(shared, shared.count, i), *row) for i, row in enumerate(rows)]


def _zeros(shape, dtype, label: Label, axis_name: str) -> jax.Array:
    """Zeros that vary over the replicas and over the axes that shard what they are kept for."""
    return to_varying(jnp.zeros(shape, dtype), (axis_name, *sorted(label.axes)))


def _exchange_of(bucket: buckets.Bucket, transport: Transport, code=None) -> wire.Exchange:
    """Linear codes are summed on the wire."""
    return wire.summed if _code(bucket, code).linear else transport.exchange


def _code(bucket: buckets.Bucket, code: Compressor | None = None) -> Compressor:
    """The bucket's code, or another one in the place of one that is not linear."""
    own = bucket.label.compressor
    return own if code is None or own.linear else code


def _paired(function: Callable, residual: Any, *trees: Any) -> Any:
    """Maps over residuals, which are None for leaves that lose nothing, and over trees."""
    return jax.tree.map(function, residual, *trees, is_leaf=lambda x: x is None)


def _plus(residual, x):
    return x if residual is None else x + residual


def _lost(residual, x, sent):
    return None if residual is None else (x - sent).astype(residual.dtype)
