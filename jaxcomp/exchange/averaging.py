"""Trees as buckets, and the mean of every bucket by the way that its compressor asks for."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Compressor, Key, identity
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.policies import Policy as Policy
from jaxcomp.compressors.policies import policy_of as policy_of
from jaxcomp.exchange import buckets, wire
from jaxcomp.replicas.types import largest, num_replicas, to_varying, varying_axes


class Transport(NamedTuple):
    """How the trees of one method travel."""

    policy: Policy
    exchange: wire.Exchange
    axis_name: str  # the mesh axis of the replicas
    bucket_numel: int  # most elements of one message's bucket
    seed: int  # of masks, shifts and stochastic rounding


class Fed(NamedTuple):
    """A mean with error feedback, and what is kept for the next one."""

    mean: Any  # equal on all replicas
    residual: Any  # as `zero_residual`
    owner_residual: tuple[jax.Array | None, ...]  # as `zero_owner_residual`


class Label(NamedTuple):
    """What the leaves of one bucket have in common."""

    compressor: Compressor
    # Other mesh axes that shard them: what varies over none may not be mixed with what does.
    axes: frozenset[str]


def make_plan(tree: Any, policy: Policy, axis_name: str, bucket_numel: int) -> buckets.Plan:
    """Plans the buckets of a tree whose leaves travel as a policy says; see `buckets.make_plan`."""

    def label(path, leaf):
        return Label(policy(path, leaf), varying_axes(leaf) - {axis_name})

    return buckets.make_plan(tree, label, num_replicas(axis_name), bucket_numel)


def require_params(name: str, params) -> None:
    """Raises a ValueError where an update gets no parameters."""
    if params is None:
        raise ValueError(f"{name} needs the parameters; write tx.update(grads, state, params).")


def finite(tree) -> jax.Array:
    """bool[], whether everything in a tree is finite, or what is on this device of it."""
    good = jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)], bool)
    # Without the barrier XLA makes a chain of ands, and repeats it in the update of every leaf.
    return jnp.all(lax.optimization_barrier(good))


def not_finite(tree, *but: str) -> jax.Array:
    """i32[], 1 if anything in a tree is NaN or infinite; equal over all mesh axes `but` these."""
    return largest((~finite(tree)).astype(jnp.int32), *but)


def zero_owner_residual(
    plan: buckets.Plan, exchange: wire.Exchange, axis_name: str
) -> tuple[jax.Array | None, ...]:
    """One `f32[numel / R]` of zeros a bucket, varying; None for buckets without owners."""
    return tuple(
        _zeros(bucket.numel // num_replicas(axis_name), bucket.dtype, bucket.label, axis_name)
        if _exchange_of(bucket, exchange).owns_chunks
        else None
        for bucket in plan.buckets
    )


def mean_of_buckets(
    plan: buckets.Plan,
    flat: list[jax.Array],
    owner_residual: tuple[jax.Array | None, ...],
    exchange: wire.Exchange,
    shared: Key,
    axis_name: str,
) -> list[wire.Mean]:
    """Averages every bucket over the replicas; those of linear compressors are summed on the wire.

    Args:
      plan: What the buckets were filled by.
      flat: One `f32[numel]` a bucket; what is appended to one travels along if it is summed.
      owner_residual: One a bucket, as `zero_owner_residual` returns it.
      exchange: How the other buckets travel.
      shared: Key of the step, equal on all replicas.
      axis_name: The mesh axis of the replicas.

    Returns:
      One `wire.Mean` a bucket.
    """

    def mean(key, bucket, x, residual):
        exchange_of = _exchange_of(bucket, exchange)
        return exchange_of.mean(x, residual, bucket.label.compressor, key, axis_name)

    return map_buckets(mean, plan, shared, flat, owner_residual)


def map_buckets(function: Callable, plan: buckets.Plan, shared: Key, *columns: Any) -> list:
    """`function(key, bucket, *values)` of every bucket, with a key of its own, as a list.

    Each of the columns has one array a bucket, or None.
    """

    def one(index, bucket, values):
        return function(fold(shared, shared.count, index), bucket, *values)

    def looped(indices, bucket):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[table[i] for i in indices])
        step = lambda _, row: (None, one(row[0], bucket, row[1]))
        _, results = lax.scan(step, None, (jnp.array(indices), stacked))
        return [jax.tree.map(lambda leaf, n=n: leaf[n], results) for n in range(len(indices))]

    table = list(zip(*columns, strict=True))
    shapes = lambda values: tuple((x.shape, x.dtype) for x in jax.tree.leaves(values))
    alike = lambda index: (plan.buckets[index].label, shapes(table[index]))
    results = []
    for _, group in itertools.groupby(range(len(table)), alike):
        indices = list(group)
        bucket = plan.buckets[indices[0]]
        if len(indices) > _UNROLLED and bucket.label.compressor != EXACT:
            results += looped(indices, bucket)
        else:
            results += [one(i, bucket, table[i]) for i in indices]
    return results


def exact_mean(tree: Any, axis_name: str, bucket_numel: int, part: str) -> Any:
    """The mean of a tree over the replicas, as float32, in one all-reduce a bucket.

    Args:
      tree: Floating leaves.
      axis_name: The mesh axis of the replicas.
      bucket_numel: Most elements of one message.
      part: By which `jaxcomp.report` names what is sent.

    Returns:
      The means, equal on all replicas, of the leaves' dtypes.
    """
    transport = Transport(lambda path, leaf: EXACT, wire.summed, axis_name, bucket_numel, 0)
    return mean_without_feedback(transport, tree, jnp.int32(0), part)


def mean_without_feedback(transport: Transport, tree: Any, count: jax.Array, part: str) -> Any:
    """Averages a tree over the replicas; what its codes lose on the way is lost.

    Args:
      transport: How it travels.
      tree: Floating leaves that vary over the replicas.
      count: i32[], equal on all replicas; another one draws other masks and noise.
      part: By which `jaxcomp.report` names what is sent.

    Returns:
      The means, equal on all replicas, of the leaves' dtypes.
    """
    policy, exchange, axis_name, bucket_numel, seed = transport
    plan = make_plan(tree, policy, axis_name, bucket_numel)
    flat, nothing = buckets.flatten(plan, tree), zero_owner_residual(plan, exchange, axis_name)
    shared = Key(count, jnp.uint32(seed))
    with jax.named_scope(f"jaxcomp.{part}"):
        means = mean_of_buckets(plan, flat, nothing, exchange, shared, axis_name)
    return buckets.unflatten(plan, [m.mean for m in means])


def zero_residual(plan: buckets.Plan, axis_name: str) -> Any:
    """A tree of zeros that varies, float32 or wider; None for leaves that travel exact or empty."""
    leaves = [
        _zeros(shape, jnp.promote_types(dtype, jnp.float32), label, axis_name) if lossy else None
        for label, shape, dtype, lossy in zip(
            plan.labels, plan.shapes, plan.dtypes, _lossy(plan), strict=True
        )
    ]
    return plan.treedef.unflatten(leaves)


def add_residual(plan: buckets.Plan, tree: Any, residual: Any) -> Any:
    """The tree plus what was not sent of it before."""
    leaves = zip(
        plan.treedef.flatten_up_to(tree), plan.treedef.flatten_up_to(residual), strict=True
    )
    return plan.treedef.unflatten([x if r is None else x + r for x, r in leaves])


def unsent(plan: buckets.Plan, flat: list[jax.Array], means: list[wire.Mean]) -> Any:
    """What this replica's messages lack of its buckets, as a tree like `zero_residual`."""
    lost = [x - mean.sent for x, mean in zip(flat, means, strict=True)]
    dtypes = [jnp.promote_types(dtype, jnp.float32) for dtype in plan.dtypes]
    leaves = plan.treedef.flatten_up_to(buckets.unflatten(plan, lost, dtypes))
    return plan.treedef.unflatten(
        [x if lossy else None for x, lossy in zip(leaves, _lossy(plan), strict=True)]
    )


