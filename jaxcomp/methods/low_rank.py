"""Matrices of a tree in batches of equal shapes, and thin factors with orthogonal columns."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold, uniform
from jaxcomp.methods import moments
from jaxcomp.replicas.types import varying_axes

_FEW = 4  # up to this rank, a product of factors is a sum


def batches(leaves: list[Any], shapes: list[tuple[int, int] | None]) -> list[list[int]]:
    """Groups matrices of equal shapes, dtypes and shards; returns their places in `leaves`.

    Args:
      leaves: Leaves of a tree.
      shapes: Rows and columns of each leaf as a matrix; None for other leaves.
    """
    groups: dict[Any, list[int]] = {}
    for i, (x, shape) in enumerate(zip(leaves, shapes, strict=True)):
        if shape is not None:
            groups.setdefault((shape, moments.wide(x.dtype), varying_axes(x)), []).append(i)
    return list(groups.values())


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The products of two batches of matrices, in full precision."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def outer(left: jax.Array, right: jax.Array) -> jax.Array:
    """The products `left @ right.T` of two batches of factors [k, m, rank] and [k, n, rank].

    With few columns it is written as a sum: XLA fuses that into its reader, and needs no memory for
    the matrix.
    """
    rank = left.shape[-1]
    if rank > _FEW:
        return product(left, transposed(right))
    columns = (left[..., :, None, i] * right[..., None, :, i] for i in range(rank))
    return functools.reduce(operator.add, columns)


def transposed(x: jax.Array) -> jax.Array:
    """Each matrix of a batch, transposed."""
    return jnp.swapaxes(x, -1, -2)


def drawn(key: Key, number: int, rows: int, columns: int) -> jax.Array:
    """A matrix of uniform noise in [-1/2, 1/2), equal on all replicas: f32[rows, columns]."""
    return uniform(fold(key, number), (rows * columns,)).reshape(rows, columns) - 0.5


def orthogonal(x: jax.Array, key: Key) -> jax.Array:
    """Columns of norm 1, orthogonal to each other, that span those of `[k, n, rank]`.

    Noise is added, so that a factor of zeros, from a zero gradient, spans something.
    """
    return jnp.linalg.qr(x + 1e-12 * drawn(key, 0, *x.shape[1:]).astype(x.dtype)[None])[0]
