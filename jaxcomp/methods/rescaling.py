"""The steps of SLAMB: trust ratios on and off the mask, blended by the entries' freshness."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.methods import moments, step_bound
from jaxcomp.replicas.layers import own_axes, spread
from jaxcomp.replicas.types import num_replicas, sums_over_shards


class Rescaling(NamedTuple):
    """How stale entries are blended in; see `slamb`."""

    adam: moments.Adam
    b3: float
    form: str  # "quadratic", "linear" or "masked"
    trust_bounds: tuple[float, float]


def steps(
    settings: Rescaling,
    momentum: Any,
    variance: Any,
    params: Any,
    stale: Any,
    count: jax.Array,
    axis_name: str,
    decays: Any,
) -> Any:
    """The amount that a step subtracts from each leaf of this replica's parameters.

    Args:
      settings: The form, and its constants.
      momentum, variance, params: This replica's own trees.
      stale: Steps since each entry was exchanged; None for leaves without a mask.
      count: i32[], steps before this one.
      axis_name: Mesh axis of the replicas.
      decays: The weight decay of each leaf.
    """
    adam, is_linear = settings.adam, settings.form == "linear"
    corrections = [1 - moments.power(b, count + 1, params) for b in (adam.b1, adam.b2)]

    root = jax.tree.map(lambda v: jnp.sqrt(v / corrections[1]) + adam.eps, variance)
    momentum = step_bound.bounded(adam, count + 1, momentum, root)

    def direction(m, d, x, decay):
        return _decayed(m / corrections[0] / d, x, 0.0 if is_linear else decay)

    directions = jax.tree.map(direction, momentum, root, params, decays)
    leaves, treedef = jax.tree.flatten(params)
    columns = leaves, *map(treedef.flatten_up_to, (directions, stale)), own_axes(params)
    sums = sums_over_shards(list(map(_squares, *columns)), axis_name)
    step = _linear_step if is_linear else _quadratic_step
    rate = adam.rate_of(count)
    slower, kept = 1 / math.sqrt(num_replicas(axis_name)), settings.b3
    if settings.form == "masked":
        slower, kept = 0.0, 0.0
    log = math.log(max(kept, 1e-30))  # XLA:CPU has no vector instruction for powers
    lost = []
    for x, u, old, axes, squares, decay in zip(
        *columns, sums, jax.tree.leaves(decays), strict=True
    ):
        squares = [spread(square, u) for square in squares]
        fresh = 1.0 if old is None else jnp.exp(log * old.astype(u.dtype))
        moves = _decayed(u, x, decay if is_linear else 0.0)
        lost.append(step(settings, rate, moves, len(axes), squares, fresh, (1 - fresh) * slower))
    return treedef.unflatten(lost)


def _decayed(u, x, decay):
    return u + decay * x if decay else u


def _quadratic_step(settings, rate, u, ndim, squares, fresh, slow):
    p, q = (moments.trust_ratio(*squares[2 * i : 2 * i + 2]) for i in range(2))
    trust = fresh * p + (1 - fresh) * q
    trust = trust if ndim < 2 else jnp.clip(trust, *settings.trust_bounds)
    return rate * (fresh + slow) * trust * u


def _linear_step(settings, rate, u, ndim, squares, fresh, slow):
    least, greatest = settings.trust_bounds
    p = jnp.clip(moments.trust_ratio(*squares[:2]), least, greatest)
    q = jnp.clip(moments.trust_ratio(squares[2], squares[3], otherwise=0.0), 0.0, greatest)
    return rate * (fresh * p + slow * q) * u


def _squares(x, u, stale, axes) -> jax.Array:
    """f32[4], or f32[4, layers]: sums of squares of x and u on the mask, and of both off it."""
    total = lambda y: jnp.sum(y, axis=axes)
    if stale is None:
        sums = [total(x * x), total(u * u)]
        return jnp.stack([*sums, *map(jnp.zeros_like, sums)])
    parts = [jnp.where(stale == 0, y * y, 0) for y in (x, u)]
    parts += [jnp.where(stale == 0, 0, y * y) for y in (x, u)]
    return jnp.stack([total(part) for part in parts])
