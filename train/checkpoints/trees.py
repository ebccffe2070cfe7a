"""The trees in checkpoints: their descriptions, and targets for a restore."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomp.launch.parts import path_of

_SHOWN = 5  # of the differing leaves, in an error


def with_rows(like: Any, saved: Any, mesh: Mesh, row_axes: Sequence[str]) -> Any:
    """Changes the target of a restore to the shapes of another number of replicas.

    Where shapes differ, `row_axes` shard the first axis that they divide and nothing else shards,
    or each device holds the whole leaf. Pass the result of `load` to `jaxcomp.resize`.

    Args:
      like: Tree of `jax.ShapeDtypeStruct` or arrays, for the present mesh.
      saved: The same tree with the shapes in the checkpoint.
      mesh: The present mesh.
      row_axes: Its axes of replicas.
    """
    count = math.prod(mesh.shape[name] for name in row_axes)

    def changed(leaf, old):
        if np.shape(leaf) == np.shape(old):
            return leaf
        spec = [None, *leaf.sharding.spec[1:]]
        spec += [None] * (len(old.shape) - len(spec))
        for axis, size in enumerate(old.shape):
            if size % count == 0 and spec[axis] is None:
                spec[axis] = tuple(row_axes)
                break
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(old.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(changed, like, saved)


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