def _lossy(plan: buckets.Plan) -> list[bool]:
    """Which leaves lose something on the way: what has no elements is in no message."""
    return [
        label.compressor != EXACT and math.prod(shape) > 0
        for label, shape in zip(plan.labels, plan.shapes, strict=True)
    ]


def nothing_sent(transport: Transport, tree: Any) -> tuple[Any, Any]:
    """The residual and the owners' residual before the first `mean_with_feedback` of a tree."""
    policy, exchange, axis_name, bucket_numel, _ = transport
    plan = make_plan(tree, policy, axis_name, bucket_numel)
    return zero_residual(plan, axis_name), zero_owner_residual(plan, exchange, axis_name)


def mean_with_feedback(
    transport: Transport,
    tree: Any,
    residual: Any,
    owner_residual: Any,
    count: jax.Array,
    code: Compressor | None = None,
    part: str = "synchronize",
) -> Fed:
    """Averages a tree over the replicas, with what was not sent before on both ways.

    Over any number of calls the means, plus the mean residual over replicas, plus the owners'
    residuals are the sum of the mean trees, whichever codes they travel by.

    Args:
      transport: How it travels.
      tree: Floating leaves that vary over the replicas.
      residual: What this replica has not sent yet.
      owner_residual: What this owner has not passed on yet.
      count: i32[], equal on all replicas; another one draws other masks and noise.
      code: Instead of the transport's codes, but for linear ones.
      part: By which `jaxcomp.report` names what is sent.

    Returns:
      The mean and the new residuals.
    """
    policy, exchange, axis_name, bucket_numel, seed = transport
    plan = make_plan(tree, policy, axis_name, bucket_numel)
    plan = plan if code is None else _recoded(plan, code)
    flat = buckets.flatten(plan, add_residual(plan, tree, residual))
    shared = Key(count, jnp.uint32(seed))
    with jax.named_scope(f"jaxcomp.{part}"):
        means = mean_of_buckets(plan, flat, owner_residual, exchange, shared, axis_name)
    mean = buckets.unflatten(plan, [m.mean for m in means])
    return Fed(mean, unsent(plan, flat, means), tuple(m.owner_residual for m in means))


