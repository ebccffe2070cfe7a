"""Blocks: neighbours in a bucket that share a scale, the last block perhaps incomplete."""

import jax
import jax.numpy as jnp

from jaxcomp.compressors.platforms import LANES, platform

_INDEXED = 2**31 - 1  # the greatest int32: JAX has no wider integers by default


def in_blocks(x: jax.Array, block: int, fill: str = "zero") -> jax.Array:
    """Cuts a bucket into blocks: `f32[numel] -> f32[ceil(numel / size), size]`, one a row.

    The size is the lesser of `block` and numel. `fill` says what completes the last block: "zero",
    or "edge" for its last value.
    """
    size = min(block, x.size)
    mode = "constant" if fill == "zero" else fill
    return jnp.pad(x, (0, -x.size % size), mode=mode).reshape(-1, size)


def from_blocks(blocks: jax.Array, numel: int) -> jax.Array:
    """Undoes `in_blocks`: `[num_blocks, size] -> [numel]`."""
    return blocks.reshape(-1)[:numel]


def indexed(numel: int, unit: int = 1) -> list[slice]:
    """Cuts a bucket where positions no longer fit in 32 bits, which is nearly always one piece.

    All pieces but the last are multiples of `unit`.
    """
    most = _INDEXED // unit * unit
    return [slice(start, min(start + most, numel)) for start in range(0, numel, most)]


def in_lanes(blocks: jax.Array) -> jax.Array:
    """Blocks `[n, size]`; on TPUs as `[n, size / 128, 128]`, if that divides.

    A TPU keeps arrays in tiles of 8 rows and 128 columns. In the second shape a block of 1,024 is a
    tile, as in the bucket; as a row it would be copied.
    """
    if platform() != "tpu" or blocks.shape[1] % LANES:
        return blocks
    return blocks.reshape(len(blocks), -1, LANES)


def per_block(values: jax.Array, blocks: jax.Array) -> jax.Array:
    """`[n]` with axes of length 1, to broadcast over blocks, `[n, ...]`."""
    return values.reshape(-1, *[1] * (blocks.ndim - 1))
