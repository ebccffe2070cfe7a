"""Codes of few bits: each bin decodes to the mean of the values in it."""

import jax.numpy as jnp
from jax import lax

from jaxcomp._checks import require_integer
from jaxcomp._printing import call
from jaxcomp.compressors.base import Compressor, Payload
from jaxcomp.compressors.blocks import from_blocks, in_blocks
from jaxcomp.compressors.packing import pack, unpack


def bin_means(bits: int, block: int | None = None) -> Compressor:
    """Encodes each value as its bin, and sends each bin's mean, so that no outlier sets the grid.

    Inner bins are 6 sigma / 2**bits wide, around the mean; the two outer ones hold all that lies
    beyond. Costs `bits` bits per parameter, and `32 * 2**bits` bits per bucket or block for the
    means. Decoding keeps the sum of the values and never increases the squared norm, but promises
    no contraction. A value that is alone in its bin is exact, and so are equal values.

    Meant for what a sparsifier keeps, as in `compose(top_k(1 / 64, block=4096), bin_means(2))`.

    Args:
      bits: Width of a code, 1 to 4.
      block: Neighbours that share their bins; None for the whole bucket.

    Raises:
      ValueError: At construction, for arguments outside these ranges.

    References:
      A. Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_, 2025, with 2 bits. The bins are those of its code, moved
      by half a bin, so that as many lie above the mean as below.
    """
    require_integer("bin_means", "bits", bits, "bin_means(2), or quantize(8)", most=4)
    require_integer("bin_means", "block", block, "block=1024", none="the whole bucket")
    num_bins = 2**bits

    def encode(x, shared, private):
        size = block or x.size
        rows, used = in_blocks(x, size), in_blocks(jnp.ones_like(x), size) > 0
        mean_of = lambda values, used: (
            jnp.sum(jnp.where(used, values, 0.0), axis=-1, keepdims=True)
            / jnp.maximum(jnp.sum(used, axis=-1, keepdims=True), 1).astype(values.dtype)
        )
        centred = rows - mean_of(rows, used)
        width = jnp.sqrt(mean_of(jnp.square(centred), used)) * (6 / num_bins)
        steps = jnp.floor(centred * jnp.where(width > 0, 1 / width, 0.0)) + num_bins // 2
        codes = jnp.clip(steps, 0, num_bins - 1)
        # One reduction over all bins: a GPU would run two kernels for each.
        bins = jnp.arange(num_bins, dtype=codes.dtype).reshape(1, -1, 1)
        inside = used[:, None] & (codes[:, None] == bins)  # [blocks, bins, size]
        # A value that is not finite is in no bin, and makes all means of its block NaN.
        bad = jnp.where(jnp.isfinite(width), 0.0, jnp.nan)
        table = mean_of(rows[:, None], inside)[..., 0] + bad
        codes = from_blocks(codes.astype(jnp.uint8), x.size)
        return Payload((pack(codes, bits), table), x.size)

    def decode(payload, shared):
        packed, table = payload.data
        codes = in_blocks(unpack(packed, bits, payload.numel), block or payload.numel)
        # Selects, and not a gather: they fuse.
        values = jnp.zeros(codes.shape, table.dtype)
        for code in range(num_bins):
            values = lax.select(
                codes == code, jnp.broadcast_to(table[:, code, None], codes.shape), values
            )
        return from_blocks(values, payload.numel)

    return Compressor(
        name=call(bin_means, bits=bits, block=block),
        encode=encode,
        decode=decode,
        bits_per_parameter=bits + (32 * num_bins / block if block else 0.0),
    )
