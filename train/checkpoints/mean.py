"""The parameters that another run begins with: the mean of the replicas' own ones."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas import protocol
from train.checkpoints import store, trees
from train.placement import sharded


def drifts(state: Any) -> dict[str, str]:
    """Of each leaf of a state's drifts its path in a checkpoint: that of its parameter.

    It is written down with a checkpoint: there, a field `drift` of a method and another one of that
    name look alike.
    """
    found = {}
    for path, drift in protocol.fields({"state": state}, "drift").items():
        for param, _ in jax.tree_util.tree_leaves_with_path(drift):
            found[trees.path_of((*path, *param))] = trees.path_of(param)
    return found


def restore_mean(directory: str | Path, like: Any, mesh: Mesh) -> Any:
    """Reads the parameters of the newest checkpoint, as if its replicas had met before the save.

    Args:
      directory: Where the checkpoints are.
      like: As for `store.restore_params`.
      mesh: Over whose devices rows of replicas are spread meanwhile, where it divides them.

    Returns:
      The parameters, plus the mean over the replicas of each `drift` that the metadata name.

    Raises:
      ValueError: As `store.restore_params`.
    """
    params = store.restore_params(directory, like)
    of = store.read_metadata(directory).get("drifts", {})
    if not of:
        return params

    def wanted(name, saved):
        if name not in of:
            return None
        spec = P() if saved.shape[0] % mesh.size else P(mesh.axis_names)
        return jax.ShapeDtypeStruct(saved.shape, saved.dtype, sharding=NamedSharding(mesh, spec))

    rows = store.restore_leaves(directory, wanted)
    leaves, treedef = jax.tree.flatten(params)
    names = trees.described(params)
    own = [[x for name, x in rows.items() if of[name] == param] for param in names]
    places = [x.sharding for x in leaves]
    return treedef.unflatten(jax.jit(_moved, out_shardings=places)(leaves, own))


def restore_whole(directory: str | Path, natural: Any, mesh: Mesh) -> Any:
    """Reads what `restore_mean` does onto all devices of a mesh, of runs in shards too.

    Args:
      directory: Where the checkpoints are.
      natural: Shapes and dtypes of the parameters where they are in no shards.
      mesh: Any, of the devices that hold the parameters.

    Returns:
      The parameters, in natural shapes.

    Raises:
      ValueError: As `restore_mean`.
    """
    saved = store.read_metadata(directory)
    if saved.get("config", {}).get("qsdp") is not None:
        natural = sharded.shapes(natural, saved["num_replicas"])
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    return sharded.joined(restore_mean(directory, jax.tree.map(placed, natural), mesh))


def _moved(params, drifts):
    def moved(param, rows):
        # Shares of a fast axis are filled up at their end.
        inside = tuple(map(slice, param.shape))
        change = sum(jnp.mean(x, axis=0)[inside] for x in rows)
        return (param + change).astype(param.dtype)

    return [moved(p, rows) if rows else p for p, rows in zip(params, drifts, strict=True)]
