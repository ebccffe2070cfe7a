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

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.replicas.types import largest


def finite(tree: Any) -> jax.Array:
    """bool[], whether this device's part of a tree is finite."""
    bad = jnp.array(jax.tree.leaves(failing(tree)), bool)
    # Without the barrier XLA builds a chain of ors, and repeats it in the update of every leaf.
    return ~jnp.any(lax.optimization_barrier(bad))


def failing(tree: Any) -> Any:
    """bool[] for each leaf, whether this device's part of it is not finite anywhere."""
    return jax.tree.map(lambda x: ~jnp.all(jnp.isfinite(x)), tree)


def any_of(bad: Any, *but: str) -> jax.Array:
    """i32[], 1 if any leaf of a tree of bool[] is true; equal over all mesh axes except `but`."""
    return largest(jnp.array(jax.tree.leaves(bad), jnp.int32).max(initial=0), *but)


def not_finite(tree: Any, *but: str) -> jax.Array:
    """i32[], 1 if a tree has a NaN or infinity; equal over all mesh axes except `but`."""
    return largest((~finite(tree)).astype(jnp.int32), *but)


def poisoned(bad: jax.Array, tree: Any) -> Any:
    """The tree, or NaN everywhere if `bad`, which makes the average NaN too."""
    return jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), tree)


def unless(bad: Any, new: Any, old: Any) -> Any:
    """The tree `new`, or `old` where `bad`: one bool[] for all leaves, or a tree of them."""
    chosen = lambda bad, new, old: jax.tree.map(lambda n, o: jnp.where(bad, o, n), new, old)
    return jax.tree.map(chosen, bad, new, old)
