"""What 1-bit methods share: the phases of 1-bit Adam and 1-bit LAMB, and a default code."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from optax.tree_utils import tree_update_moment

from jaxcomp._checks import require
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.sign import sign
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport
from jaxcomp.methods import moments
from jaxcomp.methods.step_bound import bounded, kept_back, sendable
from jaxcomp.replicas.finite import not_finite, unless
from jaxcomp.replicas.kinds import kind_of
from jaxcomp.replicas.types import sums_over_shards


class Freeze(NamedTuple):
    """When the first phase ends: after some steps, or when the variance is stable."""

    step: int | None  # after this many steps; None: when it is stable
    ratio: float  # stable when the norm `norms.size` steps ago is this share of today's

    def holds(self, state: Any) -> jax.Array:
        """bool[], whether the variance is frozen in the step after a state."""
        return state.frozen if self.step is None else state.count >= self.step

    def no_norms(self, b2: float, like: Any) -> jax.Array | None:
        """The norms before the first step, see `after`; None with a given `step`."""
        return jnp.zeros(round(1 / (1 - b2)), moments.dtype_of(like)) if self.step is None else None

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


def check(name: str, deviations: moments.Deviations | None) -> None:
    """Raises a ValueError for deviations that a method without rare variances does not have."""
    for field in ("fresh_variance", "weigh_steps", "mean_momentum"):
        has = deviations is None or getattr(deviations, field)
        require(has, name, "True", f"{field}=False to zero_one_adam alone", **{field: False})


class Phase(NamedTuple):
    """What a step of either phase has exchanged; trees are equal on all replicas."""

    mean: Any  # the mean gradient, or after the warm-up the mean momentum in its units
    momentum: Any
    residual: Any  # not sent yet, this replica's own
    owner_residual: Any
    failed: jax.Array  # bool[], whether any replica's gradient is not finite


def exchanged(
    adam: moments.Adam,
    transport: Transport,
    frozen: jax.Array,
    state: Any,
    updates: Any,
    root: Any,
    unit: Any,
) -> Phase:
    """Averages gradients exactly until the variance is frozen, then compressed momenta.

    Args:
      adam: The constants.
      transport: How momenta are exchanged.
      frozen: bool[], whether the warm-up has ended.
      state: Has `count`, `momentum`, `variance` and both residuals.
      updates: This replica's gradients.
      root: D of the frozen variance, for the step's bound.
      unit: What momenta are divided by while they are sent; None: they are sent as they are.
    """
    count, axis_name = state.count + 1, transport.axis_name
    grads = jax.tree.map(lambda g, v: g.astype(v.dtype), updates, state.variance)
    bad = not_finite(jax.tree.map(jnp.square, grads), axis_name)  # a variance learns from squares
    local = tree_update_moment(grads, state.momentum, adam.b1, 1)
    local = sendable(adam, count, local, root, state.residual, axis_name)
    if unit is not None:
        local = jax.tree.map(jnp.divide, local, unit)
    # Each bucket has its own branch, and all else none: none waits for the gradients of the others,
    # and XLA copies what a branch returns.
    got = averaging.average(
        transport,
        unless(frozen, grads, local),
        state.count,
        "synchronize",
        instead=averaging.Instead(~frozen, averaging.EXACT, "variance"),
        bad=bad > 0,
        **averaging.feedback(state),
    )
    if unit is None:
        most = root
    elif unit is root:
        most = jnp.float32(1.0)
    else:
        most = jax.tree.map(jnp.divide, root, unit)
    moved = bounded(adam, count, got.mean, most)
    cut = kept_back(got.residual, got.mean, moved)
    compressed = moved if unit is None else jax.tree.map(jnp.multiply, moved, unit)
    momentum = tree_update_moment(got.mean, state.momentum, adam.b1, 1)
    return Phase(
        mean=got.mean,
        momentum=unless(frozen, momentum, compressed),
        residual=unless(frozen, got.residual, cut),
        owner_residual=got.owner_residual,
        failed=got.failed,
    )


def root_after(
    adam: moments.Adam, frozen: jax.Array, learned: jax.Array, variance: Any, root: Any
) -> Any:
    """D in a step: the frozen `root`, or in the warm-up that of the variance after the step.

    That one needs no floor, as it has seen the step's gradient; `learned` counts those before it.
    """
    fresh = adam.root(variance, adam.weight(learned + 1, variance), floor=0.0)
    return unless(frozen, fresh, root)


_LEAST, _MOST = 64, 1024  # entries of a block
_OTHERS = sign(block=_MOST)


def signs_by_row(path: str, leaf: Any) -> Compressor:
    """Signs with a scale for each row of an embedding, and for every 1,024 entries elsewhere.

    A row whose token has just come moves by a rate, most others by nothing. A scale for both is
    small, and the row takes as many messages to arrive as there are rows in its block. Short rows
    share a block of 64 entries.
    """
    if kind_of(path, leaf) != "embedding":
        return _OTHERS
    return sign(block=min(max(leaf.shape[-1], _LEAST), _MOST), scale_dtype="bfloat16")
