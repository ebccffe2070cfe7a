"""The trust ratios of 1-bit LAMB: learned in the warm-up, and corrected after it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.methods import moments
from jaxcomp.replicas.layers import own_axes
from jaxcomp.replicas.types import largest, sums_over_shards


class Ratios(NamedTuple):
    """The constants of trust ratios; see `one_bit_lamb`."""

    adam: moments.Adam
    trust_bounds: tuple[float, float]
    trust_decay: float
    factor_bounds: tuple[float, float]
    factor_change: float


class Trust(NamedTuple):
    """The trust ratio of one leaf, f32[] each, or f32[layers] of a stack."""

    ratio: jax.Array  # decayed sum of the warm-up's ratios
    weight: jax.Array  # of these: 1 - decay^n after n of them
    factor: jax.Array  # correction of the frozen ratio in the last step
    scale: jax.Array  # of the momentum on the wire, without `precondition`


def trusted(
    settings: Ratios, frozen: jax.Array, old: Trust, squares: jax.Array, quotient: jax.Array
) -> tuple[Trust, jax.Array]:
    """A leaf's trust after a step, and the trust ratio of the step: f32[], or f32[layers].

    Args:
      settings: The constants.
      frozen: bool[], whether the warm-up has ended.
      old: Its trust before the step.
      squares: Squared norms of the parameters, of m / D and of the update u.
      quotient: The largest one of the frozen D and the D of the variance that goes on.
    """
    x, m, u = squares
    seen = (x > 0) & (u > 0)
    now = jnp.clip(moments.trust_ratio(x, u), *settings.trust_bounds)
    decay = jnp.where(seen & ~frozen, settings.trust_decay, 1.0)
    averaged = lambda was, now: decay * was + (1 - decay) * now
    factor = jnp.where(frozen, _factor(settings, old.factor, quotient, m, u), old.factor)
    corrected = settings.adam.bias_correction
    whole = jnp.where(old.weight > 0, old.weight, 1.0) if corrected else 1.0
    ratio = jnp.where(frozen, old.ratio / whole * factor, jnp.where(seen, now, 1.0))
    trust = Trust(averaged(old.ratio, now), averaged(old.weight, 1.0), factor, old.scale)
    return trust, ratio


def _factor(settings, old, quotient, moment_square, update_square):
    """The correction of a layer's frozen ratio: f32[]."""
    factor = quotient
    if settings.adam.weight_decay:
        share = jnp.minimum(moments.trust_ratio(moment_square, update_square), 1.0)
        factor = factor * share + 1 - share
    factor = jnp.clip(factor, *settings.factor_bounds)
    least, greatest = (old * (1 + way * settings.factor_change) for way in (-1, 1))
    return jnp.clip(factor, least, greatest)


def largest_quotients(over: Any, under: Any, axis_name: str) -> list[jax.Array]:
    """The largest quotient of two trees' entries in each layer, over all its shards."""
    of = zip(*map(jax.tree.leaves, (over, under)), own_axes(over), strict=True)
    found = [jnp.max(old / new, axis=axes, initial=0.0) for old, new, axes in of]
    return [largest(quotient, axis_name) for quotient in found]


def even_scales(momentum: Any, axis_name: str) -> list[jax.Array]:
    """The factor that gives each layer the mean magnitude of all: f32[] or f32[layers]."""
    of = zip(jax.tree.leaves(momentum), own_axes(momentum), strict=True)
    sums = sums_over_shards([jnp.sum(m * m, axis=axes) for m, axes in of], axis_name)
    sizes = map(jnp.float32, moments.layer_sizes(momentum, axis_name))
    roots = [jnp.sqrt(s / n) for s, n in zip(sums, sizes, strict=True)]
    magnitudes = jnp.concatenate([m.reshape(-1) for m in roots])
    mean = jnp.sum(magnitudes) / jnp.maximum(jnp.sum(magnitudes > 0), 1)
    return [jnp.where(m > 0, mean / m, 1.0) for m in roots]
