"""Checks that the replicas' copies of one value are equal, bit for bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.types import names_of, sums_over_shards, to_varying


def replica_spread(params: Any, mesh: Mesh, axis_name: str | tuple[str, ...]) -> jax.Array:
    """Compares the replicas' copies of values that should be equal: 0 if they are, bit for bit.

    JAX's types promise equality of replicated values but lose track in some operations; this
    compares the copies on the devices.

    Args:
      params: Pytree of arrays that are replicated over `axis_name`.
      mesh: The mesh they live on.
      axis_name: The axis of the replicas, or that and the axis of each replica's devices.

    Returns:
      u32[]: the largest minus the smallest of the replicas' checksums of bits. Sends two
      all-reduces of 4 bytes.
    """
    leaves = jax.tree.leaves(params)
    specs = tuple(getattr(x.sharding, "spec", P()) for x in leaves)
    return _program(mesh, axis_name, specs)(leaves)


@functools.lru_cache(maxsize=16)
def _program(mesh, axis_name, specs):
    """The jitted comparison, cached for repeated calls."""
    spread = functools.partial(_spread, axis_name)
    return jax.jit(jax.shard_map(spread, mesh=mesh, in_specs=(list(specs),), out_specs=P()))


def _spread(axis_name, leaves):
    total = sum((_checksum(x) for x in to_varying(leaves, axis_name)), start=jnp.uint32(0))
    (total,) = sums_over_shards([total], *names_of(axis_name))
    return lax.pmax(total, axis_name) - lax.pmin(total, axis_name)


def _checksum(x) -> jax.Array:
    """u32[]: a sum of all words of bits, each times an odd number given by its position."""
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    words = lax.bitcast_convert_type(x, jnp.uint8).reshape(-1).astype(jnp.uint32)
    weights = 2 * lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * weights, dtype=jnp.uint32)
