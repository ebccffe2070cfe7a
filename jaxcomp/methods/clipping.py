"""Clipping by the norm of the whole gradient, over all its shards."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import require
from jaxcomp.replicas.protocol import widened
from jaxcomp.replicas.types import is_tracked, varying_axes


def clip_by_global_norm(max_norm: jax.typing.ArrayLike) -> optax.GradientTransformationExtraArgs:
    """Scales updates down to a norm of at most `max_norm`, over all shards of all leaves.

    Inside `jax.shard_map`, `optax.clip_by_global_norm` sees only local shards. This one reads from
    JAX's types which leaves are sharded: their squares are summed over the shards, other leaves
    count once, and all shards are scaled alike. Without sharded leaves the two are the same.

    The place in the chain decides what is clipped. After `compressed_mean`, it clips the mean of
    the replicas' updates, as in training on one device; no residual keeps what is cut off. Before
    it, or in the inner optimizer of `cocktail_sgd`, it clips each replica's own update by its own
    norm. `compressed_mean` adds its residual later, so the mean is not bounded.

    Args:
      max_norm: Greatest norm of the resulting updates, positive.

    Returns:
      A `GradientTransformationExtraArgs` without state; updates keep shapes, dtypes and types.
      Sends one float32 for each set of axes that shard leaves, and nothing over the replica axis.
      `train_step` passes the name of that axis as the extra argument `axis_name`; without it the
      norm is summed over all axes that a leaf varies over.

    Raises:
      ValueError: At construction, if `max_norm` is a number that is not positive; at trace time,
        if `shard_map` was told not to check types.

    References:
      Pascanu et al., `On the difficulty of training Recurrent Neural Networks
      <https://arxiv.org/abs/1211.5063>`_, 2012, Algorithm 1.
    """
    holds, name = not isinstance(max_norm, numbers.Real) or max_norm > 0, "clip_by_global_norm"
    require(holds, name, "a positive number", f"{name}(1.0), or leave it out", max_norm=max_norm)

    def init_fn(params):
        del params
        return optax.EmptyState()

    def update_fn(updates, state, params=None, *, axis_name=None, **extra_args):
        del params, extra_args
        norm = _global_norm(updates, axis_name)

        def clip(x):
            wide = widened(x)  # a norm may be beyond the range of float16
            scaled = wide / norm.astype(wide.dtype) * jnp.asarray(max_norm, wide.dtype)
            return jnp.where(norm < max_norm, x, scaled.astype(x.dtype))

        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _global_norm(updates: Any, axis_name: str | None) -> jax.Array:
    """The norm over all axes except `axis_name`, `f32[]`; one message for leaves sharded alike."""
    for name in jax.sharding.get_abstract_mesh().manual_axes:
        is_tracked(name)  # with unchecked types nothing would seem sharded
    squares: dict[tuple[str, ...], jax.Array] = {}
    for x in jax.tree.leaves(updates):
        axes = tuple(sorted(varying_axes(x) - {axis_name}))
        squares[axes] = squares.get(axes, 0.0) + jnp.sum(jnp.square(jnp.abs(widened(x))))
    totals = [lax.psum(square, axes) if axes else square for axes, square in squares.items()]
    return jnp.sqrt(jnp.asarray(sum(totals), jnp.result_type(jnp.float32, *totals)))
