"""How a decoder's parameters are cut over fast devices: rules by their paths, first match first."""

import re
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.compressors.policies import path_of
from train.models.decoder import STACKED

RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"^embed/embedding$", ("tensor", "fsdp")),
    (r"^position$", (None, "fsdp")),
    (r"(qkv|gate|up|head)/kernel$", ("fsdp", "tensor")),
    (r"(out|down)/kernel$", ("tensor", "fsdp")),
    (r"(qkv|gate|up|head)/bias$", ("tensor",)),
    (r"", ()),  # norms, and biases of what all devices add up
)
"""Patterns of paths, and the mesh axes of a parameter's axes; a stack's own lies on none."""


def specs(
    params: Any, mesh: Mesh | AbstractMesh, fsdp: str = "fsdp", tensor: str = "tensor"
) -> Any:
    """Over which axes of a mesh each parameter of a decoder lies, for `NamedSharding`.

    Args:
      params: The parameters, or their shapes.
      mesh: Mesh of any axes; one that it lacks, or that does not divide a size, cuts nothing.
      fsdp: Name of the axis over which parameters are cut and gathered to be used.
      tensor: Name of the axis whose devices compute each a part of the heads and features.

    Returns:
      A `PartitionSpec` for each leaf.
    """
    names = {"fsdp": fsdp, "tensor": tensor}

    def spec(key, leaf):
        path = path_of(key)
        rule = next(axes for pattern, axes in RULES if re.search(pattern, path))
        rule = (None, *rule) if re.search(STACKED, path) else rule
        cut = [names.get(axis) for axis in rule]
        sizes = leaf.shape[: len(cut)]
        fits = [n in mesh.shape and s % mesh.shape[n] == 0 for n, s in zip(cut, sizes, strict=True)]
        return P(*(name if fit else None for name, fit in zip(cut, fits, strict=True)))

    return jax.tree_util.tree_map_with_path(spec, params)
