"""Fits levels to a histogram of values in [0, 1]. Values are taken as uniform within a bin."""

import jax
import jax.numpy as jnp
from jax import lax

BINS = 1024
"""Bins of a histogram: 16 for each gap between 64 uniform levels."""

_STEPS = 16  # for each level: neighbours move each other, so more levels take longer to settle


def histogram(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """Counts the chosen ones of `values`, `f32[n]`, in `f32[BINS]`; NaN counts nowhere."""
    chosen &= (values >= 0) & (values <= 1)
    bins = jnp.clip((values * BINS).astype(jnp.int32), 0, BINS - 1)
    return jnp.zeros(BINS).at[bins].add(chosen.astype(jnp.float32))


def least_error(levels: jax.Array, tally: jax.Array) -> jax.Array:
    """Moves levels to where rounding to the nearest has the least squared error.

    Lloyd's algorithm: each level moves to the mean of the values that are nearest to it, and stays
    if there are none. `levels` is `f32[n]`, ascending in [0, 1]; `tally` is what `histogram`
    returns.
    """
    counts, sums = _integrals(tally)

    def step(_, levels):
        between = (levels[1:] + levels[:-1]) / 2
        edges = jnp.concatenate([jnp.zeros(1), between, jnp.ones(1)])
        count, total = jnp.diff(counts(edges)), jnp.diff(sums(edges))
        return jnp.where(count > 0, total / jnp.where(count > 0, count, 1.0), levels)

    return lax.fori_loop(0, _STEPS * levels.size, step, levels)


def least_variance(levels: jax.Array, tally: jax.Array) -> jax.Array:
    """Moves all levels except the first and last to where stochastic rounding has least variance.

    The variance of a value v between levels a and c is (v - a)(c - v). Given its neighbours a and
    c, the best level b has `count(b) = count(a) + sum(c - v for a < v < c) / (c - a)`, where
    `count(x)` is the number of values below x. Every second level moves at a time.

    Levels stay if the tally is empty. Arguments are those of `least_error`.

    References:
      Faghri et al., `Adaptive Gradient Quantization for Data-Parallel SGD
      <https://arxiv.org/abs/2010.12460>`_, NeurIPS 2020, Theorem 1.
    """
    counts, sums = _integrals(tally)
    edges = jnp.linspace(0, 1, BINS + 1)
    cumulative = counts(edges)
    inner = jnp.arange(1, levels.size - 1)

    def step(number, levels):
        a, b, c = levels[:-2], levels[1:-1], levels[2:]
        count = counts(c) - counts(a)
        lack = c * count - (sums(c) - sums(a))
        apart = (c > a) & (count > 0)
        target = counts(a) + lack / jnp.where(apart, c - a, 1.0)
        best = jnp.clip(jnp.interp(target, cumulative, edges), a, c)
        return levels.at[1:-1].set(jnp.where(apart & (inner % 2 == number % 2), best, b))

    return lax.fori_loop(0, 2 * _STEPS * levels.size, step, levels)


def _integrals(tally):
    """Functions of positions `f32[n]`: how many values lie below, and their sum."""
    share = tally / jnp.maximum(jnp.sum(tally), 1.0)
    ends = jnp.linspace(0, 1, BINS + 1)
    before = lambda x: jnp.concatenate([jnp.zeros(1), jnp.cumsum(x)])
    below, total = before(share), before(share * (ends[1:] + ends[:-1]) / 2)
    bin_of = lambda x: jnp.clip((x * BINS).astype(jnp.int32), 0, BINS - 1)

    def counts(x):
        at = bin_of(x)
        return below[at] + share[at] * (x - ends[at]) * BINS

    def sums(x):
        at = bin_of(x)
        return total[at] + share[at] * (x - ends[at]) * BINS * (x + ends[at]) / 2

    return counts, sums
