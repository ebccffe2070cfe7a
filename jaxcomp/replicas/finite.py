"""Gradients that are not finite: one rule for all methods and steps.

Each replica checks its own gradient with `not_finite`, over all its shards. There are two cases:

- Replicas with equal parameters skip a step together. The failing replica makes one of its messages
  NaN (`poisoned`), so the method's update is NaN on all replicas, and the step keeps parameters and
  state. The other messages need not wait for this one.
- Replicas with a drift go on. The failing replica keeps its parameters (`unless`), and counts the
  step in its state's field `skipped`. Methods that send a leaf before the next leaf's gradient is
  known, `slamb` and `zero_one_adam`, check each leaf separately (`failing`), and keep those that
  fail.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.platforms import by_platform
from jaxcomp.replicas.layers import broadcast_over, own_axes
from jaxcomp.replicas.types import any_over_shards, largest

_LONG = 2**16  # most entries of a vector whose checks are kept until all are known


def finite(tree: Any, flat: list[jax.Array] | None = None) -> jax.Array:
    """bool[], whether this device's part of a tree is finite.

    Args:
      tree: The arrays.
      flat: The same numbers in few arrays, of which the tree's leaves are slices. CPUs check these:
        XLA would compile a kernel for each slice.
    """
    leaves = jax.tree.leaves(tree)
    return by_platform(
        leaves,
        leaves if flat is None else flat,
        cpu=lambda _, flat: finite_by_leaf(flat),
        gpu=lambda leaves, _: finite_by_row(leaves),
        default=lambda leaves, _: finite_by_leaf(leaves),
    )


def finite_by_leaf(leaves: list[jax.Array]) -> jax.Array:
    """`finite` from one value for each array."""
    bad = jnp.array(_failing(leaves), bool)
    # Without the barrier XLA builds a chain of ors, and repeats it in the update of every leaf.
    return ~jnp.any(lax.optimization_barrier(bad))


def finite_by_row(leaves: list[jax.Array]) -> jax.Array:
    """`finite` from one value for each row of a matrix and each entry of a short vector.

    On a GPU one value for each array would need two kernels for a matrix, and one for a vector.
    """
    parts = jnp.concatenate([jnp.ones(1, bool), *map(_finite_rows, leaves)])
    # Without the inner barrier XLA would reduce each part to one value.
    return lax.optimization_barrier(jnp.all(lax.optimization_barrier(parts)))


def _finite_rows(x):
    if x.ndim > 1 or x.size > _LONG:
        return jnp.all(jnp.isfinite(x), axis=-1).reshape(-1)
    return jnp.isfinite(x).reshape(-1)


def failing(tree: Any, *but: str) -> Any:
    """For each leaf whether it is not finite anywhere; each layer of a stack.

    Leaves are bool[], and bool[layers] in a `Stacked` node; equal over all mesh axes except `but`,
    so that a leaf's shards are kept or moved together.
    """
    bad = any_over_shards(_failing(tree), *but)
    return jax.tree.unflatten(jax.tree.structure(tree), bad)


def _failing(tree):
    """`failing` of this device's part of each leaf, a list."""
    fails = lambda x, axes: ~jnp.all(jnp.isfinite(x), axis=axes)
    return list(map(fails, jax.tree.leaves(tree), own_axes(tree)))


def any_of(bad: Any) -> jax.Array:
    """i32[], 1 if anything in a tree of bool is true."""
    one_each = [jnp.any(x) for x in jax.tree.leaves(bad)]
    return jnp.array(one_each, jnp.int32).max(initial=0)


def not_finite(tree: Any, *but: str, flat: list[jax.Array] | None = None) -> jax.Array:
    """i32[], 1 if a tree has a NaN or infinity; equal over all mesh axes except `but`.

    `flat` has the same numbers in few arrays, see `finite`.
    """
    return largest((~finite(tree, flat)).astype(jnp.int32), *but)


def poisoned(bad: jax.Array, tree: Any) -> Any:
    """The tree, or NaN everywhere if `bad`, which makes the average NaN too."""
    return jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), tree)


def unless(bad: Any, new: Any, old: Any) -> Any:
    """The tree `new`, or `old` where `bad`: one bool[] for all leaves, or a tree of them."""
    chosen_leaf = lambda bad, n, o: jnp.where(broadcast_over(bad, n), o, n)
    chosen = lambda bad, new, old: jax.tree.map(functools.partial(chosen_leaf, bad), new, old)
    return jax.tree.map(chosen, bad, new, old)
