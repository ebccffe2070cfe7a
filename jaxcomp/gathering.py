"""A layer's weights from its shards, and its shards' gradient from its own: one VJP."""

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp import wire
from jaxcomp.compressors import Compressor, Key
from jaxcomp.compressors.fused import fused
from jaxcomp.sharding import num_replicas, to_varying
from jaxcomp.shards import Shard, cut, natural, numel_of


class Layer(NamedTuple):
    """The static facts of leaves that travel as one message."""

    axis_name: str
    weights: Compressor
    gradients: Compressor
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]  # of a shard of each leaf
    dtypes: tuple[Any, ...]


def gather_layer(shards: list[Shard], axis_name: str, after: Any = None) -> list[jax.Array]:
    """What `QSDP.gather` and `layer` do, for the `Shard`s of one layer.

    Args:
      shards: Each with a key; the first one's is the layer's.
      axis_name: The mesh axis of the replicas.
      after: A tree of arrays; nothing is sent before they are known.

    Returns:
      The parameters, of a type that varies.
    """
    sizes = [numel_of(shard.shape, num_replicas(axis_name)) for shard in shards]
    for shard, size in zip(shards, sizes, strict=True):
        if shard.data.shape != (size,) or shard.key is None:
            raise ValueError(
                f"got shards {shard.data.shape} {'with' if shard.key else 'without'} a key of a "
                f"parameter {shard.shape}, need ({size},) and a key: give what QSDP.local "
                "returns, and scan over stacked parameters."
            )
    layer = Layer(
        axis_name,
        fused(*[(shard.weights, size) for shard, size in zip(shards, sizes, strict=True)]),
        fused(*[(shard.gradients, size) for shard, size in zip(shards, sizes, strict=True)]),
        tuple(shard.shape for shard in shards),
        tuple(sizes),
        tuple(jnp.dtype(shard.data.dtype) for shard in shards),
    )
    key = shards[0].key
    return _gathered(layer, [shard.data for shard in shards], key, _token(after, key.count))


def _token(after, count):
    """u32[], always zero, which XLA cannot tell: what is sent waits for `after`.

    XLA:CPU drops optimization barriers before it orders a program, and would gather all layers
    first, or take the second gather of a layer for the first.
    """
    leaves = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    seen = sum(jnp.isnan(x.reshape(-1)[0]).astype(jnp.uint32) for x in leaves)
    return seen & (count >> 31).astype(jnp.uint32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(layer: Layer, shards: list[jax.Array], key: Key, token) -> list[jax.Array]:
    """The parameters of a layer, from this replica's flat shards."""
    wide = jnp.result_type(jnp.float32, *layer.dtypes)
    flat = jnp.concatenate([shard.astype(wide) for shard in shards])
    bits = jnp.dtype(f"uint{8 * flat.dtype.itemsize}")
    flat = lax.bitcast_convert_type(
        lax.bitcast_convert_type(flat, bits) ^ token.astype(bits), flat.dtype
    )
    full, _ = wire.gather(flat, layer.weights, key, layer.axis_name)
    # Equal by type until here; from here on varying, so that JAX sums no gradient in float32.
    rows = to_varying(full, layer.axis_name).reshape(-1, flat.size)
    columns = jnp.split(rows, _cuts(layer), axis=1)
    return [
        natural(column, shape).astype(dtype)
        for column, shape, dtype in zip(columns, layer.shapes, layer.dtypes, strict=True)
    ]


def _gathered_fwd(layer, shards, key, token):
    return _gathered(layer, shards, key, token), key


def _gathered_bwd(layer, key, grads):
    wide = jnp.result_type(jnp.float32, *layer.dtypes)
    num_shards = lax.axis_size(layer.axis_name)
    chunks = jnp.concatenate([cut(grad.astype(wide), 0, num_shards) for grad in grads], axis=1)
    mean, _ = wire.reduce_scatter(chunks.reshape(-1), layer.gradients, key, layer.axis_name)
    pieces = jnp.split(mean, _cuts(layer))
    owned = [
        _without_padding(piece, math.prod(shape), layer.axis_name).astype(dtype)
        for piece, shape, dtype in zip(pieces, layer.shapes, layer.dtypes, strict=True)
    ]
    return owned, None, None


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _cuts(layer):
    return list(itertools.accumulate(layer.sizes))[:-1]


def _without_padding(piece, numel, axis_name):
    """Zeros behind the parameter's end, where an optimizer would make steps of rounding noise."""
    if piece.size * lax.axis_size(axis_name) == numel:
        return piece
    position = lax.axis_index(axis_name) * piece.size + lax.iota(jnp.int32, piece.size)
    return jnp.where(position < numel, piece, 0.0)
