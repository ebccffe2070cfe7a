"""The mean of updates over the replicas, through any compressor, with error feedback."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import buckets, wire
from jaxcomp.compressors import Compressor, Key, fold, identity
from jaxcomp.sharding import largest, num_replicas, require_varying, to_varying, varying_axes


class CompressedMeanState(NamedTuple):
    """State of `compressed_mean`."""

    count: jax.Array  # i32[], updates so far; the source of all keys
    # f32 leaves of the parameters' shapes, None for those that travel exact: not sent yet.
    residual: Any
    # One f32[numel / R] a bucket, None for those without owners: not passed on yet.
    owner_residual: Any


def compressed_mean(
    compressor: Compressor | Callable[[str, Any], Compressor],
    axis_name: str,
    *,
    error_feedback: bool = True,
    exchange: wire.Exchange = wire.two_shot,
    exact: Callable[[str, Any], bool] = buckets.small_or_vector,
    bucket_numel: int = 2**22,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Averages updates over the replicas, sending only the compressor's payload.

    Stands first in `optax.chain`, before any optimizer, and runs inside `jax.shard_map` with
    its types checked: updates that go in vary over `axis_name`, updates that come out do not.
    With error feedback nothing is lost for good: the mean over replicas of `residual`, plus
    `owner_residual`, plus all updates that came out is the sum of the mean updates that went in.

    If any replica's update is not finite, all replicas get NaN together and every residual
    stays as it was; `jaxcomp.train_step`, or `optax.apply_if_finite` around the optimizer that
    follows, then skips the step everywhere. Do not put `apply_if_finite` around this
    transformation: replicas would decide by their own gradients (JAX refuses to trace it).

    Sparse and 1-bit compressors in front of Adam train badly: what arrives in bursts inflates
    the second moment. Use them in front of momentum SGD, or a method made for them.

    Args:
      compressor: Applied to buckets of flattened updates; or a policy `(path, leaf) ->
        Compressor`, as `jaxcomp.by_path` makes.
      axis_name: Mesh axis to average over.
      error_feedback: Whether to add what was not sent to the next update, on both ways. Costs
        (1 + 1/R) float32 values a parameter. Unbiased compressors can do without.
      exchange: How buckets travel: `wire.two_shot`, or `wire.gathered` for two replicas.
        Payloads of linear compressors are summed on the wire in any case.
      exact: `(path, leaf) -> bool`, which leaves travel as float32.
      bucket_numel: Most elements of one message's bucket.
      seed: Of masks, shifts and stochastic rounding.

    Returns:
      A `GradientTransformationExtraArgs`; updates keep shapes and dtypes. Wrap the whole chain
      in `jaxcomp.per_replica`, which `train_step` does by itself.

    Raises:
      ValueError: At trace time, for an unknown axis, updates that are already reduced, a tree
        without leaves, or leaves that are not floating.

    References:
      Seide et al., `1-Bit Stochastic Gradient Descent
      <https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent>`_,
      2014; Karimireddy et al., `Error Feedback Fixes SignSGD
      <https://arxiv.org/abs/1901.09847>`_, 2019, Algorithm 2, whose learning rate is one here:
      the residual is in units of the update.
    """
    policy = (lambda path, leaf: compressor) if isinstance(compressor, Compressor) else compressor

    def make_plan(tree):
        def label(path, leaf):
            code = EXACT if exact(path, leaf) else policy(path, leaf)
            return Label(code, varying_axes(leaf) - {axis_name})

        return buckets.make_plan(tree, label, num_replicas(axis_name), bucket_numel)

    def init(params):
        state = _zero_residuals(make_plan(params), exchange, axis_name)
        return state if error_feedback else state._replace(residual=None, owner_residual=None)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        require_varying(updates, axis_name)
        plan = make_plan(updates)
        old = state if error_feedback else _zero_residuals(plan, exchange, axis_name)
        total = buckets.flatten(plan, _add_residual(plan, updates, old.residual))
        shared = Key(state.count, jnp.uint32(seed))
        means, skip = _exchange(plan, total, old, exchange, shared, axis_name)
        mean = buckets.unflatten(plan, [jnp.where(skip, jnp.nan, m.mean) for m in means])
        count = optax.safe_increment(state.count)
        if not error_feedback:
            return mean, state._replace(count=count)
        unsent = [x - m.sent for x, m in zip(total, means, strict=True)]
        residuals = (_residual_of(plan, unsent), tuple(m.owner_residual for m in means))
        keep = lambda old, new: jnp.where(skip, old, new)
        residuals = jax.tree.map(keep, (old.residual, old.owner_residual), residuals)
        return mean, CompressedMeanState(count, *residuals)

    return optax.GradientTransformationExtraArgs(init, update)


