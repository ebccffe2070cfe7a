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
    weights: tuple[Compressor, ...]
    gradients: tuple[Compressor, ...]
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
        tuple(shard.weights for shard in shards),
        tuple(shard.gradients for shard in shards),
        tuple(shard.shape for shard in shards),
        tuple(sizes),
        tuple(jnp.dtype(shard.data.dtype) for shard in shards),
    )
    key = shards[0].key
    tables = [shard.levels or (None, None) for shard in shards]
    keys = [key._replace(levels=list(of_code)) for of_code in zip(*tables, strict=True)]
    counters = [shard.counter for shard in shards]
    data = [shard.data for shard in shards]
    return _gathered(layer, data, keys, counters, _token(after, key.count))


def _token(after, count):
    """u32[], always zero, which XLA cannot tell: what is sent waits for `after`.

    XLA:CPU drops optimization barriers before it orders a program, and would gather all layers
    first, or take the second gather of a layer for the first.
    """
    leaves = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x.dtype, jnp.floating) and x.size]
    seen = sum(jnp.isnan(x.reshape(-1)[0]).astype(jnp.uint32) for x in leaves)
    return seen & (count >> 31).astype(jnp.uint32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(layer: Layer, shards, keys: list[Key], counters, token) -> list[jax.Array]:
    """The parameters of a layer, from this replica's flat shards; keys of weights, of gradients."""
    wide = jnp.result_type(jnp.float32, *layer.dtypes)
    flat = jnp.concatenate([shard.astype(wide) for shard in shards])
    bits = jnp.dtype(f"uint{8 * flat.dtype.itemsize}")
    flat = lax.bitcast_convert_type(
        lax.bitcast_convert_type(flat, bits) ^ token.astype(bits), flat.dtype
    )
    full, _ = wire.gather(flat, _fused(layer.weights, layer), keys[0], layer.axis_name)
    # Equal by type until here; from here on varying, so that JAX sums no gradient in float32.
    rows = to_varying(full, layer.axis_name).reshape(-1, flat.size)
    columns = jnp.split(rows, _cuts(layer), axis=1)
    return [
        natural(column, shape).astype(dtype)
        for column, shape, dtype in zip(columns, layer.shapes, layer.dtypes, strict=True)
    ]


def _gathered_fwd(layer, shards, keys, counters, token):
    return _gathered(layer, shards, keys, counters, token), (keys[1], counters)


def _gathered_bwd(layer, saved, grads):
    key, counters = saved
    wide = jnp.result_type(jnp.float32, *layer.dtypes)
    num_shards = lax.axis_size(layer.axis_name)
    parts = [cut(grad.astype(wide), 0, num_shards) for grad in grads]
    code, chunks = _fused(layer.gradients, layer), jnp.concatenate(parts, axis=1)
    mean, _ = wire.reduce_scatter(chunks.reshape(-1), code, key, layer.axis_name)
    pieces = jnp.split(mean, _cuts(layer))
    owned = [
        _without_padding(piece, math.prod(shape), layer.axis_name).astype(dtype)
        for piece, shape, dtype in zip(pieces, layer.shapes, layer.dtypes, strict=True)
    ]
    tallies = [
        None if counter is None else _counted(part, counter, code, layer.axis_name)
        for part, counter, code in zip(parts, counters, layer.gradients, strict=True)
    ]
    return owned, None, tallies, None


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _fused(codes, layer):
    return fused(*zip(codes, layer.sizes, strict=True))


def _counted(part, counter, code, axis_name):
    """The tally of this replica's gradient in its own chunk; with the others', of all chunks."""
    own = part[lax.axis_index(axis_name)]
    tally = lambda: to_varying(code.levels.tally(own), axis_name)
    return lax.cond(counter[0] > 0, tally, lambda: jnp.zeros_like(counter))


def _cuts(layer):
    return list(itertools.accumulate(layer.sizes))[:-1]


def _without_padding(piece, numel, axis_name):
    """Zeros behind the parameter's end, where an optimizer would make steps of rounding noise."""
    if piece.size * lax.axis_size(axis_name) == numel:
        return piece
    position = lax.axis_index(axis_name) * piece.size + lax.iota(jnp.int32, piece.size)
    return jnp.where(position < numel, piece, 0.0)
