"""Rounding: small floating-point types, and b-bit codes with a scale per block."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._checks import require_choice, require_integer
from jaxcomp._printing import call
from jaxcomp.compressors.base import SCALE_DTYPES, Compressor, Payload
from jaxcomp.compressors.blocks import from_blocks, in_blocks
from jaxcomp.compressors.packing import pack, uniform, unpack


def cast(dtype: jax.typing.DTypeLike) -> Compressor:
    """Rounds each value to a smaller floating-point type: 8 or 16 bits per parameter.

    Values beyond the type's largest finite value, and infinities, become that value. NaN stays NaN.
    bfloat16 has float32's range and is a contraction, with alpha = 1 - 2**-16. The others turn
    small values into zeros (below 3e-8 in float16, 1e-3 in float8_e4m3fn, 8e-6 in float8_e5m2), so
    scale the values first. The bits are sent as unsigned integers, because XLA:CPU widens small
    floating-point types on the wire.

    Args:
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    Raises:
      ValueError: At construction, for another type.
      TypeError: If it is not a dtype.
    """
    name = jnp.dtype(dtype).name
    if name not in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"):
        raise ValueError(
            f"cast got dtype {name}; needs bfloat16, float16, float8_e4m3fn or float8_e5m2; "
            "write identity() to send float32"
        )
    dtype = jnp.dtype(dtype)
    largest = float(jnp.finfo(dtype).max)
    wire_dtype = jnp.uint8 if dtype.itemsize == 1 else jnp.uint16

    def encode(x, shared, private):
        rounded = jnp.clip(x, -largest, largest).astype(dtype)
        return Payload(lax.bitcast_convert_type(rounded, wire_dtype), x.size)

    def decode(payload, shared):
        return lax.bitcast_convert_type(payload.data, dtype).astype(jnp.float32)

    return Compressor(
        name=call(cast, dtype=name),
        encode=encode,
        decode=decode,
        bits_per_parameter=8.0 * dtype.itemsize,
        contraction=1.0 - 2.0**-16 if name == "bfloat16" else None,
    )


def quantize(
    bits: int,
    block: int = 128,
    range: str = "absmax",
    rounding: str = "nearest",
    scale_dtype: jax.typing.DTypeLike = "bfloat16",
) -> Compressor:
    """Encodes each value in `bits` bits, on a uniform grid per block of neighbours.

    Costs `bits + s / block` bits per parameter, where s is the number of bits of `scale_dtype`
    (twice that for "minmax"). The grid is rounded outwards to `scale_dtype` before encoding. So no
    value clips, and "stochastic" and "shift" are unbiased up to float32 rounding. A block of zeros
    decodes to zeros. A block with a value that is not finite, or with a step above 2**126, decodes
    to values that are not finite.

    With N + 1 levels, n = block, e = finfo(scale_dtype).eps, nearest "absmax" is a contraction
    with alpha = (1 - min(e, (1 + e) / N)**2) / (1 + (n - 1) * (1 + e)**2 / N**2). In the other
    cases alpha = 1 - c * n * (1 + e)**2 / N**2 where that is positive, with c = 1 ("shift":
    1/3); "minmax" has c * (1 + e)**2 / 2 in place of c. None is promised for float16.

    Args:
      bits: Width of a code, 1 to 8.
      block: Neighbours that share a grid.
      range: "absmax": 2**bits - 1 levels, symmetric around an exact zero (for one bit, the two
        levels +-scale). "minmax": 2**bits levels from the block's least to its greatest value.
      rounding: "nearest"; "stochastic", up or down at random with the private key; "shift", to the
        nearest level of a grid that is shifted by a random fraction of a step. The shift is one
        number for the whole bucket, drawn from the shared key.
      scale_dtype: Dtype of the step and the minimum: bfloat16, float32, or float16, which loses
        values below 6e-8. "minmax" needs float32 for values far from zero.

    Raises:
      ValueError: At construction, for arguments outside these ranges.

    References:
      D. Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
      Encoding", NeurIPS 2017 (stochastic rounding; here to the block's maximum, not its norm).
      I. Markov et al., "Quantized Distributed Training of Large Models with Convergence
      Guarantees", ICML 2023, arXiv 2302.02390 (random shift).
    """
    dtype = jnp.dtype(scale_dtype)
    more = "quantize(4), or cast('bfloat16') or identity() for more bits"
    require_integer("quantize", "bits", bits, more, most=8)
    require_integer("quantize", "block", block, "block=128")
    require_choice("quantize", "range", range, "absmax", "minmax")
    require_choice("quantize", "rounding", rounding, "nearest", "stochastic", "shift")
    require_choice("quantize", "scale_dtype", dtype.name, *SCALE_DTYPES)
    num_steps = 2**bits - (1 if range == "minmax" or bits == 1 else 2)

    def encode(x, shared, private):
        blocks = in_blocks(_widen(x), block, fill="edge")
        low, step = grid(blocks, range, num_steps, dtype)
        steps = in_steps(blocks, low, step)
        if range == "absmax":
            steps = steps + num_steps / 2
        steps = jnp.clip(steps + _offset(rounding, shared, private, blocks.shape), 0.0, num_steps)
        # The sum is a rounded code in the low bits; XLA:CPU converts at a third of the speed.
        codes = lax.bitcast_convert_type(steps + 2.0**23, jnp.uint32).astype(jnp.uint8)
        scales = (step,) if range == "absmax" else (low, step)
        return Payload((pack(from_blocks(codes, x.size), bits), *scales), x.size)

    def decode(payload, shared):
        packed, *low, step = payload.data
        steps = in_blocks(unpack(packed, bits, payload.numel), block).astype(jnp.float32)
        if rounding == "shift":
            steps = steps - _offset(rounding, shared, None, ())
        step = _widen(step)[:, None]
        if range == "absmax":
            return from_blocks((steps - num_steps / 2) * step, payload.numel)
        return from_blocks(steps * step + _widen(low[0])[:, None], payload.numel)

    scales = 1 if range == "absmax" else 2
    rest = {"block": block, "range": range, "rounding": rounding, "scale_dtype": dtype.name}
    return Compressor(
        name=call(quantize, bits=bits, **rest),
        encode=encode,
        decode=decode,
        bits_per_parameter=bits + scales * 8 * dtype.itemsize / block,
        contraction=_contraction(num_steps, block, range, rounding, dtype),
        unbiased=rounding != "nearest",
    )


def grid(blocks, range, num_steps, dtype):
    """The least value (None for "absmax") and the step of each block, rounded outwards."""
    high, low = jnp.max(blocks, axis=1), jnp.min(blocks, axis=1)
    if range == "absmax":
        # Two reductions: XLA:CPU vectorizes max and min, but not the maximum of abs.
        return None, _step(jnp.maximum(high, -low) / (num_steps / 2), dtype)
    low = -_round_up(-low, dtype)
    return low, _step((high - _widen(low)) / num_steps, dtype)


def in_steps(blocks, low, step):
    """How many steps of its block's grid a value lies above the least one, or above zero."""
    blocks = blocks if low is None else blocks - _widen(low)[:, None]
    return blocks * jnp.where(step > 0, 1.0 / _widen(step), 0.0)[:, None]