EXACT = identity()


class Label(NamedTuple):
    """What the leaves of one bucket have in common."""

    compressor: Compressor
    # Other mesh axes that shard them: what varies over none may not be mixed with what does.
    axes: frozenset[str]


def _exchange_of(bucket: buckets.Bucket, exchange: wire.Exchange) -> wire.Exchange:
    return wire.summed if bucket.label.compressor.linear else exchange


def _zero_residuals(plan, exchange, axis_name) -> CompressedMeanState:
    """The state before the first update; leaves that travel exact have no residual."""
    residual = [
        None
        if label.compressor == EXACT
        else jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))
        for label, shape, dtype in zip(plan.labels, plan.shapes, plan.dtypes, strict=True)
    ]
    owner_residual = tuple(
        jnp.zeros(bucket.numel // num_replicas(axis_name), bucket.dtype)
        if _exchange_of(bucket, exchange).owns_chunks
        else None
        for bucket in plan.buckets
    )
    varying = to_varying((plan.treedef.unflatten(residual), owner_residual), axis_name)
    return CompressedMeanState(jnp.zeros([], jnp.int32), *varying)


def _add_residual(plan, updates, residual):
    """The tree of updates + residual."""
    leaves = zip(
        plan.treedef.flatten_up_to(updates), plan.treedef.flatten_up_to(residual), strict=True
    )
    return plan.treedef.unflatten([x if r is None else x + r for x, r in leaves])


def _exchange(plan, total, old, exchange, shared, axis_name):
    """Averages every bucket; the first exact one carries whether any update is not finite."""
    bad = ~jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in total], bool))
    # All shards of a replica must agree, and an exact bucket of whole leaves must stay whole.
    bad = largest(bad.astype(jnp.float32), axis_name)
    means, num_bad = [], None
    for index, (bucket, x) in enumerate(zip(plan.buckets, total, strict=True)):
        key = fold(shared, shared.count, index)
        carries = num_bad is None and bucket.label.compressor == EXACT
        if carries:
            x = jnp.append(x, bad.astype(x.dtype))
        how = _exchange_of(bucket, exchange)
        code = bucket.label.compressor
        result = how.mean(x, old.owner_residual[index], code, key, axis_name)
        if carries:
            num_bad = result.mean[-1]
            result = result._replace(mean=result.mean[:-1], sent=result.sent[:-1])
        means.append(result)
    if num_bad is None:
        num_bad = lax.psum(bad, axis_name)
    return means, largest(num_bad) > 0


def _residual_of(plan, unsent):
    """Buckets of what was not sent as a tree of the residual's dtypes, without the exact leaves."""
    dtypes = [jnp.promote_types(dtype, jnp.float32) for dtype in plan.dtypes]
    leaves = plan.treedef.flatten_up_to(buckets.unflatten(plan, unsent, dtypes))
    lossy = [label.compressor != EXACT for label in plan.labels]
    return plan.treedef.unflatten(
        [x if kept else None for x, kept in zip(leaves, lossy, strict=True)]
    )
