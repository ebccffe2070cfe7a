"""What methods of the Adam family share: a variance that all replicas agree on, and its root."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import averaging
from jaxcomp.sharding import sums_over_shards, varying_axes


def check(name: str, b1: float, b2: float, eps: float, variance_floor: float) -> None:
    """Raises a ValueError for constants of Adam that are out of range."""
    for argument, value in (("b1", b1), ("b2", b2)):
        if not 0 <= value < 1:
            raise ValueError(f"{name} got {argument}={value}; needs [0, 1); write {argument}=0.9.")
    if not 0 < eps:
        raise ValueError(f"{name} got eps={eps}; needs more than 0; write eps=1e-8.")
    if not 0 <= variance_floor < 1:
        raise ValueError(
            f"{name} got variance_floor={variance_floor}; needs [0, 1); write variance_floor=1e-4."
        )


def check_freeze(name: str, freeze_step: int | None, freeze_ratio: float) -> None:
    """Raises a ValueError for ends of a warm-up that are out of range."""
    if freeze_step is not None and freeze_step < 1:
        raise ValueError(
            f"{name} got freeze_step={freeze_step}; needs at least 1; write a sixth of the "
            "steps, or None to find it."
        )
    if not 0 < freeze_ratio < 1:
        raise ValueError(
            f"{name} got freeze_ratio={freeze_ratio}; needs (0, 1); write freeze_ratio=0.96."
        )


def schedule_of(learning_rate: float | optax.Schedule) -> optax.Schedule:
    """The rate as a schedule, `count -> f32[]`."""
    rate = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    return lambda count: jnp.asarray(rate(count), jnp.float32)


def zeros(param: jax.Array) -> jax.Array:
    """Zeros for a moment of a parameter: float32, or wider if it is."""
    return jnp.zeros_like(param, jnp.promote_types(param.dtype, jnp.float32))


def gradients(updates, like, axis_name: str):
    """A replica's own gradients in the moments' dtypes, those of `like`.

    All are NaN if any is not finite: then so is whatever travels of them, and all replicas skip
    the step.
    """
    grads = jax.tree.map(lambda g, moment: g.astype(moment.dtype), updates, like)
    bad = averaging.not_finite(grads, axis_name)
    return jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), grads)


def learned(grads, variance, b2: jax.Array, due: jax.Array, transport, count: jax.Array):
    """The variance after the mean gradient, where `due`: only then is anything sent.

    Args:
      grads: This replica's own.
      variance: Tree, equal on all replicas.
      b2: Its decay.
      due: bool[].
      transport: How gradients travel.
      count: i32[], of such steps.
    """

    def learn(variance):
        mean = averaging.mean_without_feedback(transport, grads, count, "variance")
        return optax.tree_utils.tree_update_moment(mean, variance, b2, 2)

    return lax.cond(due, learn, lambda variance: variance, variance)


def denominator(variance, b2: float, eps: float, floor: float, updates: jax.Array | None):
    """The root of the variance plus eps.

    Args:
      variance: Tree, equal on all replicas.
      b2: Its decay.
      eps: Added to the root.
      floor: Least variance as a share of the mean over the leaf, over all its shards.
      updates: i32[], how often it has decayed, for the bias correction; None for none.
    """
    correction = 1.0 if updates is None else 1 / (1 - b2**updates)

    def root(v):
        if floor:
            total, size = jnp.sum(v), jnp.float32(v.size)
            axes = tuple(sorted(varying_axes(v)))
            mean = lax.pmean(total / size, axes) if axes else total / size
            v = jnp.maximum(v, floor * mean)
        return jnp.sqrt(v * correction) + eps

    return jax.tree.map(root, variance)


def freezes(frozen: jax.Array, state, variance, ratio: float):
    """Whether the next step is of few bits, and the norms to tell the one after by.

    Args:
      frozen: bool[], whether this step was.
      state: With `norms`, f32[...] of the last steps' l1 norms or None for a given end, and
        `count`.
      variance: Tree, equal on all replicas, after this step.
      ratio: Share of today's norm from which that of `norms.size` steps ago is stable.
    """
    if state.norms is None:
        return frozen, None
    norm = sum(sums_over_shards([jnp.sum(v) for v in jax.tree.leaves(variance)]))
    place = state.count % state.norms.size
    stable = (state.count >= state.norms.size) & (state.norms[place] >= ratio * norm)
    return frozen | stable, state.norms.at[place].set(norm)


def trust_ratio(param_square, update_square, otherwise: float = 1.0) -> jax.Array:
    """The quotient of two norms, of their squares; `otherwise` where one is zero."""
    both = (param_square > 0) & (update_square > 0)
    quotient = jnp.sqrt(param_square) / jnp.sqrt(update_square)
    return jnp.where(both, quotient, otherwise)
