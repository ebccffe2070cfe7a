"""Averages trees over the replicas: plans, flattens, exchanges and unflattens them."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._printing import text
from jaxcomp.compressors.base import Compressor, Key, identity
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.platforms import by_platform
from jaxcomp.compressors.policies import policy_of
from jaxcomp.exchange import buckets, wire
from jaxcomp.exchange.journeys import Pace, alone, at_once, completed, received, resumed
from jaxcomp.exchange.wire import Transport
from jaxcomp.replicas.finite import not_finite, poisoned
from jaxcomp.replicas.types import num_replicas, to_varying, vary_over, varying_axes, zeros_of

EXACT = identity()


class Instead(NamedTuple):
    """Another way to send the buckets of a tree in some steps.

    Each bucket has its own branch, so its message waits only for its own leaves.
    """

    holds: jax.Array  # bool[], equal on all replicas
    # Replaces all codes, but linear ones by float32: those have no owners. None: nothing is sent,
    # and the means are zeros.
    code: Compressor | None = None
    part: str = ""  # the name of what is then sent in `jaxcomp.report`


class Averaged(NamedTuple):
    """A tree after its exchange; leaves are float32 or wider."""

    mean: Any  # equal on all replicas
    sent: Any  # what this replica's messages decode to; the rest is lost
    residual: Any  # for the next exchange, as in `nothing_sent`; None without one
    owner_residual: Any  # the same for what this owner passes on, as `zero_owner_residual`
    failed: Any  # bool[], whether `bad` is known to hold on any replica; None without one
    flat: Any  # the mean of each bucket, of which the leaves of `mean` are slices


class Label(NamedTuple):
    """What the leaves of one bucket have in common."""

    compressor: Compressor
    # Other mesh axes that shard them: sharded and unsharded leaves must not be mixed.
    axes: frozenset[str]


def plan_of(transport: Transport, tree: Any) -> buckets.Plan:
    """Plans the buckets of a tree; see `buckets.make_plan`."""
    policy, axis_name = policy_of(transport.code), transport.axis_name

    def label(path, leaf):
        return Label(policy(path, leaf), varying_axes(leaf) - {axis_name})

    numel, order = transport.bucket_numel, transport.order
    return buckets.make_plan(tree, label, num_replicas(axis_name), numel, order)


def exact(transport: Transport) -> Transport:
    """The same transport in float32, with one all-reduce per bucket."""
    return transport._replace(code=EXACT, exchange=wire.summed)


def but_exact(transport: Transport, is_exact: Callable[[str, Any], bool]) -> Transport:
    """The same transport, but leaves for which `is_exact(path, leaf)` holds are sent in float32."""
    policy = policy_of(transport.code)
    choose = lambda path, leaf: EXACT if is_exact(path, leaf) else policy(path, leaf)
    return transport._replace(code=choose)


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
    zeroed: Any = None,
    pace: Pace = at_once,
) -> Averaged:
    """Averages a tree over the replicas; all methods send through this function.

    With both residuals nothing is lost: over any number of calls the sum of the means, plus the
    mean residual over replicas, plus the owners' residuals is the sum of the mean trees.

    Args:
      transport: How the tree is exchanged.
      tree: Floating leaves that vary over the replicas.
      count: i32[], equal on all replicas; masks and noise depend on it.
      part: Name of what is sent in `jaxcomp.report`; "" if every step sends it.
      residual: What this replica has not sent yet, which is added; None: no error feedback.
      owner_residual: What this owner has not passed on yet; None: nothing.
      instead: Another way to send, in a branch of each bucket; the pace does not apply there.
      bad: bool[] of each replica, whether its tree is not finite. Then one bucket is NaN, and so is
        a part of the mean on all replicas; the other buckets are sent before this is known. It is
        the last float32 bucket if there is one: norms and biases of all layers, and what ends a
        dense mean, are complete last anyway.
      zeroed: bool[] for each leaf, whether this replica sends it as zeros. XLA does that while it
        fills buckets, also in a branch.
      pace: What a step computes while messages are sent.

    Returns:
      The `Averaged`.
    """
    plan = plan_of(transport, tree)
    if owner_residual is None:
        owner_residual = zero_owner_residual(plan, transport)
    if plan.reordered:
        (owner_residual,) = owner_residual.values()
    total = tree if residual is None else paired(_plus, residual, tree)
    leaves = plan.treedef.flatten_up_to(total)
    empty = None if zeroed is None else plan.treedef.flatten_up_to(zeroed)
    carrier = _carrier(plan)

    def journey(key, bucket, residual, code=None):
        x = buckets.fill(bucket, leaves, empty)
        if bad is not None and bucket is plan.buckets[carrier]:
            x = poisoned(bad, x)
        way = _exchange_of(bucket, transport, code).journey
        return way(x, residual, _code(bucket, code), key, transport.axis_name)

    shared = Key(count, jnp.uint32(transport.seed))
    if instead is None:
        with named(part):
            means = completed(map_buckets(journey, plan, shared, owner_residual), pace)
    else:
        either = functools.partial(_either, instead, part, journey)
        means = map_buckets(either, plan, shared, owner_residual)
    wide = [jnp.promote_types(dtype, jnp.float32) for dtype in plan.dtypes]
    flat = [m.mean for m in means]
    means_of = _laid_out(plan, buckets.unflatten(plan, flat, wide))
    decoded = _laid_out(plan, buckets.unflatten(plan, [m.sent for m in means], wide))
    sent = _sent(plan, leaves, empty, decoded, instead)
    left = None if residual is None else paired(_lost, residual, total, sent)
    failed = None if bad is None else not_finite(flat[carrier:][:1]) > 0
    owed = _by_bucket(plan, transport, (m.owner_residual for m in means))
    return Averaged(means_of, sent, left, owed, failed, flat)


def _laid_out(plan, tree):
    """The leaves, each matrix copied once from its bucket into its own tiles on TPUs.

    XLA:TPU would compute with slices of the bucket, and copy what each reader has computed. Leaves
    without elements get here the axes that shard them: they are in no bucket.
    """
    labels = plan.treedef.unflatten(plan.labels)
    tree = jax.tree.map(lambda x, label: vary_over(x, label.axes), tree, labels)
    same = lambda x: x
    once = lambda x: lax.optimization_barrier(x) if x.ndim > 1 else x
    return by_platform(tree, cpu=same, gpu=same, default=functools.partial(jax.tree.map, once))


def _sent(plan, leaves, empty, decoded, instead):
    """What was sent: of leaves in float32 the leaf, which need not be copied back."""

    def sent_leaf(label, x, empty, decoded):
        if label.compressor != EXACT:
            return decoded
        x = x.astype(decoded.dtype)
        nothing = empty if instead is None or instead.code else empty | instead.holds
        return x if nothing is False else jnp.where(nothing, 0, x)

    empty = [False] * len(leaves) if empty is None else empty
    decoded = plan.treedef.flatten_up_to(decoded)
    return plan.treedef.unflatten(map(sent_leaf, plan.labels, leaves, empty, decoded))


def _carrier(plan):
    """The number of the bucket that is NaN if a tree is not finite."""
    exact = [i for i, bucket in enumerate(plan.buckets) if _code(bucket) == EXACT]
    return exact[-1] if exact else len(plan.buckets) - 1


def _either(instead, part, journey, key, bucket, residual):
    """One bucket's mean, sent in one of two ways."""
    if instead.code is None and _code(bucket).linear:
        start = functools.partial(journey, key, bucket, residual)
        return _sum_or_nothing(instead.holds, part, start)

    def along(part, code=None):
        with named(part):
            mean = alone(journey(key, bucket, residual, code))
        return mean._replace(sent=mean.sent.reshape(-1))  # branches return equal shapes

    def nowhere():
        like = jax.eval_shape(lambda: along(part))
        return wire.Mean(zeros_of(like.mean), zeros_of(like.sent), residual)

    other = functools.partial(along, instead.part, instead.code)
    return lax.cond(
        instead.holds, nowhere if instead.code is None else other, functools.partial(along, part)
    )


