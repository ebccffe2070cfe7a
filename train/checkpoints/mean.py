"""Reads a checkpoint as the mean of the replicas' own parameters, to start another run."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas import protocol
from jaxcomp.replicas.shards import is_shard
from jaxcomp.sharded.levels import Tables
from train import checks
from train.checkpoints import store, trees
from train.checkpoints.store import Saved
from train.placement import sharded


def drifts(state: Any) -> dict[str, str]:
    """Maps the checkpoint path of each leaf of a state's drifts to its parameter's path.

    A checkpoint records it: there, a method's field `drift` looks like any other of that name.
    """
    found = {}
    for path, drift in protocol.fields({"state": state}, "drift").items():
        for param, _ in jax.tree_util.tree_leaves_with_path(drift):
            found[trees.path_of((*path, *param))] = trees.path_of(param)
    return found


def restore_mean(saved: Saved, like: Any, mesh: Mesh) -> Any:
    """Reads the parameters of a checkpoint, averaged over its replicas.

    Args:
      saved: The checkpoint, from `store.choose`.
      like: As for `store.restore_params`.
      mesh: Rows of replicas are spread over its devices meanwhile, if it divides them.

    Returns:
      The parameters, plus the mean over the replicas of each `drift` in the metadata.

    Raises:
      ValueError: As `store.restore_params`.
    """
    params = store.restore_params(saved, like)
    params_of = saved.metadata.get("drifts", {})
    if not checks.has_type(params_of, dict[str, str]):
        raise ValueError(f"{saved.path} has metadata with drifts={params_of!r:.80}; needs paths.")
    if not params_of:
        return params

    def wanted(name, leaf):
        if name not in params_of:
            return None
        spec = P() if leaf.shape[0] % mesh.size else P(mesh.axis_names)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    rows = store.restore_leaves(saved, wanted)
    leaves, treedef = jax.tree.flatten(params)
    names = trees.described(params)
    own = [[x for name, x in rows.items() if params_of[name] == param] for param in names]
    places = [x.sharding for x in leaves]
    return treedef.unflatten(jax.jit(_moved, out_shardings=places)(leaves, own))


def restore_whole(saved: Saved, natural: Any, mesh: Mesh) -> Any:
    """Reads the parameters to deploy onto all devices of a mesh, even if the run was sharded.

    These are what `restore_mean` reads, or what `QSDP.deployed` makes of shards.

    Args:
      saved: The checkpoint, from `store.choose`.
      natural: Shapes and dtypes of the unsharded parameters.
      mesh: Any mesh of the devices that get the parameters.

    Returns:
      The parameters, in natural shapes.

    Raises:
      ValueError: As `restore_mean`, or if the record of a sharded run is not of this program.
    """
    whole = NamedSharding(mesh, P())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    placed = functools.partial(jax.tree.map, place)
    config = saved.metadata.get("config")
    if not isinstance(config, dict) or config.get("qsdp") is None:
        return restore_mean(saved, placed(natural), mesh)
    checks.require_keys(saved.metadata, str(saved.path), num_replicas=int)
    checks.require_keys(
        {"fast": 1} | config, f"{saved.path}, config", qsdp=str, steps=int, fast=int
    )
    shards = sharded.saved(config, natural, saved.metadata["num_replicas"])
    params = restore_mean(saved, placed(shards), mesh)
    return sharded.whole(params, _levels(saved, shards, whole))


def _levels(saved: Saved, shards: Any, place: NamedSharding) -> Any:
    """`Tables` of each parameter of a sharded run, for what its levels decode."""

    def path(key):
        return f"state/levels/{trees.path_of(key)}/weights"

    def shape(shard):
        levels = shard.weights.levels
        return levels and (*shard.data.shape[1:-1], levels.start.size)

    keyed, treedef = jax.tree_util.tree_flatten_with_path(shards, is_leaf=is_shard)
    needed = {path(key): shape(shard) for key, shard in keyed if shape(shard)}
    like = {
        name: jax.ShapeDtypeStruct(size, "float32", sharding=place) for name, size in needed.items()
    }
    got = {name: kind for name, kind in saved.leaves.items() if name in needed}
    wanted = {name: f"float32[{','.join(map(str, size))}]" for name, size in needed.items()}
    trees.require_same(saved.path, got, saved.metadata, wanted)
    found = store.restore_leaves(saved, lambda name, leaf: like.get(name)) if like else {}
    return treedef.unflatten([Tables(found.get(path(key)), None) for key, _ in keyed])


def _moved(params, drifts):
    def moved(param, rows):
        # Shares of a fast axis are padded at their end.
        inside = tuple(map(slice, param.shape))
        change = sum(jnp.mean(x, axis=0)[inside] for x in rows)
        return (param + change).astype(param.dtype)

    return [moved(p, rows) if rows else p for p, rows in zip(params, drifts, strict=True)]
