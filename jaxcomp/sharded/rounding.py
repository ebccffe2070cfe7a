"""The weights that layers computed with, from shards: what to evaluate and to deploy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.compressors.base import Compressor, Key
from jaxcomp.replicas.shards import Shard, is_shard
from jaxcomp.replicas.types import is_mapped

_BLOCK = 256  # values with which a code is tried


def draws(code: Compressor) -> bool:
    """Whether what a code makes of values depends on its keys: on noise, shifts, signs or masks.

    Then each step computes with other weights. Found by tracing, so that it holds for any code.
    """
    found = []

    def coded(seed, count):
        shared, private = Key(count, seed), Key(count, seed + jnp.uint32(1))
        x = jnp.linspace(-1.0, 1.0, _BLOCK)
        found.append(is_mapped(code.decode(code.encode(x, shared, private), shared)))
        return seed

    numbers = jnp.arange(2)
    jax.eval_shape(jax.vmap(coded), numbers.astype(jnp.uint32), numbers)
    return found[0]


def decoded_shards(shards: Any, levels: Any) -> Any:
    """Shards with the values that all replicas decode, where these are the same in each step.

    A code that `draws` is unbiased noise around the shards: those stay as they are.

    Args:
      shards: A tree of `Shard`s, with rows of any replicas: `[rows, *stack, numel]`.
      levels: `levels.Tables` of each; None for fixed levels.
    """
    leaves, treedef = jax.tree.flatten(shards, is_leaf=is_shard)
    tables = treedef.flatten_up_to(levels)
    return treedef.unflatten(map(_decoded_shard, leaves, tables))


def _decoded_shard(shard: Shard, tables: Any) -> Shard:
    if not is_shard(shard) or draws(shard.weights):
        return shard
    code, dtype = shard.weights, shard.data.dtype

    def coded(row, table):
        key = Key(0, 0, table)
        wide = row.astype(jnp.result_type(jnp.float32, dtype))
        return code.decode(code.encode(wide, key, key), key).astype(dtype)

    for _ in shard.data.shape[1:-1]:
        coded = jax.vmap(coded)
    rows = jax.vmap(coded, in_axes=(0, None))
    return dataclasses.replace(shard, data=rows(shard.data, tables.weights))
