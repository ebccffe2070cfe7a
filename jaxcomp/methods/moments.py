"""What methods of the Adam family share: a variance that all replicas agree on, and its root."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.exchange import averaging
from jaxcomp.replicas.types import size_over_shards, sums_over_shards


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


def wide(dtype) -> jnp.dtype:
    """The dtype of what belongs to a parameter: float32, or wider if that is; else a ValueError."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"a parameter has dtype {dtype}, but only floating ones can be trained; keep others "
            "out of the parameters, in a closure of the loss."
        )
    return jnp.promote_types(dtype, jnp.float32)


def zeros(param: jax.Array) -> jax.Array:
    """Zeros for a moment of a parameter: float32, or wider if it is."""
    return jnp.zeros_like(param, wide(param.dtype))


def dtype_of(tree):
    """The widest dtype of the leaves, at least float32."""
    return jnp.result_type(jnp.float32, *jax.tree.leaves(tree))


def power(b: float, n: jax.Array, like) -> jax.Array:
    """b^n in the dtype of the tree `like`: by itself JAX takes float64 where that is enabled."""
    return jnp.asarray(b, dtype_of(like)) ** n


def gradients(updates, like, axis_name: str):
    """A replica's own gradients in the moments' dtypes, those of `like`, and whether they fail.

    They do, i32[] 1, if the square of one is not finite: a variance would not be after it.
    """
    grads = jax.tree.map(lambda g, moment: g.astype(moment.dtype), updates, like)
    return grads, averaging.not_finite(jax.tree.map(jnp.square, grads), axis_name)


def poisoned(updates, like, axis_name: str):
    """`gradients`, all of them NaN if they fail: so is what travels, and all replicas skip."""
    grads, bad = gradients(updates, like, axis_name)
    return jax.tree.map(lambda g: jnp.where(bad, jnp.nan, g), grads)


# Most that one gradient makes of a variance that learns from few: about 15 count at any time.
_LARGEST_SHARE = 1 / 8


def aged(b2: float, steps: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a variance keeps of itself when it is learned some steps after the last time.

    That is b2^steps, but the square of the new gradient never makes more of the variance than
    an eighth, or what Adam gives it. Without that bound a gradient weighs 1 - b2^steps, and a
    variance that is learned every thousand steps is one noisy square, near zero somewhere.

    Args:
      b2: Decay of the variance in a step, in [0, 1).
      steps: i32[], since it was last learned, at least 1.
      weight: f32[], of all gradients that it is of; 0 if of none.

    Returns:
      The share kept, f32[] in [0, b2], and the new `weight`.
    """
    least = (1 - _LARGEST_SHARE) / (1 - _LARGEST_SHARE * (1 - weight))
    keeps = jnp.minimum(jnp.maximum(power(b2, steps, weight), least), b2)
    return keeps, keeps * weight + (1 - keeps)


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


def denominator(variance, eps: float, floor: float, weight: jax.typing.ArrayLike):
    """The root of the variance plus eps.

    Args:
      variance: Tree, equal on all replicas.
      eps: Added to the root.
      floor: Least variance as a share of the mean over the leaf, over all its shards. A leaf
        that never had a gradient gets the mean over all that had one instead: else its first
        one would be divided by `eps`.
      weight: f32[], of all gradients that it is of, for the bias correction; 1 for none.
    """
    correction = 1 / weight
    leaves, treedef = jax.tree.flatten(variance)
    if floor and leaves:
        totals = jnp.stack(sums_over_shards([jnp.sum(v) for v in leaves]))
        sizes = jnp.array([max(1, size_over_shards(v)) for v in leaves], jnp.float32)
        of_all = jnp.sum(totals) / jnp.maximum(1, jnp.sum(jnp.where(totals > 0, sizes, 0)))
        least = jnp.where(totals > 0, floor * totals / sizes, of_all)
        leaves = [jnp.maximum(v, low.astype(v.dtype)) for v, low in zip(leaves, least, strict=True)]
    return treedef.unflatten([jnp.sqrt(v * correction) + eps for v in leaves])


def no_norms(b2: float, like, freeze_step: int | None) -> jax.Array | None:
    """The norms of no steps yet, see `freezes`; None for a given end."""
    return jnp.zeros(round(1 / (1 - b2)), dtype_of(like)) if freeze_step is None else None


def freezes(frozen: jax.Array, state, variance, freeze_step: int | None, ratio: float):
    """Whether the next step is of few bits, and the norms to tell the one after by.

    Args:
      frozen: bool[], whether this step was.
      state: With `norms`, of the last steps' l1 norms or None for a given end, and `count`.
      variance: Tree, equal on all replicas, after this step.
      freeze_step: The given end, or None.
      ratio: Share of today's norm from which that of `norms.size` steps ago is stable.
    """
    if freeze_step is not None:
        return state.count + 1 >= freeze_step, None
    norm = sum(sums_over_shards([jnp.sum(v) for v in jax.tree.leaves(variance)]))
    place = state.count % state.norms.size
    stable = (state.count >= state.norms.size) & (state.norms[place] >= ratio * norm)
    return frozen | stable, state.norms.at[place].set(norm)


def trust_ratio(param_square, update_square, otherwise: float = 1.0) -> jax.Array:
    """The quotient of two norms, of their squares; `otherwise` where one is zero."""
    both = (param_square > 0) & (update_square > 0)
    quotient = jnp.sqrt(param_square) / jnp.sqrt(update_square)
    return jnp.where(both, quotient, otherwise)
