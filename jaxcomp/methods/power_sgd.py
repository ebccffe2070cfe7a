"""PowerSGD: averages gradients as low-rank factors, which are summed on the wire."""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import is_count, require
from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold
from jaxcomp.exchange import averaging, wire
from jaxcomp.methods import low_rank, moments
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.replicas.finite import not_finite, poisoned, unless
from jaxcomp.replicas.layers import in_batches
from jaxcomp.replicas.protocol import MethodState
from jaxcomp.replicas.types import to_varying, vary_like


@MethodState.register
class PowerSGDState(NamedTuple):
    """State of `power_sgd`; None for leaves sent in float32."""

    # i32[], updates so far
    count: jax.Array  # type: ignore[assignment]
    residual: Any  # f32 leaves of the parameters' shapes: what this replica has not sent yet
    left: Any  # f32[m, rank] for a matrix [m, n], equal on all replicas: the last mean M @ right
    right: Any  # f32[n, rank], the last mean M.T @ left
    # {"all", "warmup", "left_factor", "right_factor"}: i32[], how often each was sent
    rounds: Any


def power_sgd(
    rank: int,
    axis_name: str,
    *,
    warmup_steps: int = 100,
    least: float = 2.0,
    sides: Literal["alternating", "both"] = "alternating",
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Averages updates over the replicas as products of two thin matrices, with error feedback.

    Put it first in `optax.chain`, like `compressed_mean`. With M_i the update of replica i plus its
    residual e_i, and Q the orthogonalized factor from the previous step, one step is

        P = mean_i M_i Q,  e_i <- M_i - (M_i Q) Q.T,  update = P Q.T,

    and the next one does the same with P in place of Q and M_i.T in place of M_i. The factors are
    sent in one float32 all-reduce, with all leaves that are not compressed: bytes and time do not
    grow with the number of replicas. Over any number of steps the outgoing updates, plus the mean
    of e_i, are the mean incoming updates.

    Args:
      rank: Columns of the factors, at least 1; at most the smaller side of a matrix is used. 1 to 4
        in the paper.
      axis_name: Mesh axis to average over.
      warmup_steps: First steps, which send updates in float32.
      least: A leaf [m, n] of fewer than `least * rank * (m + n)` elements is sent in float32, and
        so are leaves with fewer than two axes. More axes are cut where m + n is least. Stacked
        layers would be one matrix: wrap the chain in `jaxcomp.per_layer`, which makes them a batch.
      sides: "alternating" sends one factor per step, rank * (m + n) / 2 values on average; "both"
        sends both in two all-reduces, the second computed from the first.
      seed: Seed of the first factors; equal on all replicas.

    Returns:
      A `GradientTransformationExtraArgs`; updates get the dtypes of `params` if these are given. If
      any replica's update is not finite, all get NaN and the state does not change. It keeps one
      float32 residual per parameter.

    Raises:
      ValueError: At construction for arguments out of range; at trace time for an unknown axis,
        updates that are already reduced, or leaves that are not floating.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> tx = optax.chain(jaxcomp.power_sgd(4, "replica"), optax.sgd(0.1, momentum=0.9))

    References:
      T. Vogels et al., `PowerSGD: Practical Low-Rank Gradient Compression for Distributed
      Optimization <https://arxiv.org/abs/1905.13727>`_, NeurIPS 2019, algorithms 1 and 2, for
      "both". The authors' later code alternates, and so do L. Zhang et al., `Evaluation and
      Optimization of Gradient Compression for Distributed Deep Learning
      <https://arxiv.org/abs/2306.08881>`_, 2023. Deviations: factors are orthogonalized just before
      use, by Cholesky QR; the paper always cuts behind the first axis.
    """
    name = "power_sgd"
    require(is_count(rank), name, "at least 1, as an integer", "rank=4", rank=rank)
    require(warmup_steps >= 0, name, "at least 0", "warmup_steps=100", warmup_steps=warmup_steps)
    require(least > 0, name, "more than 0", "least=2.0", least=least)
    known = sides in ("alternating", "both")
    require(known, name, "a known form", "'alternating' or 'both'", sides=sides)
    transport = wire.transport_of(wire.summed(averaging.EXACT, seed=seed), axis_name)

    def exact(_, leaf):
        return leaf.size < least * rank * sum(low_rank.sides(leaf.shape))

    def init_fn(params):
        leaves, treedef = jax.tree.flatten(params)
        residual: list[Any] = [None] * len(leaves)
        left, right = list(residual), list(residual)
        shapes = low_rank.shapes_of(params, exact)
        key = Key(jnp.int32(0), jnp.uint32(seed))
        for i, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
            dtype = moments.wide(leaf.dtype)  # raises for leaves that are not floating
            if shape is None:
                continue
            noise = low_rank.drawn_for(key, params, i, shape[1], min(rank, *shape))
            residual[i] = to_varying(moments.zeros(leaf), axis_name)
            zeros = jnp.zeros((*noise.shape[:-2], shape[0], noise.shape[-1]), dtype)
            left[i] = vary_like(zeros, leaf)
            right[i] = vary_like(noise.astype(dtype), leaf)
        return PowerSGDState(
            count=jnp.zeros([], jnp.int32),
            residual=treedef.unflatten(residual),
            left=treedef.unflatten(left),
            right=treedef.unflatten(right),
            rounds=no_rounds("warmup", "left_factor", "right_factor"),
        )

    def update_fn(updates, state, params, **_):
        leaves, treedef = jax.tree.flatten(updates)
        columns = [
            treedef.flatten_up_to(tree) for tree in (state.residual, state.left, state.right)
        ]
        bad = not_finite(updates, axis_name) > 0
        send = lambda tree, part: averaging.average(transport, tree, state.count, part, bad=bad)
        shapes = low_rank.shapes_of(updates, exact)
        dense, left, right, both = _forms(send, shapes, Key(state.count, jnp.uint32(seed)))
        forms = [dense, left, right] if sides == "alternating" else [dense, both, both]
        # The parts depend on the count alone: `train` plans them on another tree.
        is_warm, is_left = state.count < warmup_steps, state.count % 2 == 0
        form = jnp.where(is_warm, 0, jnp.where(is_left, 1, 2))
        mean, new, failed = lax.switch(form, forms, leaves, *columns)
        skip = failed | (not_finite(mean) > 0)
        # optax's states have the parameters' dtypes; updates of another dtype would change them.
        like = leaves if params is None else jax.tree.leaves(params)
        mean = [m.astype(x.dtype) for m, x in zip(poisoned(skip, mean), like, strict=True)]
        due = {"left_factor": is_left, "right_factor": ~is_left}
        sent = {part: ~is_warm & (due[part] | (sides == "both")) for part in due}
        residuals, lefts, rights = unless(skip, new, columns)
        return treedef.unflatten(mean), PowerSGDState(
            count=optax.safe_increment(state.count),
            residual=treedef.unflatten(residuals),
            left=treedef.unflatten(lefts),
            right=treedef.unflatten(rights),
            rounds=counted(state.rounds, all=True, warmup=is_warm, **sent),
        )

    return in_batches(method(name, axis_name, init_fn, update_fn, needs_params=False))


def _forms(send, shapes, key):
    """The forms of a step: `(leaves, residuals, lefts, rights) -> (means, the last three, bool[])`.

    Args:
      send: `(tree, part) -> Averaged`.
      shapes: Rows and columns of each leaf; None for those sent in float32.
      key: Of noise that makes columns independent.
    """
    factor = functools.partial(_factor, send, shapes, key)

    def exact(leaves):
        return [x if shape is None else None for x, shape in zip(leaves, shapes, strict=True)]

    def dense(leaves, residuals, lefts, rights):
        got = send(leaves, "warmup")
        return got.mean, [residuals, lefts, rights], got.failed

    def left(leaves, residuals, lefts, rights):
        """The left factor, from the right one."""
        mean, residuals, lefts, failed = factor(
            "left_factor", leaves, residuals, rights, exact(leaves)
        )
        return mean, [residuals, lefts, rights], failed

    def right(leaves, residuals, lefts, rights):
        """The right factor, from the left one: the same with transposed matrices."""
        mean, residuals, rights, failed = factor(
            "right_factor", leaves, residuals, lefts, exact(leaves)
        )
        return mean, [residuals, lefts, rights], failed

    def both(leaves, residuals, lefts, rights):
        """The left factor, then the right one from it."""
        small, (_, lefts, _), failed = left(leaves, residuals, lefts, rights)
        if not any(shapes):  # all was sent in float32
            return small, [residuals, lefts, rights], failed
        nothing = [None] * len(leaves)
        mean, residuals, rights, _ = factor("right_factor", leaves, residuals, lefts, nothing)
        mean = [e if m is None else m for e, m in zip(small, mean, strict=True)]
        return mean, [residuals, lefts, rights], failed

    return dense, left, right, both


def _factor(send, shapes, key, part, leaves, residuals, held, exact):
    """One factor of each matrix from the other: `(means, residuals, factors, bool[])`.

    Matrices of equal shapes are batched. Float32 leaves are in the same message.
    """
    groups = low_rank.batches(leaves, shapes)
    matrices, others, own = [], [], []
    for number, group in enumerate(groups):
        totals = [moments.to_moment_dtype(leaves[i]) + residuals[i] for i in group]
        matrices.append(low_rank.batched(totals, shapes[group[0]]))
        noise = fold(key, key.count, number)
        others.append(low_rank.orthogonal(low_rank.batched([held[i] for i in group]), noise))
        on_left = matrices[-1] if part == "left_factor" else low_rank.transposed(matrices[-1])
        own.append(low_rank.product(on_left, others[-1]))
    got = send((own, exact), part)
    factors, means = got.mean
    left: list[Any] = [None] * len(leaves)
    means, new = list(means), list(left)
    for group, matrix, other, sent, factor in zip(
        groups, matrices, others, own, factors, strict=True
    ):
        # The matrix itself is not transposed, whichever factor is sent.
        both = lambda x, other=other: (x, other) if part == "left_factor" else (other, x)
        mean = low_rank.outer(*both(factor))
        lost = matrix - low_rank.outer(*both(sent))
        layers = [held[i].shape[:-2] for i in group]
        parts = (low_rank.parted(x, layers) for x in (mean, lost, factor))
        for i, mean_of, lost_of, factor_of in zip(group, *parts, strict=True):
            means[i], left[i] = (x.reshape(leaves[i].shape) for x in (mean_of, lost_of))
            new[i] = factor_of
    return means, left, new, got.failed
