"""The mean of updates over the replicas, through any compressor, with error feedback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import policy_of
from jaxcomp.exchange import averaging, buckets, wire
from jaxcomp.methods.common import method
from jaxcomp.replicas.finite import not_finite, poisoned, unless
from jaxcomp.replicas.protocol import MethodState


@MethodState.register
class CompressedMeanState(NamedTuple):
    """State of `compressed_mean`."""

    # i32[], updates so far; the source of all keys
    count: jax.Array  # type: ignore[assignment]
    # f32 leaves of the parameters' shapes, not sent yet; None for those sent in float32, ()
    # for the others without error feedback.
    residual: Any
    # One f32[numel / R] a bucket, None for those without owners: not passed on yet.
    owner_residual: Any


def compressed_mean(
    compressor: Compressor | Callable[[str, Any], Compressor],
    axis_name: str,
    *,
    error_feedback: bool = True,
    exchange: wire.Exchange = wire.two_shot,
    exact: Callable[[str, Any], bool] | None = None,
    bucket_numel: int | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Averages updates over the replicas, sending only the compressor's payload.

    Stands first in `optax.chain`, before any optimizer, and runs inside `jax.shard_map` with
    its types checked: updates that go in vary over `axis_name`, updates that come out do not.
    With error feedback nothing is lost for good: the mean over replicas of `residual`, plus
    `owner_residual`, plus all updates that came out is the sum of the mean updates that went in;
    but for leaves below float32, whose updates are rounded at the end, which is not fed back.

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
      exact: `(path, leaf) -> bool`, which leaves travel as float32. Default: those with fewer than
        two axes, or fewer than 1,024 elements over all their shards.
      bucket_numel: Most elements of one message's bucket; by default at most 8 buckets a code.
      seed: Seed of masks, shifts and stochastic rounding.

    Returns:
      A `GradientTransformationExtraArgs`; updates keep shapes, and get the dtypes of `params`
      where these are given. Wrap the whole chain in `jaxcomp.per_replica`, which `train_step`
      does by itself.

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
    policy = policy_of(compressor)
    exact = buckets.small_or_vector(axis_name) if exact is None else exact
    choose = lambda path, leaf: averaging.EXACT if exact(path, leaf) else policy(path, leaf)
    transport = averaging.Transport(choose, exchange, axis_name, bucket_numel, seed)
    init = functools.partial(_init, transport, error_feedback)
    update = functools.partial(_update, transport, error_feedback)
    return method("compressed_mean", axis_name, init, update, needs_params=False)


def _init(transport, error_feedback, params):
    residual, owner_residual = averaging.nothing_sent(transport, params)
    if not error_feedback:
        residual, owner_residual = jax.tree.map(lambda _: (), residual), None
    return CompressedMeanState(jnp.zeros([], jnp.int32), residual, owner_residual)


def _update(transport, error_feedback, updates, state, params, **_):
    # All shards of a replica must agree, and an exact bucket of whole leaves must stay whole.
    bad = not_finite(updates, transport.axis_name) > 0
    kept = averaging.feedback(state) if error_feedback else {}
    got = averaging.average(transport, updates, state.count, "", bad=bad, **kept)
    # A mean may be infinite where no gradient is, too: float16 scales end at 65,504.
    skip = not_finite(got.mean) > 0
    # optax's states have the parameters' dtypes, and an update of another would change theirs.
    like = updates if params is None else params
    mean = jax.tree.map(lambda m, x: m.astype(x.dtype), poisoned(skip, got.mean), like)
    state = state._replace(count=optax.safe_increment(state.count))
    if error_feedback:
        state = state._replace(**unless(skip, averaging.feedback(got), kept))
    return mean, state
