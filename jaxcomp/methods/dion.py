"""Dion: orthonormal low-rank steps along the mean momentum, which is sent as factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import is_count, require, require_decay, require_static, schedule_of
from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold
from jaxcomp.exchange import averaging, wire
from jaxcomp.methods import low_rank, moments
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.replicas.finite import not_finite, poisoned, unless
from jaxcomp.replicas.kinds import kind_of
from jaxcomp.replicas.layers import in_batches, layer_by_layer
from jaxcomp.replicas.protocol import MethodState, with_extra_args
from jaxcomp.replicas.types import to_varying, vary_like


@MethodState.register
class DionState(NamedTuple):
    """State of `dion`; None for leaves sent in float32."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    # f32 leaves of the parameters' shapes: this replica's momentum. Its mean is never sent whole.
    residual: Any
    right: Any  # f32[n, rank] for a matrix [m, n], equal on all replicas: columns of norm 1
    others: Any  # state of the optimizer of float32 leaves
    rounds: Any  # {"all", "left_factor", "right_factor"}: i32[], how often each was sent


def dion(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    *,
    rank: int,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    others: optax.GradientTransformation | None = None,
    exact: Callable[[str, Any], bool] | None = None,
    eps: float = 1e-8,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Dion: equal steps along the largest directions of the mean momentum, sent as factors.

    With M_i the momentum of replica i, and Q the right factor from the previous step, a step of a
    matrix [m, n] is

        M_i <- M_i + g_i,  P = orthogonal(mean_i M_i Q),  R = mean_i M_i.T P,
        M_i <- M_i - (1 - momentum) P R.T,  Q = the columns of R, of norm 1,
        params <- (1 - rate weight_decay) params - rate sqrt(n / m) P Q.T.

    The update is linear in M_i, so their mean acts like the momentum of one replica with all data.
    What the factors miss stays in the momentum; there is no other residual.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`; 0.01 in the paper, for all
        widths.
      axis_name: Mesh axis of the replicas.
      rank: Columns of the factors, at least 1; at most the smaller side of a matrix is used. In the
        paper a quarter of the width costs little loss, and larger models need a smaller share.
      momentum: Decay of the momentum along the directions of the step, in [0, 1).
      weight_decay: Weight decay of the matrices, decoupled; multiplied by the learning rate.
      others: Optimizer of the leaves sent in float32; it gets their mean gradient. Default:
        `optax.adamw(learning_rate, weight_decay=weight_decay)`; for its `b2` see `jaxcomp.muon`.
      exact: `(path, leaf) -> bool`, which leaves are sent in float32. Default: all but the matrices
        of `jaxcomp.leaf_kinds`, so embeddings, heads and vectors. Stacked layers would be one
        matrix: wrap the optimizer in `jaxcomp.per_layer`, which makes them a batch.
      eps: Added to the norms of columns.
      seed: Seed of the first factors; equal on all replicas.

    Returns:
      A `GradientTransformationExtraArgs` that keeps one float32 per parameter, the factors, and the
      state of `others`. A gradient that is not finite makes the update NaN on all replicas and
      changes no state. Matrices must be whole on each device, as shards would have their own
      factors.

    Raises:
      ValueError: At construction for arguments out of range; at trace time without `params`, for an
        unknown axis, gradients that are already reduced, or leaves that are not floating.

    Examples:
      >>> import jaxcomp
      >>> tx = jaxcomp.dion(1e-2, "replica", rank=16)

    References:
      K. Ahn et al., `Dion: Distributed Orthonormalized Updates
      <https://arxiv.org/abs/2504.05295>`_, 2025, and the form of its code. Deviations: n is a
      layer's output, the last axis in JAX, and more than two axes are cut where m + n is least;
      factors are made orthogonal by Cholesky QR; the first Q is noise; a
      column of R that holds only rounding errors, as where the rank of M is below `rank`, takes
      no step, and keeps its column of Q.
    """
    name = "dion"
    require_static(name, rank=rank, momentum=momentum, weight_decay=weight_decay, eps=eps)
    require(is_count(rank), name, "at least 1, as an integer", "rank=16", rank=rank)
    require(0 <= momentum < 1, name, "[0, 1)", "momentum=0.95", momentum=momentum)
    require_decay(name, weight_decay)
    rate = schedule_of(name, learning_rate)
    if others is None:
        others = optax.adamw(learning_rate, weight_decay=weight_decay)
    exact = exact or (lambda path, leaf: kind_of(path, leaf) != "matrix")
    transport = wire.transport_of(wire.summed(averaging.EXACT, seed=seed), axis_name)
    others = layer_by_layer(with_extra_args(others, name))
    key = lambda: Key(jnp.int32(0), jnp.uint32(seed))

    def init_fn(params):
        leaves, treedef = jax.tree.flatten(params)
        residual: list[Any] = [None] * len(leaves)
        right, shapes = list(residual), low_rank.shapes_of(params, exact)
        for i, (leaf, shape) in enumerate(zip(leaves, shapes, strict=True)):
            dtype = moments.wide(leaf.dtype)  # raises for leaves that are not floating
            if shape is None:
                continue
            first = low_rank.drawn_for(key(), params, i, shape[1], min(rank, *shape))
            right[i] = vary_like(low_rank.normalized(first.astype(dtype))[0], leaf)
            residual[i] = to_varying(moments.zeros(leaf), axis_name)
        return DionState(
            count=jnp.zeros([], jnp.int32),
            residual=treedef.unflatten(residual),
            right=treedef.unflatten(right),
            others=others.init(_exact(shapes, params)),
            rounds=no_rounds("left_factor", "right_factor"),
        )

    def update_fn(updates, state, params, **extra_args):
        leaves, treedef = jax.tree.flatten(params)
        shapes = low_rank.shapes_of(params, exact)  # before the state is read: layers may differ
        grads = treedef.flatten_up_to(updates)
        momenta = treedef.flatten_up_to(state.residual)
        rights = treedef.flatten_up_to(state.right)
        groups = low_rank.batches(leaves, shapes)
        # For each batch of matrices: the momenta with this step's gradients, and the factors.
        moved = lambda i: momenta[i] + grads[i].astype(momenta[i].dtype)
        matrices = [low_rank.batched(map(moved, group), shapes[group[0]]) for group in groups]
        held = [low_rank.batched([rights[i] for i in group]) for group in groups]

        bad = not_finite(updates, axis_name) > 0
        own = list(map(low_rank.product, matrices, held))
        small = _exact(shapes, jax.tree.map(moments.to_moment_dtype, updates))
        got = averaging.average(transport, (own, small), state.count, "left_factor", bad=bad)
        factors, small = got.mean
        noise = [fold(key(), state.count, number) for number in range(len(factors))]
        lefts = list(map(low_rank.orthogonal, factors, noise))
        own = list(map(low_rank.product, map(low_rank.transposed, matrices), lefts))
        if own:
            own = averaging.average(transport, own, state.count, "right_factor").mean

        change, others_state = others.update(
            small, state.others, _exact(shapes, params), **extra_args
        )
        changes = treedef.flatten_up_to(change)
        for group, matrix, left, right, was in zip(groups, matrices, lefts, own, held, strict=True):
            found = _stepped(momentum, eps, matrix, left, right, was)
            layers = [rights[i].shape[:-2] for i in group]
            parts = (low_rank.parted(x, layers) for x in found)
            for i, along, q, rest in zip(group, *parts, strict=True):
                momenta[i], rights[i] = rest.reshape(leaves[i].shape), q
                decay = weight_decay * leaves[i].astype(along.dtype)
                changes[i] = -rate(state.count) * (along.reshape(leaves[i].shape) + decay)
        skip = got.failed | (not_finite(changes) > 0)
        new = [m.astype(x.dtype) for m, x in zip(poisoned(skip, changes), leaves, strict=True)]
        residual = unless(skip, treedef.unflatten(momenta), state.residual)
        return treedef.unflatten(new), DionState(
            count=optax.safe_increment(state.count),
            residual=residual,
            right=unless(skip, treedef.unflatten(rights), state.right),
            others=unless(skip, others_state, state.others),
            rounds=counted(state.rounds, all=True, left_factor=True, right_factor=True),
        )

    return in_batches(method(name, axis_name, init_fn, update_fn))


def _stepped(momentum, eps, matrix, p, r, held):
    """For a batch of momenta: the direction of the step, the next factor, and the rest."""
    left = matrix - (1 - momentum) * low_rank.product(p, low_rank.transposed(r))
    q, length = low_rank.normalized(r)
    # P has as many columns as the factor, whatever the rank of M: the others catch rounding errors.
    # The longest is the last of running maxima: to the check for norms of shards, one reduction of
    # a whole shard is a norm that scales it, and this only tells columns from rounding errors.
    longest = lax.cummax(length, axis=2)[..., -1:]
    error = 32 * jnp.finfo(r.dtype).eps * longest
    caught = length > error
    along = jnp.where(caught, q * (length / (length + eps)), 0)
    scale = math.sqrt(matrix.shape[2] / matrix.shape[1])
    step = scale * low_rank.product(p, low_rank.transposed(along))
    return step, jnp.where(caught, q, held), left


def _exact(shapes, tree):
    """The tree without the leaves that are sent as factors."""
    leaves, treedef = jax.tree.flatten(tree)
    rows = zip(leaves, shapes, strict=True)
    return treedef.unflatten([x if shape is None else optax.MaskedNode() for x, shape in rows])
