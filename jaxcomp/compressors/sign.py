"""One bit a value, and a scale."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._checks import require_choice, require_integer
from jaxcomp._printing import call
from jaxcomp.compressors.base import SCALE_DTYPES, Compressor, Payload
from jaxcomp.compressors.blocks import from_blocks, in_blocks, in_lanes, per_block
from jaxcomp.compressors.packing import pack, unpack
from jaxcomp.compressors.platforms import by_platform


def sign(
    scale: str = "l1",
    block: int | None = None,
    scale_dtype: jax.typing.DTypeLike = "float32",
) -> Compressor:
    """Sends the sign of each value, and one scale per block or per bucket: 1 bit per parameter.

    The scales cost `s / block` bits per parameter more, or s bits per bucket, where s is the number
    of bits of `scale_dtype`. `sgn(0)` is +1; a block of zeros decodes to zeros. With scale "l1" it
    is a contraction: alpha = 1 / block, or (1 - 2**-16) / block for a bfloat16 scale. With one
    scale per bucket alpha is 1 / numel, which is not stated as it depends on the bucket. It keeps
    64% of the squared norm of a Gaussian bucket. "l2" is not a contraction.

    Args:
      scale: "l1", the mean of `|x|`, which has the least squared error; or "l2", the root mean
        square, as in DeepSpeed's 1-bit optimizers.
      block: Neighbours that share a scale; None for one scale per bucket.
      scale_dtype: Dtype of the scales: float32, bfloat16 or float16.

    Raises:
      ValueError: At construction, for arguments outside these ranges.

    References:
      H. Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
      Convergence Speed", ICML 2021, arXiv 2102.02888.
      S. P. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
      Schemes", ICML 2019, arXiv 1901.09847 (the l1 scale).
    """
    dtype = jnp.dtype(scale_dtype)
    require_choice("sign", "scale", scale, "l1", "l2")
    require_integer("sign", "block", block, "block=1024", none="one scale per bucket")
    require_choice("sign", "scale_dtype", dtype.name, *SCALE_DTYPES)

    def encode(x, shared, private):
        size = min(block or x.size, x.size)
        blocks = in_lanes(in_blocks(jnp.abs(x) if scale == "l1" else x * x, size))
        sums = jnp.sum(blocks, axis=tuple(range(1, blocks.ndim)))
        # As floats: the count of a very large bucket may not fit in 32 bits.
        last = jnp.full(1, x.size - size * (sums.size - 1), sums.dtype)
        means = sums / jnp.pad(last, (sums.size - 1, 0), constant_values=float(size))
        scales = means if scale == "l1" else jnp.sqrt(means)
        marks, scales = _in_memory((x >= 0).astype(jnp.uint8), scales.astype(dtype))
        return Payload((pack(marks, 1), scales), x.size)

    def decode(payload, shared):
        packed, scales = payload.data
        numel = payload.numel
        bits = in_lanes(in_blocks(unpack(packed, 1, numel), block or numel))
        signs = jnp.where(bits == 1, 1.0, -1.0)
        return from_blocks(signs * per_block(scales.astype(jnp.float32), signs), numel)

    scale_bits = 8 * dtype.itemsize
    return Compressor(
        name=call(sign, scale=scale, block=block, scale_dtype=dtype.name),
        encode=encode,
        decode=decode,
        bits_per_parameter=1.0 + (scale_bits / block if block else 0.0),
        contraction=_contraction(scale, block, dtype.name),
    )


def _in_memory(*arrays):
    """Arrays that a GPU writes before anything reads them.

    A thread there computes one word of the message. XLA would let it compute what the word's 32
    values come from, or alone a whole block's sum: more than half of a step of `zero_one_adam`.
    """
    same = lambda *arrays: arrays
    once = lambda *arrays: tuple(lax.optimization_barrier(arrays))
    return by_platform(*arrays, cpu=same, gpu=once, default=same)


def _contraction(scale, block, scale_dtype):
    if scale == "l2" or block is None or scale_dtype == "float16":
        return None
    return (1 - 2.0**-16 if scale_dtype == "bfloat16" else 1.0) / block
