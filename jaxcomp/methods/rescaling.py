"""The steps of SLAMB: trust ratios on and off the mask, blended by the entries' freshness."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.methods import moments
from jaxcomp.replicas.types import num_replicas, sums_over_shards


class Rescaling(NamedTuple):
    """How stale entries are blended in; see `slamb`."""

    adam: moments.Adam
    b3: float
    form: str  # "quadratic", "linear" or "masked"
    trust_bounds: tuple[float, float]


def steps(
    settings: Rescaling,
    momentum: list[jax.Array],
    variance: list[jax.Array],
    params: list[jax.Array],
    stale: list[jax.Array | None],
    decays: list[float],
    on_mask: Callable[[list[jax.Array]], list[jax.Array]],
    count: jax.Array,
    axis_name: str,
) -> list[jax.Array]:
    """The amount that a step subtracts from each leaf of this replica's parameters.

    Args:
      settings: The form, and its constants.
      momentum, variance, params: This replica's own leaves.
      stale: Steps since each entry was exchanged; None for leaves without a mask.
      decays: The weight decay of each leaf.
      on_mask: Maps leaves to their sums of squares on the mask, f32[] each.
      count: i32[], steps before this one.
      axis_name: Mesh axis of the replicas.
    """
    adam, is_linear = settings.adam, settings.form == "linear"
    corrections = [1 - moments.power(b, count + 1, params) for b in (adam.b1, adam.b2)]
    directions = [
        m / corrections[0] / (jnp.sqrt(v / corrections[1]) + adam.eps)
        for m, v in zip(momentum, variance, strict=True)
    ]
    if not is_linear:
        of = zip(directions, params, decays, strict=True)
        directions = [u + decay * x for u, x, decay in of]
    sums = [
        _squares(*of)
        for of in zip(params, directions, on_mask(params), on_mask(directions), strict=True)
    ]
    sums = sums_over_shards(sums, axis_name)
    step = _linear_step if is_linear else _quadratic_step
    rate, out = adam.rate_of(count), []
    slower, kept = 1 / math.sqrt(num_replicas(axis_name)), settings.b3
    if settings.form == "masked":
        slower, kept = 0.0, 0.0
    log = math.log(max(kept, 1e-30))  # XLA:CPU has no vector instruction for powers
    for u, x, squares, old, decay in zip(directions, params, sums, stale, decays, strict=True):
        fresh = 1.0 if old is None else jnp.exp(log * old.astype(u.dtype))
        moves = u + decay * x if is_linear else u
        out.append(step(settings, rate, moves, x, squares, fresh, (1 - fresh) * slower))
    return out


def _quadratic_step(settings, rate, u, x, squares, fresh, slow):
    p, q = (moments.trust_ratio(*squares[2 * i : 2 * i + 2]) for i in range(2))
    trust = fresh * p + (1 - fresh) * q
    trust = trust if x.ndim < 2 else jnp.clip(trust, *settings.trust_bounds)
    return rate * (fresh + slow) * trust * u


def _linear_step(settings, rate, u, x, squares, fresh, slow):
    least, greatest = settings.trust_bounds
    p = jnp.clip(moments.trust_ratio(*squares[:2]), least, greatest)
    q = jnp.clip(moments.trust_ratio(squares[2], squares[3], otherwise=0.0), 0.0, greatest)
    return rate * (fresh * p + slow * q) * u


def _squares(x, u, x_on, u_on) -> jax.Array:
    """f32[4]: sums of squares of x and u on the mask, and of both off it, by subtraction."""
    off = [jnp.maximum(jnp.sum(y * y) - on, 0) for y, on in ((x, x_on), (u, u_on))]
    return jnp.stack([x_on, u_on, *off])
