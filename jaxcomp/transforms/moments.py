"""What methods of the Adam family share: a variance that all replicas agree on, and its root."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp import averaging
from jaxcomp.sharding import varying_axes


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


def schedule_of(learning_rate: float | optax.Schedule) -> optax.Schedule:
    """The rate as a schedule, `count -> f32[]`."""
    rate = learning_rate if callable(learning_rate) else optax.constant_schedule(learning_rate)
    return lambda count: jnp.asarray(rate(count), jnp.float32)


def zeros(param: jax.Array) -> jax.Array:
    """Zeros for a moment of a parameter: float32, or wider if it is."""
    return jnp.zeros_like(param, jnp.promote_types(param.dtype, jnp.float32))


def learned(grads, variance, b2: float, due: jax.Array, axis_name: str, bucket_numel: int):
    """The variance after the mean gradient, where `due`: only then is anything sent."""

    def learn(variance):
        mean = averaging.exact_mean(grads, axis_name, bucket_numel, "variance")
        return jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, variance, mean)

    return lax.cond(due, learn, lambda variance: variance, variance)


def denominator(variance, b2: float, eps: float, floor: float, updates: jax.Array | None):
    """The root of the variance plus eps.

    Args:
      variance: Tree, equal on all replicas.
      b2: Its decay.
      eps: Added to the root.
      floor: Least variance as a share of the mean over the leaf, over all its shards.
      updates: i32[], how often it was learned, for the bias correction; None for none.
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
