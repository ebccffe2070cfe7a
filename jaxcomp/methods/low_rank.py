"""Matrices of a tree in batches of equal shapes, and thin factors with orthogonal columns."""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold, uniform
from jaxcomp.compressors.platforms import platform
from jaxcomp.methods import moments
from jaxcomp.replicas.layers import common_value, numbers, own_axes
from jaxcomp.replicas.types import varying_axes

_FEW = 4  # up to this rank, a product of factors is a sum


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of an array of two axes or more as a matrix.

    Its axes are cut where the factors have the fewest values: `[3, 3, width, out]` of a convolution
    before the last one, `[width, heads, size]` of attention behind the first.
    """
    return math.prod(shape[: cut(shape)]), math.prod(shape[cut(shape) :])


def shapes_of(tree: Any, exact: Callable[[str, Any], bool]) -> list[tuple[int, int] | None]:
    """Rows and columns of each leaf as a matrix; None for leaves that are sent in float32.

    Those are the ones that `exact(path, leaf)` holds for, vectors, and leaves without elements.
    """

    def shape_of(path, leaf):
        small = leaf.ndim < 2 or not leaf.size
        return None if small or exact(path, leaf) else sides(leaf.shape)

    return [common_value(shape_of, *keyed) for keyed in jax.tree.leaves_with_path(tree)]


def cut(shape: tuple[int, ...]) -> int:
    """How many axes of an array are the rows of its matrix, see `sides`."""
    values = lambda i: math.prod(shape[:i]) + math.prod(shape[i:])
    return min(range(len(shape) - 1, 0, -1), key=values)


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


def batched(arrays: Any, shape: tuple[int, int] | None = None) -> jax.Array:
    """One batch [k, m, n] of leaves that are a matrix, or one per layer, each.

    Args:
      arrays: Of leaves of equal matrices.
      shape: Rows and columns of a matrix; by default the last two axes.
    """
    return jnp.concatenate([x.reshape(-1, *(shape or x.shape[-2:])) for x in arrays])


def parted(batch: jax.Array, layers: list[tuple[int, ...]]) -> list[jax.Array]:
    """Undoes `batched`: one array per leaf, `[*layers, rows, columns]`, of a batch."""
    ends = itertools.accumulate(map(math.prod, layers))
    parts = jnp.split(batch, list(ends)[:-1])
    return [x.reshape(*one, *x.shape[1:]) for x, one in zip(parts, layers, strict=True)]


def drawn_for(key: Key, tree: Any, i: int, rows: int, columns: int) -> jax.Array:
    """`drawn` for the layers of a tree's leaf i: f32[rows, columns], or f32[layers, rows, columns].

    A layer's number is that of its leaf in the unstacked tree.
    """
    each = [drawn(key, number, rows, columns) for number in numbers(tree)[i]]
    return jnp.stack(each) if own_axes(tree)[i][:1] == (1,) else each[0]


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


def normalized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Columns of norm 1, whatever their scale, and their norms; columns of zeros stay zeros.

    Squares of 1e-30 or 1e30 are not float32 numbers, so that columns are scaled by their largest
    entry first.
    """
    largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    largest = jnp.where(largest < jnp.finfo(x.dtype).tiny, 1, largest)
    length = jnp.linalg.norm(x / largest, axis=-2, keepdims=True)
    return x / largest / jnp.where(length > 0, length, 1), length * largest


def orthogonal(x: jax.Array, key: Key) -> jax.Array:
    """Columns of norm 1, orthogonal to each other, that span those of `[k, n, rank]`, rank <= n.

    They are so for every finite input. Where columns depend on each other, or are zero, noise
    below their rounding error decides the rest: it is equal on all replicas. Cholesky's factors
    take a few kernels for a batch. Householder's QR takes several for each matrix: on a GPU three
    times as long as the rest of a small GPT's step.

    References:
      T. Fukaya et al., "Shifted Cholesky QR for Computing the QR Factorization of Ill-Conditioned
      Matrices", SIAM Journal on Scientific Computing, 2020, arXiv 1809.11085. Deviations: there are
      four rounds, five of more than 16 columns, as its three do not reach columns that depend on
      each other up to rounding. In each the columns are scaled to norm 1, so that the shift is a
      constant; all but the last have it.
    """
    _, rows, rank = x.shape
    eps = float(jnp.finfo(x.dtype).eps)
    noise = drawn(key, 0, rows, rank).astype(x.dtype)[None]  # columns of norm sqrt(rows / 12)
    x = normalized(x)[0] + 4 * eps * math.sqrt(12 / rows) * noise
    # More than the rounding errors of the products, which would make Cholesky's root NaN.
    shift = 32 * eps * math.sqrt(rank)
    shifted = 3 if rank <= 16 else 4
    for diagonal in (1 + shift,) * shifted + (1.0,):
        x = _made_orthogonal(x, product(transposed(x), x), diagonal)
    return x


def _made_orthogonal(x, gram, diagonal):
    """`x @ inverse(L).T / length`, where `L @ L.T` are the products of the columns at norm 1.

    Args:
      x: Columns, [k, n, rank].
      gram: Their products, [k, rank, rank].
      diagonal: What replaces the products of columns of norm 1 with themselves.
    """
    one = jnp.eye(x.shape[2], dtype=bool)
    length = jnp.sqrt(jnp.diagonal(gram, axis1=1, axis2=2))[:, None]
    gram = jnp.where(one, diagonal, gram / length / transposed(length))
    if x.shape[2] <= _FEW:
        return _eliminated(x / length, gram)
    if platform() == "cpu":
        return product(x / length, transposed(_inverse_root(gram)))
    low = transposed(length) * lax.linalg.cholesky(gram, symmetrize_input=False)
    return lax.linalg.triangular_solve(low, x, lower=True, transpose_a=True)


def _eliminated(x, gram):
    """Gauss's elimination of few columns: a chain that XLA fuses."""
    columns, rows = list(jnp.moveaxis(x, 2, 0)), list(jnp.moveaxis(gram, 1, 0))
    for i, j in itertools.combinations(range(len(columns)), 2):
        share = (rows[i][:, j] / rows[i][:, i])[:, None]
        columns[j], rows[j] = columns[j] - share * columns[i], rows[j] - share * rows[i]
    lengths = (jnp.sqrt(row[:, i])[:, None] for i, row in enumerate(rows))
    return jnp.stack([c / length for c, length in zip(columns, lengths, strict=True)], axis=2)


def _inverse_root(gram):
    """`inverse(L)`, where `L @ L.T` is `gram`: f32[k, rank, rank].

    By Gauss's elimination, in place. The library that JAX calls on CPUs for Cholesky's factors and
    triangular systems starts threads of its own, and those of several replicas wait for each other:
    with eight of them a step took a hundred times as long.
    """
    at = jnp.arange(gram.shape[2])

    def eliminate(i, a):
        here = at == i
        row = lax.dynamic_slice_in_dim(a, i, 1, axis=1)
        pivot = lax.dynamic_slice_in_dim(row, i, 1, axis=2)
        share = lax.dynamic_slice_in_dim(a, i, 1, axis=2) / pivot
        row = jnp.where(here, 1, row)  # what is eliminated makes room for the inverse
        below = jnp.where(here, 0, a) - share * row
        a = jnp.where((at > i)[:, None], below, a)
        return jnp.where(here[:, None], row * lax.rsqrt(pivot), a)

    return jnp.tril(lax.fori_loop(0, len(at), eliminate, gram))
