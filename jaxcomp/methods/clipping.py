"""Clipping by the norm of a whole gradient, wherever its shards are."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.replicas.types import is_tracked, varying_axes


def clip_by_global_norm(max_norm: jax.typing.ArrayLike) -> optax.GradientTransformationExtraArgs:
    """Scales updates down to a norm of at most `max_norm`, that of all shards of all leaves.

    `optax.clip_by_global_norm` sees, inside `jax.shard_map`, the local shards alone. Here JAX's
    types say which leaves vary over which axes: those are summed over their shards, the others
    count once, and all shards are scaled alike. Without sharded leaves the two are the same.

    What is clipped depends on the place in the chain. After `compressed_mean`: the mean of the
    replicas' updates, as in training on one device; what is cut off is gone, no residual takes
    it. Before it, or in the inner optimizer of `cocktail_sgd`: each replica's own update, by its
    own norm; `compressed_mean` adds its residual later, so that the mean is not bounded.

    Args:
      max_norm: Greatest norm of the updates that come out, positive.

    Returns:
      A `GradientTransformationExtraArgs` without state; updates keep shapes, dtypes and types.
      Sends a float32 for each set of axes that shard leaves, and nothing over the axis of the
      replicas. Its `update` reads that from the extra argument `axis_name`, which `train_step`
      passes; without it the norm is summed over all axes that a leaf varies over.

    Raises:
      ValueError: At construction, if `max_norm` is a number that is not positive; at trace time,
        if `shard_map` was told not to check types.

    References:
      Pascanu et al., `On the difficulty of training Recurrent Neural Networks
      <https://arxiv.org/abs/1211.5063>`_, 2012, Algorithm 1.
    """
    if isinstance(max_norm, numbers.Real) and not max_norm > 0:
        raise ValueError(
            f"clip_by_global_norm got max_norm={max_norm}; needs a positive number; write "
            "clip_by_global_norm(1.0), or leave it out."
        )

    def update(updates, state, params=None, *, axis_name=None, **extra_args):
        del params, extra_args
        norm = _global_norm(updates, axis_name)

        def clip(x):
            scaled = x / norm.astype(x.dtype) * jnp.asarray(max_norm, x.dtype)
            return jnp.where(norm < max_norm, x, scaled)

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _global_norm(updates: Any, axis_name: str | None) -> jax.Array:
    """The norm over all axes but `axis_name`, `f32[]`; of leaves sharded alike in one message."""
    for name in jax.sharding.get_abstract_mesh().manual_axes:
        is_tracked(name)  # unchecked types would say that nothing is sharded
    squares: dict[tuple[str, ...], jax.Array] = {}
    for x in jax.tree.leaves(updates):
        axes = tuple(sorted(varying_axes(x) - {axis_name}))
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares[axes] = squares.get(axes, 0.0) + jnp.sum(jnp.square(wide))
    totals = [lax.psum(square, axes) if axes else square for axes, square in squares.items()]
    return jnp.sqrt(jnp.asarray(sum(totals), jnp.result_type(jnp.float32, *totals)))
