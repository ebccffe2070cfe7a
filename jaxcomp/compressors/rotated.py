"""A code for rotated values, so that no outlier sets the scale of its block."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._checks import is_power_of_two, require
from jaxcomp.compressors.base import Compressor, Key, Payload, require_compressor
from jaxcomp.compressors.packing import fold, random_bits

_SIGNS = Key(0, 0)  # for tallies: their levels suit all signs


def rotated(code: Compressor, block: int = 128) -> Compressor:
    """Multiplies blocks by a random orthogonal matrix before `code`, and rotates back after it.

    Values are multiplied by random signs, drawn from the shared key, and then by a Hadamard matrix
    over sqrt(block). Each rotated value is a sum over the block, nearly normally distributed, so a
    grid of few levels has less error than with a few outliers among small values. Bits per
    parameter and promises are those of `code`; the zeros that fill up the last block are encoded
    too.

    Args:
      code: Code for the rotated values. It must round: a sparsifier would drop parts of all values,
        and a lossless code gains nothing.
      block: Neighbours that are rotated together, a power of two.

    Raises:
      ValueError: At construction, for another `block` or `code`.

    References:
      A. T. Suresh et al., `Distributed Mean Estimation with Limited Communication
      <https://arxiv.org/abs/1611.00429>`_, ICML 2017. J. Jia et al., `SDP4Bit
      <https://arxiv.org/abs/2410.15526>`_, NeurIPS 2024 (for gradients, without signs).
    """
    holds = is_power_of_two(block) and block > 1
    require(holds, "rotated", "a power of two", "block=128", block=block)
    require_compressor("rotated", code)
    if code.selection is not None or code.stages or code.linear:
        raise ValueError(f"rotated got {code.name}, needs a code that rounds; write quantize(4)")
    matrix = _hadamard(block)

    def turned(rows):
        return jnp.matmul(rows, matrix, precision=lax.Precision.HIGHEST)

    def rotate(x, shared):
        signed = _flip(x.astype(jnp.float32), shared)
        rows = jnp.pad(signed, (0, -x.size % block)).reshape(-1, block)
        return turned(rows).reshape(-1)

    def encode(x, shared, private):
        values = rotate(x, shared)
        return Payload(code.encode(values, fold(shared, 1), private).data, x.size)

    def decode(payload, shared):
        size = payload.numel + -payload.numel % block
        values = code.decode(Payload(payload.data, size), fold(shared, 1))
        return _flip(turned(values.reshape(-1, block)).reshape(-1)[: payload.numel], shared)

    levels = plain = code.levels
    if plain is not None:
        levels = plain._replace(tally=lambda x: plain.tally(rotate(x, _SIGNS)))
    name = f"rotated({code.name}{'' if block == 128 else f', block={block}'})"
    return dataclasses.replace(
        code, name=name, encode=encode, decode=decode, levels=levels, entries=None
    )


def _hadamard(size):
    """`f32[size, size]`: symmetric and orthogonal, entries of one absolute value."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(size))


def _flip(x, key):
    """Flips signs at random."""
    sign = random_bits(key, x.shape) << 31
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ sign, jnp.float32)