def _recoded(plan: buckets.Plan, code: Compressor) -> buckets.Plan:
    """The same buckets, to be sent by another code; not those that are summed on the wire."""

    def recoded(bucket):
        label = bucket.label._replace(compressor=code)
        return bucket if bucket.label.compressor.linear else bucket._replace(label=label)

    return dataclasses.replace(plan, buckets=tuple(recoded(bucket) for bucket in plan.buckets))


def rounded_off(param: jax.Array, change: jax.Array) -> jax.Array:
    """What `param + change` loses in the dtype of `param`, in that of `change`."""
    if param.dtype == change.dtype:
        return change - ((param + change) - param)
    # The barrier keeps XLA from leaving out the cast there and back (excess precision).
    rounded = lax.optimization_barrier((param + change).astype(param.dtype))
    return change - (rounded.astype(change.dtype) - param)


def counted(rounds: dict[str, jax.Array], **sent: jax.Array | bool) -> dict[str, jax.Array]:
    """Adds one to the count of every part of the exchange that was sent; names as its scopes."""
    return {name: n + jnp.asarray(sent[name], n.dtype) for name, n in rounds.items()}


EXACT = identity()
# More buckets alike become one loop: it stacks them, two copies more, but XLA takes seconds to
# compile the exchange of one, and a large model has thousands. Exact ones XLA joins by itself.
_UNROLLED = 8


def _zeros(shape, dtype, label: Label, axis_name: str) -> jax.Array:
    """Zeros that vary over the replicas and over the axes that shard what they are kept for."""
    zeros = jnp.zeros(shape, dtype)
    for name in (axis_name, *sorted(label.axes)):
        zeros = to_varying(zeros, name)
    return zeros


def _exchange_of(bucket: buckets.Bucket, exchange: wire.Exchange) -> wire.Exchange:
    return wire.summed if bucket.label.compressor.linear else exchange
