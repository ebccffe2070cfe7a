"""Reads which devices an HLO collective joins, in each dialect of XLA.

Groups come as lists `{{0,1},{2,3}}`, as iota tiles `[2,2]<=[4]` and, since JAX 0.12, as axes of a
mesh, `mesh['data'=2,'fsdp'=2] {'fsdp'}`. Numbers are positions in the program's device assignment.
"""

import math
import re

import numpy as np

_LIST = r"\{\{.*?\}\}|\{\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:, ?device_ids=\(.*?\))? ?\{.*?\}"


def replica_groups(attributes: str, num_devices: int) -> list[tuple[int, ...]]:
    """Reads which devices take part in a collective together.

    Args:
      attributes: The collective's attributes, with `replica_groups` in any dialect.
      num_devices: Devices of the program: no group, or an empty list, means all of them.

    Returns:
      The groups, as positions in the program's device assignment.

    Raises:
      ValueError: If the groups are in a dialect unknown here.
    """
    match = re.search(rf"\breplica_groups=({_LIST}|{_IOTA}|{_MESH})", attributes)
    if not match and "replica_groups=" in attributes:
        raise ValueError(
            f"got collective attributes {attributes!r}, need replica_groups as lists, iota or "
            "mesh axes; add the dialect to jaxcomp/measure/hlo_groups.py"
        )
    groups = match[1] if match else "{}"
    if groups.startswith("mesh"):
        return _mesh_groups(groups)
    if groups.startswith("["):
        return [tuple(group) for group in _iota(groups).tolist()]
    lists = [tuple(_ints(group)) for group in re.findall(r"\{([\d, ]+)\}", groups)]
    return lists or [tuple(range(num_devices))]


def source_target_pairs(attributes: str) -> list[tuple[int, int]]:
    """Reads who sends to whom in a permutation, as positions in the device assignment."""
    match = re.search(r'source_target_pairs="?\{(\{.*?\})\}', attributes)
    pairs = re.findall(r"\{(\d+), *(\d+)\}", match[1]) if match else []
    return [(int(source), int(target)) for source, target in pairs]


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Expands `[2,4]<=[4,2]T(1,0)`; without `<=` the dimensions are those it reshapes to."""
    dims, _, rest = text.rpartition("<=")
    reshape, _, order = rest.partition("T")
    ids = np.arange(math.prod(_ints(reshape))).reshape(_ints(reshape))
    return ids.transpose(_ints(order) or None).reshape(_ints(dims) or -1)


def _mesh_groups(text: str) -> list[tuple[int, ...]]:
    """Expands `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`."""
    mesh, _, axes = text.rpartition("{")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    order = mesh.partition("device_ids=(")[2]
    num_devices = math.prod(sizes.values())
    ids = _iota(order) if "[" in order else np.array(_ints(order) or range(num_devices))
    coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes):
        # `(before)size` is a part of the axis: zeroing its digit joins the devices along it.
        size = int(size or sizes[name])
        stride = sizes[name] // (int(before or 1) * size)
        coordinates[name] = coordinates[name] - coordinates[name] // stride % size * stride
    keys = np.ravel_multi_index(tuple(coordinates.values()), tuple(sizes.values())).ravel()
    return [tuple(ids[keys == key].tolist()) for key in np.unique(keys)]
