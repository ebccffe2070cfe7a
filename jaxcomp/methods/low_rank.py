"""Matrices of a tree in batches of equal shapes, and thin factors with orthogonal columns."""

import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold, uniform
from jaxcomp.compressors.platforms import platform
from jaxcomp.methods import moments
from jaxcomp.replicas.types import varying_axes

_FEW = 4  # up to this rank, a product of factors is a sum


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of an array of two axes or more as a matrix.

    Its axes are cut where the factors have the fewest values: `[3, 3, width, out]` of a convolution
    before the last one, `[width, heads, size]` of attention behind the first.
    """
    cuts = ((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(len(shape) - 1, 0, -1))
    return min(cuts, key=sum)


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
    the matrix. On TPUs the sum takes more kernels and more memory than the product.
    """
    rank = left.shape[-1]
    if rank > _FEW or platform() == "tpu":
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

    Noise is added, so that a factor of zeros, from a zero gradient, spans something. Cholesky's
    factors take a few kernels for a batch. Householder's QR takes several for each matrix: on a GPU
    three times as long as the rest of a small GPT's step.

    References:
      T. Fukaya et al., "Shifted Cholesky QR for Computing the QR Factorization of Ill-Conditioned
      Matrices", SIAM Journal on Scientific Computing, 2020, arXiv 1809.11085, its three rounds.
      Deviations: columns have norm 1 before each round, so that the shift is a constant, and the
      second round has it, too.
    """
    x = x + 1e-12 * drawn(key, 0, *x.shape[1:]).astype(x.dtype)[None]
    shift = 32 * float(jnp.finfo(x.dtype).eps)
    for diagonal in (1 + shift, 1 + shift, 1.0):
        x = x / jnp.sqrt(jnp.sum(x * x, axis=1, keepdims=True))
        one = jnp.eye(x.shape[2], dtype=bool)
        x = _made_orthogonal(x, jnp.where(one, diagonal, product(transposed(x), x)))
    return x


def _made_orthogonal(x, gram):
    """`x @ inverse(L).T`, where `L @ L.T` are the products of the columns, `[k, rank, rank]`."""
    if x.shape[2] > _FEW:
        low = lax.linalg.cholesky(gram, symmetrize_input=False)
        return lax.linalg.triangular_solve(low, x, lower=True, transpose_a=True)
    # Gauss's elimination of few columns is a chain that XLA fuses.
    columns, rows = list(jnp.moveaxis(x, 2, 0)), list(jnp.moveaxis(gram, 1, 0))
    for i, j in itertools.combinations(range(len(columns)), 2):
        share = (rows[i][:, j] / rows[i][:, i])[:, None]
        columns[j], rows[j] = columns[j] - share * columns[i], rows[j] - share * rows[i]
    lengths = (jnp.sqrt(row[:, i])[:, None] for i, row in enumerate(rows))
    return jnp.stack([c / length for c, length in zip(columns, lengths, strict=True)], axis=2)