def _sum_or_nothing(holds, part, start):
    """The mean of a linear code, or zeros if `holds`; `start` makes a new journey each time.

    The branch returns what the collective does. The rest is outside, where XLA fuses it with its
    reader: a branch would read and write the whole bucket for that.
    """

    def send():
        with named(part):
            return received(start())

    nothing = lambda: jax.tree.map(zeros_of, jax.eval_shape(send))
    mean = resumed(start(), lax.cond(holds, nothing, send))
    return mean._replace(sent=jnp.where(holds, 0.0, mean.sent))


def named(part: str) -> contextlib.AbstractContextManager[Any]:
    """The scope that names a part in `jaxcomp.report`; no scope for ""."""
    return jax.named_scope(f"jaxcomp.{part}") if part else contextlib.nullcontext()


def nothing_sent(transport: Transport, tree: Any) -> tuple[Any, Any]:
    """The residual and the owners' residual before the first `average` of a tree.

    The residual is a tree of zeros that varies, float32 or wider; None for float32 or empty leaves.
    """
    plan = plan_of(transport, tree)
    leaves = [
        _zeros(shape, jnp.promote_types(dtype, jnp.float32), label, transport.axis_name)
        if label.compressor != EXACT and math.prod(shape) > 0  # the others lose nothing
        else None
        for label, shape, dtype in zip(plan.labels, plan.shapes, plan.dtypes, strict=True)
    ]
    return plan.treedef.unflatten(leaves), zero_owner_residual(plan, transport)


