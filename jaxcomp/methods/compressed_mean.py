"""The mean of updates over the replicas, with any compressor and error feedback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy
from jaxcomp.exchange import averaging, buckets
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods.common import method
from jaxcomp.replicas.finite import not_finite, poisoned, unless
from jaxcomp.replicas.protocol import MethodState


@MethodState.register
class CompressedMeanState(NamedTuple):
    """State of `compressed_mean`."""

    # i32[], updates so far; the source of all keys
    count: jax.Array  # type: ignore[assignment]
    # f32 leaves of the parameters' shapes, not sent yet; None for leaves sent in float32; ()
    # without error feedback.
    residual: Any
    # f32[numel / R] per bucket, not passed on yet; None for buckets without owners.
    owner_residual: Any


def compressed_mean(
    compressor: Compressor | Policy | Transport,
    axis_name: str,
    *,
    error_feedback: bool = True,
    exact: Callable[[str, Any], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Averages updates over the replicas, sending only the compressor's payload.

    Put it first in `optax.chain`, before the optimizer. It runs inside `jax.shard_map` with checked
    types: incoming updates vary over `axis_name`, outgoing updates do not. With error feedback
    nothing is lost for good: the mean over replicas of `residual`, plus `owner_residual`, plus
    all outgoing updates is the sum of the mean incoming updates. The exception are leaves below
    float32: the rounding of their updates is not fed back.

    If any replica's update is not finite, all replicas get NaN and no residual changes.
    `jaxcomp.train_step`, or `optax.apply_if_finite` around the optimizer that follows, then skips
    the step everywhere. Do not put `apply_if_finite` around this transformation: each replica would
    decide from its own gradients (JAX refuses to trace it).

    Sparse and 1-bit compressors train badly before Adam: their updates arrive in bursts, which
    inflate the second moment. Use them before momentum SGD, or take a method made for them.

    Args:
      compressor: Encodes buckets of flattened updates; or a policy `(path, leaf) -> Compressor`,
        for example from `jaxcomp.by_path`. It is sent by owners; for two replicas write
        `jaxcomp.gathered(compressor)`. Payloads of linear compressors are summed on the wire in any
        case.
      axis_name: Mesh axis to average over.
      error_feedback: Whether to add what was not sent to the next update, in both directions. Costs
        1 + 1/R float32 values per parameter. Unbiased compressors do not need it.
      exact: `(path, leaf) -> bool`, which leaves are sent in float32. Default: those with fewer
        than two axes, or fewer than 1,024 elements over all their shards.

    Returns:
      A `GradientTransformationExtraArgs`; updates keep their shapes, and get the dtypes of `params`
      if these are given. Wrap the whole chain in `jaxcomp.per_replica`; `train_step` does that for
      you.

    Raises:
      ValueError: At trace time, for an unknown axis, updates that are already reduced, a tree
        without leaves, or leaves that are not floating.

    References:
      Seide et al., `1-Bit Stochastic Gradient Descent
      <https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent>`_,
      2014; Karimireddy et al., `Error Feedback Fixes SignSGD <https://arxiv.org/abs/1901.09847>`_,
      2019, Algorithm 2, with a learning rate of 1: the residual is in units of the update.
    """
    exact = buckets.small_or_vector(axis_name) if exact is None else exact
    transport = averaging.but_exact(transport_of(compressor, axis_name), exact)

    def init_fn(params):
        residual, owner_residual = averaging.nothing_sent(transport, params)
        if not error_feedback:
            residual, owner_residual = jax.tree.map(lambda _: (), residual), None
        zero = jnp.zeros([], jnp.int32)
        return CompressedMeanState(count=zero, residual=residual, owner_residual=owner_residual)

    def update_fn(updates, state, params, **_):
        # All shards of a replica must agree, and an exact bucket of whole leaves must stay whole.
        bad = not_finite(updates, axis_name) > 0
        kept = averaging.feedback(state) if error_feedback else {}
        got = averaging.average(transport, updates, state.count, "", bad=bad, **kept)
        # A mean may be infinite although no gradient is: float16 scales end at 65,504.
        skip = not_finite(got.mean, flat=got.flat) > 0
        # optax's states have the parameters' dtypes; updates of another dtype would change them.
        like = updates if params is None else params
        mean = jax.tree.map(lambda m, x: m.astype(x.dtype), poisoned(skip, got.mean), like)
        state = state._replace(count=optax.safe_increment(state.count))
        if error_feedback:
            state = state._replace(**unless(skip, averaging.feedback(got), kept))
        return mean, state

    return method("compressed_mean", axis_name, init_fn, update_fn, needs_params=False)
