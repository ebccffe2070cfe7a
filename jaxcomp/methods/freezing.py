"""When a 1-bit method freezes its variance: after some steps, or when it is stable."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.methods.common import require
from jaxcomp.methods.moments import dtype_of
from jaxcomp.replicas.types import sums_over_shards


class Freeze(NamedTuple):
    """When a 1-bit method freezes its variance."""

    step: int | None  # after this many steps; None: when it is stable
    ratio: float  # stable when the norm `norms.size` steps ago is this share of today's

    def holds(self, state: Any) -> jax.Array:
        """bool[], whether the variance is frozen in the step after a state."""
        return state.frozen if self.step is None else state.count >= self.step

    def no_norms(self, b2: float, like: Any) -> jax.Array | None:
        """The norms before the first step, see `after`; None with a given `step`."""
        return jnp.zeros(round(1 / (1 - b2)), dtype_of(like)) if self.step is None else None

    def after(self, frozen: jax.Array, state: Any, variance: Any):
        """Whether the next step is frozen, and the norms that decide on the step after it.

        Args:
          frozen: bool[], whether this step was.
          state: Has `norms`, the l1 norms of the last steps or None with a given `step`, and
            `count`.
          variance: Tree, equal on all replicas, after this step.
        """
        if self.step is not None:
            return state.count + 1 >= self.step, None
        norm = sum(sums_over_shards([jnp.sum(v) for v in jax.tree.leaves(variance)]))
        place = state.count % state.norms.size
        stable = (state.count >= state.norms.size) & (state.norms[place] >= self.ratio * norm)
        return frozen | stable, state.norms.at[place].set(norm)


def freeze(name: str, freeze_step: int | None, freeze_ratio: float) -> Freeze:
    """Makes the `Freeze` of a method; a ValueError for arguments that are out of range."""
    least = freeze_step is None or freeze_step >= 1
    write = "a sixth of the steps, or None to find it"
    require(least, name, "at least 1", write, freeze_step=freeze_step)
    ratio = {"freeze_ratio": freeze_ratio}
    require(0 < freeze_ratio < 1, name, "(0, 1)", "freeze_ratio=0.96", **ratio)
    return Freeze(freeze_step, freeze_ratio)
