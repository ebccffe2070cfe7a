"""b-bit codes whose levels are learned: placed where the values are.

Levels are fitted to a histogram of values in [0, 1], which are taken as uniform within a bin.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._checks import require_choice, require_integer
from jaxcomp._printing import call
from jaxcomp.compressors.base import SCALE_DTYPES, Compressor, Levels, Payload
from jaxcomp.compressors.blocks import from_blocks, in_blocks
from jaxcomp.compressors.packing import pack, uniform, unpack
from jaxcomp.compressors.quantize import grid, in_steps

_SAMPLE = 2**16  # values of a bucket that are tallied, at least where there are more
_BINS = 1024  # of a histogram: 16 for each gap between 64 uniform levels
_STEPS = 16  # for each level: neighbours move each other, so more levels take longer to settle


def learned_levels(
    bits: int,
    block: int = 1024,
    rounding: str = "nearest",
    scale_dtype: jax.typing.DTypeLike = "bfloat16",
) -> Compressor:
    """Encodes each value as one of 2**bits levels between the least and the greatest of its block.

    The levels start uniform, like those of `quantize(bits, block, "minmax")`, and cost the same
    bits per parameter. `qsdp` learns them, for each parameter and each of its two directions;
    elsewhere they stay uniform. No contraction is promised, since levels may be anywhere. At 4
    bits, learned levels lose 0.6 times as much of normally distributed values as uniform ones.

    Args:
      bits: Width of a code, 1 to 6. With more bits, learning does not help.
      block: Neighbours that share a minimum and a range.
      rounding: "nearest": the levels minimize the squared error. "stochastic": up or down at random
        with the private key, unbiased; the levels minimize the variance.
      scale_dtype: Dtype of the minimum and the range, as for `quantize`.

    Raises:
      ValueError: At construction, for arguments outside these ranges.

    References:
      Markov et al., `Quantized Distributed Training of Large Models with Convergence Guarantees
      <https://arxiv.org/abs/2302.02390>`_, ICML 2023, Algorithm 1. It takes gradient steps on the
      squared error, one value at a time. Here Lloyd's algorithm takes all values at once: the same
      fixed points, without a learning rate. Faghri et al., `Adaptive Gradient Quantization for
      Data-Parallel SGD <https://arxiv.org/abs/2010.12460>`_, NeurIPS 2020 (stochastic rounding).
    """
    dtype = jnp.dtype(scale_dtype)
    more = "quantize(8, block=1024, range='minmax') for more"
    require_integer("learned_levels", "bits", bits, more, most=6)
    require_integer("learned_levels", "block", block, "block=1024")
    require_choice("learned_levels", "rounding", rounding, "nearest", "stochastic")
    require_choice("learned_levels", "scale_dtype", dtype.name, *SCALE_DTYPES)
    start = np.linspace(0, 1, 2**bits, dtype=np.float32)

    def levels_of(shared):
        return jnp.asarray(start) if shared.levels is None else shared.levels

    def encode(x, shared, private):
        blocks = in_blocks(x.astype(jnp.float32), block, fill="edge")
        low, span = grid(blocks, "minmax", 1, dtype)
        values = in_steps(blocks, low, span)
        share = uniform(private, values.shape) if rounding == "stochastic" else 0.5
        codes = _find(values, levels_of(shared), share, bits)
        return Payload((pack(from_blocks(codes, x.size), bits), low, span), x.size)

    def decode(payload, shared):
        packed, *scales = payload.data
        codes = in_blocks(unpack(packed, bits, payload.numel), block)
        low, span = (scale.astype(jnp.float32)[:, None] for scale in scales)
        digits = [(codes >> shift) & 1 == 1 for shift in reversed(range(bits))]
        return from_blocks(low + span * _choose(list(levels_of(shared)), digits), payload.numel)

    def tally(x):
        size = min(block, x.size)
        stride = max(1, x.size // max(size, _SAMPLE))
        blocks = in_blocks(x.astype(jnp.float32), block, fill="edge")[::stride]
        is_value = in_blocks(jnp.ones(x.shape), block)[::stride] > 0
        low, span = grid(blocks, "minmax", 1, dtype)
        values = in_steps(blocks, low, span)
        counts = is_value & (span > 0)[:, None]
        return _histogram(values.reshape(-1), counts.reshape(-1))

    fit = _least_error if rounding == "nearest" else _least_variance
    rest = {"block": block, "rounding": rounding, "scale_dtype": dtype.name}
    return Compressor(
        name=call(learned_levels, bits=bits, **rest),
        encode=encode,
        decode=decode,
        bits_per_parameter=bits + 2 * 8 * dtype.itemsize / block,
        unbiased=rounding == "stochastic",
        levels=Levels(start, tally, fit),
    )


def _find(values, levels, share, bits):
    """Counts the levels (not the last) that lie more than a share of their gap below each value.

    A share of 1/2 gives the nearest level, uniform noise an unbiased choice between two. Bisects.
    """
    digits: list[jax.Array] = []
    for digit in range(bits):
        step = 2 ** (bits - digit)
        at = slice(step // 2 - 1, None, step)
        pairs = zip(levels[:-1][at], levels[1:][at], strict=True)
        edges = [low + share * (high - low) for low, high in pairs]
        digits.append(values > _choose(edges, digits))
    total: jax.Array | int = 0
    for one in digits:
        total = 2 * total + one.astype(jnp.uint32)
    return lax.convert_element_type(total, jnp.uint8)


def _choose(table, digits):
    """The entry of a list at a binary number, digit by digit: XLA:CPU gathers at half the speed."""
    for digit in reversed(digits):
        table = [
            jnp.where(digit, one, zero) for zero, one in zip(table[::2], table[1::2], strict=True)
        ]
    return table[0]


def _histogram(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """Counts the chosen ones of `values`, `f32[n]`, in `f32[_BINS]`; NaN counts nowhere."""
    chosen &= (values >= 0) & (values <= 1)
    bins = jnp.clip((values * _BINS).astype(jnp.int32), 0, _BINS - 1)
    return jnp.zeros(_BINS, jnp.float32).at[bins].add(chosen.astype(jnp.float32))


def _least_error(levels: jax.Array, tally: jax.Array) -> jax.Array:
    """Moves levels to where rounding to the nearest has the least squared error.

    Lloyd's algorithm: each level moves to the mean of the values that are nearest to it, and stays
    if there are none. `levels` is `f32[n]`, ascending in [0, 1]; `tally` is what `_histogram`
    returns.
    """
    counts, sums = _integrals(tally)

    def step(_, levels):
        between = (levels[1:] + levels[:-1]) / 2
        edges = jnp.pad(between, 1, constant_values=(0, 1))
        count, total = jnp.diff(counts(edges)), jnp.diff(sums(edges))
        return jnp.where(count > 0, total / jnp.where(count > 0, count, 1.0), levels)

    return lax.fori_loop(0, _STEPS * levels.size, step, levels)


def _least_variance(levels: jax.Array, tally: jax.Array) -> jax.Array:
    """Moves all levels except the first and last to where stochastic rounding has least variance.

    The variance of a value v between levels a and c is (v - a)(c - v). Given its neighbours a and
    c, the best level b has `count(b) = count(a) + sum(c - v for a < v < c) / (c - a)`, where
    `count(x)` is the number of values below x. Every second level moves at a time.

    Levels stay if the tally is empty. Arguments are those of `_least_error`.

    References:
      Faghri et al., `Adaptive Gradient Quantization for Data-Parallel SGD
      <https://arxiv.org/abs/2010.12460>`_, NeurIPS 2020, Theorem 1.
    """
    counts, sums = _integrals(tally)
    edges = jnp.linspace(0, 1, _BINS + 1, dtype=levels.dtype)
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
    ends = jnp.linspace(0, 1, _BINS + 1, dtype=tally.dtype)
    before = lambda x: jnp.pad(jnp.cumsum(x), (1, 0))
    below, total = before(share), before(share * (ends[1:] + ends[:-1]) / 2)
    bin_of = lambda x: jnp.clip((x * _BINS).astype(jnp.int32), 0, _BINS - 1)

    def counts(x):
        at = bin_of(x)
        return below[at] + share[at] * (x - ends[at]) * _BINS

    def sums(x):
        at = bin_of(x)
        return total[at] + share[at] * (x - ends[at]) * _BINS * (x + ends[at]) / 2

    return counts, sums
