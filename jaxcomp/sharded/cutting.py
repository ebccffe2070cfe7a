"""Cutting parameters into shards and putting them together, outside of a step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxcomp.compressors.base import Key, identity
from jaxcomp.compressors.policies import path_of, policy_of
from jaxcomp.exchange import averaging, wire
from jaxcomp.replicas.shards import Shard, cut, natural

_NO_KEY = Key(0, 0)


def planned(fsdp: Any, stacked: Callable, path: Any, leaf: Any) -> Shard:
    """A shard of a parameter, without its array, with the codes of a `QSDP`.

    Raises:
      ValueError: If it is not floating, or its code for the fast axis learns levels.
    """
    name = path_of(path)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"the parameter {name!r} has dtype {leaf.dtype}, but only floating ones are sharded; "
            "keep others out of the parameters."
        )
    shape = leaf.shape[1:] if stacked(name, leaf) else leaf.shape
    one = jax.ShapeDtypeStruct(shape, leaf.dtype)
    policies = fsdp.weights, fsdp.gradients, fsdp.fast_gradients
    if fsdp.exact(name, one):
        policies = (averaging.EXACT,) * 3
    weights, gradients, fast = (policy_of(policy)(name, one) for policy in policies)
    if fast.levels is not None:
        raise ValueError(
            f"fast_gradients is {fast.name} for {name!r}, but levels are learned from what "
            "crosses the slow axis only; write quantize(...)."
        )
    stack = leaf.shape[: leaf.ndim - len(shape)]
    return Shard(None, one.shape, weights, gradients, fast, stack)


def own(axes: tuple[str, ...], shard: Shard, leaf: jax.Array) -> Shard:
    """This device's row of a parameter, `[1, *stack, numel]`."""
    rows = cut(leaf, leaf.ndim - len(shard.shape), lax.axis_size(axes))
    return dataclasses.replace(shard, data=rows[lax.axis_index(axes)][None])


def whole(axes: tuple[str, ...], shard: Shard) -> jax.Array:
    """A parameter from its rows on all devices."""
    rows = shard.data.reshape(-1)
    for axis in reversed(axes):
        rows, _ = wire.gather(rows, identity(), _NO_KEY, axis)
    return natural(rows.reshape(-1, *shard.data.shape[1:]), shard.shape)


def on(mesh: Mesh, axes: tuple[str, ...], function: Callable, in_specs: Any, out_specs: Any):
    """A jitted `shard_map` of a function on a mesh, which must have these axes."""
    missing = [name for name in axes if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"the mesh has no axis {missing[0]!r}; its axes are {tuple(mesh.axis_names)}."
        )
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