def feedback(state: Any) -> dict[str, Any]:
    """The residuals of a state, or of an `Averaged`, as arguments of `average`."""
    return {"residual": state.residual, "owner_residual": state.owner_residual}


def zero_owner_residual(plan: buckets.Plan, transport: Transport) -> Any:
    """`f32[numel / R]` of zeros for each bucket, varying; None for buckets without owners."""
    axis_name = transport.axis_name
    each = (
        _zeros(bucket.numel // num_replicas(axis_name), bucket.dtype, bucket.label, axis_name)
        if _exchange_of(bucket, transport).owns_chunks
        else None
        for bucket in plan.buckets
    )
    return _by_bucket(plan, transport, each)


def _by_bucket(plan, transport, residuals):
    """As states keep it: a tuple, under the name of the order where it differs from the tree's."""
    return {text(transport.order): tuple(residuals)} if plan.reordered else tuple(residuals)


def rounded_off(param: jax.Array, change: jax.Array) -> jax.Array:
    """What `param + change` loses in the dtype of `param`, in that of `change`."""
    if param.dtype == change.dtype:
        return change - ((param + change) - param)
    # The barrier keeps XLA from dropping the cast there and back (excess precision).
    rounded = lax.optimization_barrier((param + change).astype(param.dtype))
    return change - (rounded.astype(change.dtype) - param)


def paired(function: Callable, residual: Any, *trees: Any) -> Any:
    """Maps over trees and residuals, which are None for leaves that lose nothing."""
    return jax.tree.map(function, residual, *trees, is_leaf=lambda x: x is None)


def map_buckets(function: Callable, plan: buckets.Plan, shared: Key, *columns: Any) -> list:
    """Maps `function(key, bucket, *values)` over the buckets, each with a key of its own.

    Each column has one array per bucket, or None.
    """
    rows = zip(plan.buckets, *columns, strict=True)
    return [function(fold(shared, shared.count, i), *row) for i, row in enumerate(rows)]


def _zeros(shape, dtype, label: Label, axis_name: str) -> jax.Array:
    """Zeros that vary over the replicas and over the axes that shard the label's leaves."""
    return to_varying(jnp.zeros(shape, dtype), (axis_name, *sorted(label.axes)))


def _exchange_of(bucket: buckets.Bucket, transport: Transport, code=None) -> wire.Exchange:
    """Linear codes are summed on the wire."""
    exchange = transport.exchange
    return wire.summed if exchange.sums_linear and _code(bucket, code).linear else exchange


def _code(bucket: buckets.Bucket, code: Compressor | None = None) -> Compressor:
    """The bucket's code, or `code` instead: a linear code is replaced by float32."""
    own = bucket.label.compressor
    if code is None:
        return own
    return EXACT if own.linear else code


def _plus(residual, x):
    return x if residual is None else x + residual


def _lost(residual, x, sent):
    return None if residual is None else (x - sent).astype(residual.dtype)
