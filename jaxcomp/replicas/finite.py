"""What is not finite: the one rule for it, of methods and of steps.

Each replica asks `not_finite` of its own gradient, over all its shards. Then there are two ways:

- Replicas that keep equal parameters leave a step out together. The method makes the update NaN on
  all of them (`poisoned`), and the step that gets such an update keeps parameters and state.
- Replicas with a drift go on. The one whose gradient fails stands still (`unless`), and counts
  that in its state's field `skipped`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.replicas.types import largest


def finite(tree: Any) -> jax.Array:
    """bool[], whether everything in a tree is finite, or what is on this device of it."""
    good = jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)], bool)
    # Without the barrier XLA makes a chain of ands, and repeats it in the update of every leaf.
    return jnp.all(lax.optimization_barrier(good))


def not_finite(tree: Any, *but: str) -> jax.Array:
    """i32[], 1 if anything in a tree is NaN or infinite; equal over all mesh axes `but` these."""
    return largest((~finite(tree)).astype(jnp.int32), *but)


def poisoned(bad: jax.Array, tree: Any) -> Any:
    """The tree, all of it NaN where `bad`: so is what it is averaged with."""
    return jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), tree)


def unless(bad: jax.Array, new: Any, old: Any) -> Any:
    """The tree `new`, and `old` where `bad`."""
    return jax.tree.map(lambda new, old: jnp.where(bad, old, new), new, old)
