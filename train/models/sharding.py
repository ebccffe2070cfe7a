"""How a decoder's parameters are cut over fast devices, by path."""

import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.compressors.policies import path_of
from train.models.decoder import STACKED

RULES = (
    (r"^embed/embedding$|^position$|(out|down)/kernel$", 1),
    (r"(qkv|gate|up|head)/kernel$", 0),
)
"""Patterns of paths, and the axis that is cut, without that of a stack; others are whole."""


def specs(params: Any, mesh: Mesh | AbstractMesh, axis_name: str) -> Any:
    """The PartitionSpec of each parameter of a decoder, for `NamedSharding`.

    Args:
      params: The parameters, or their shapes. One whose size does not divide stays whole.
      mesh: Any mesh.
      axis_name: Name of the axis over which parameters are cut, and gathered for use.
    """

    def spec(key, leaf):
        path = path_of(key)
        for pattern, axis in RULES:
            axis += re.search(STACKED, path) is not None
            if re.search(pattern, path) and leaf.shape[axis] % mesh.shape[axis_name] == 0:
                return P(*[None] * axis, axis_name)
        return P()

    return jax.tree_util.tree_map_with_path(spec, params)
