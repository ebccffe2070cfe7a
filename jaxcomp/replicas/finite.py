"""What is not finite: the one rule for it, of methods and of steps.

Each replica asks `not_finite` of its own gradient, over all its shards. Then there are two ways:

- Replicas that keep equal parameters leave a step out together. One message of the one whose
  gradient fails is NaN (`poisoned`), and so is the method's update on all of them; the step that
  gets such an update keeps parameters and state. The other messages need not wait for this one.
- Replicas with a drift go on. The one whose gradient fails stands still (`unless`), and counts
  that in its state's field `skipped`. Who sends a leaf before it has the next one's gradient, as
  `slamb` and `zero_one_adam` do, asks each leaf by itself (`failing`), and stands still in those
  that fail.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.replicas.types import largest


def finite(tree: Any) -> jax.Array:
    """bool[], whether everything in a tree is finite, or what is on this device of it."""
    bad = jnp.array(jax.tree.leaves(failing(tree)), bool)
    # Without the barrier XLA makes a chain of ors, and repeats it in the update of every leaf.
    return ~jnp.any(lax.optimization_barrier(bad))


def failing(tree: Any) -> Any:
    """For each leaf bool[], whether something in it, or in this device's part, is not finite."""
    return jax.tree.map(lambda x: ~jnp.all(jnp.isfinite(x)), tree)


def any_of(bad: Any, *but: str) -> jax.Array:
    """i32[], 1 if a leaf of a tree of bool[] holds; equal over all mesh axes `but` these."""
    return largest(jnp.array(jax.tree.leaves(bad), jnp.int32).max(initial=0), *but)


def not_finite(tree: Any, *but: str) -> jax.Array:
    """i32[], 1 if anything in a tree is NaN or infinite; equal over all mesh axes `but` these."""
    return largest((~finite(tree)).astype(jnp.int32), *but)


def poisoned(bad: jax.Array, tree: Any) -> Any:
    """The tree, all of it NaN where `bad`: so is what it is averaged with."""
    return jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), tree)


def unless(bad: Any, new: Any, old: Any) -> Any:
    """The tree `new`, and `old` where `bad`: bool[] for all, or a tree of them, as of leaves."""
    chosen = lambda bad, new, old: jax.tree.map(lambda n, o: jnp.where(bad, o, n), new, old)
    return jax.tree.map(chosen, bad, new, old)
