"""Sharding rules for a decoder's parameters over fast devices, by path; the first match wins."""

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
    (r"", ()),  # norms, and biases of summed outputs
)
"""Patterns of paths, and the mesh axes of a parameter's axes, without the axis of a stack."""


def specs(
    params: Any, mesh: Mesh | AbstractMesh, fsdp: str = "fsdp", tensor: str = "tensor"
) -> Any:
    """The PartitionSpec of each parameter of a decoder, for `NamedSharding`.

    Args:
      params: The parameters, or their shapes.
      mesh: Any mesh. A rule's axis is ignored if the mesh lacks it, or its size does not divide.
      fsdp: Name of the axis over which parameters are cut, and gathered for use.
      tensor: Name of the axis whose devices each compute a part of the heads and features.

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
