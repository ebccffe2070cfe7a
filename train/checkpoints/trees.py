"""The trees in checkpoints: their descriptions, and targets for a restore."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxcomp.launch.parts import path_of

_SHOWN = 5  # of the differing leaves, in an error


def like_replicas(like: Any, num_replicas: int, axis_name: str = "replica") -> Any:
    """Changes the number of replicas in the target of a restore, but not the mesh.

    Leaves whose first axis is sharded over the replica axis, alone or with others, get a leading
    axis of `num_replicas`. If the number of devices does not divide it, they shard the first other
    axis that they divide, or each holds the whole leaf. Pass the result of `load` to
    `jaxcomp.resize`.

    Args:
      like: Tree of `jax.ShapeDtypeStruct` or arrays, for the present mesh.
      num_replicas: The number of replicas in the checkpoint, at least 1.
      axis_name: The mesh axis of the replicas.

    Returns:
      The same tree, with `jax.ShapeDtypeStruct` for the per-replica leaves.
    """

    def changed(leaf):
        sharding = getattr(leaf, "sharding", None)
        spec = tuple(getattr(sharding, "spec", ()))
        if axis_name not in (names := tuple(jax.tree.leaves(spec[:1]))):
            return leaf
        shape, mesh = (num_replicas, *leaf.shape[1:]), sharding.mesh
        spec = [None, *spec[1:], *[None] * (len(shape) - len(spec))]
        for axis, size in enumerate(shape):
            if size % math.prod(mesh.shape[name] for name in names) == 0 and spec[axis] is None:
                spec[axis] = names
                break
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(changed, like)


def described(tree: Any) -> dict[str, str]:
    """Maps each leaf's path to its dtype and shape: `params/mlp/kernel` to `float32[128,512]`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        path_of(path): (
            f"{getattr(leaf, 'dtype', type(leaf).__name__)}[{','.join(map(str, np.shape(leaf)))}]"
        )
        for path, leaf in leaves
    }


def without_empty(tree: Any) -> Any:
    """Replaces empty leaves with None: Orbax cannot write empty arrays."""
    return jax.tree.map(lambda leaf: None if math.prod(np.shape(leaf)) == 0 else leaf, tree)


def require_same(
    path: Path, got: dict[str, str], metadata: dict[str, Any], needed: dict[str, str]
) -> None:
    """Raises a ValueError that lists the leaves in which a checkpoint differs."""
    names = [name for name in got | needed if got.get(name) != needed.get(name)]
    if not names:
        return
    listed = "; ".join(
        f"{name}: got {got.get(name, 'nothing')}, needed {needed.get(name, 'nothing')}"
        for name in names[:_SHOWN]
    )
    more = "; ..." if len(names) > _SHOWN else ""
    replicas = metadata.get("num_replicas", "an unknown number of")
    raise ValueError(
        f"the checkpoint {path} is of another model, optimizer or number of replicas (it has "
        f"{replicas}): {len(names)} leaves differ. {listed}{more}. Use the configuration that it "
        "was saved with, or another directory"
    )