def _step(x, dtype):
    # The inverse of a greater one would be subnormal, and all values of its block become zero.
    return _round_up(jnp.where(x > 2.0**126, jnp.inf, x), dtype)


def _round_up(x, dtype):
    # Subnormal values become zero, so that their inverse is finite.
    x = jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0.0, x)
    # The barrier keeps XLA from taking x for its own rounded value (excess precision).
    nearest = lax.optimization_barrier(x.astype(dtype))
    above = jnp.nextafter(nearest, jnp.asarray(jnp.inf, dtype))
    # 2**-22: a quotient that float32 rounded up is not rounded up again.
    return jnp.where(x - _widen(nearest) > jnp.abs(x) * 2.0**-22, above, nearest)


def _widen(x):
    return x.astype(jnp.float32)


def _offset(rounding, shared, private, shape):
    if rounding == "nearest":
        return 0.0
    return uniform(private, shape) - 0.5 if rounding == "stochastic" else uniform(shared) - 0.5


def _contraction(num_steps, block, range, rounding, dtype):
    if dtype == jnp.float16:
        return None
    eps = float(jnp.finfo(dtype).eps)
    variance = (1 + eps) ** 2 / num_steps**2
    if range == "absmax" and rounding == "nearest" and num_steps > 1:
        exact = 1 - min(eps, (1 + eps) / num_steps) ** 2
        return exact / (1 + (block - 1) * variance)
    if rounding == "shift":
        variance /= 3
    if range == "minmax":
        variance *= (1 + eps) ** 2 / 2
    return 1 - block * variance if block * variance < 1 else None
