"""The devices that an HLO collective joins, and the mesh axes that they span.

Groups come as lists `{{0,1},{2,3}}`, as iota tiles `[2,2]<=[4]` and, since JAX 0.12, as axes of a
mesh, `mesh['data'=2,'fsdp'=2] {'fsdp'}`. Numbers are positions in the program's device assignment.
"""

import itertools
import math
import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

_LIST = r"\{\{.*?\}\}|\{\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:, ?device_ids=\(.*?\))? ?\{.*?\}"


def replica_groups(attributes: str, num_devices: int) -> list[tuple[int, ...]]:
    """The groups of devices that take part in a collective, from its attributes.

    No group, or an empty list, means all of the program's `num_devices`. Raises a ValueError for an
    unknown dialect.
    """
    match = re.search(rf"\breplica_groups=({_LIST}|{_IOTA}|{_MESH})", attributes)
    if not match and "replica_groups=" in attributes:
        raise ValueError(
            f"got collective attributes {attributes!r}, need replica_groups as lists, iota or "
            "mesh axes; add the dialect to jaxcomp/measure/mesh.py"
        )
    groups = match[1] if match else "{}"
    if groups.startswith("mesh"):
        return _mesh_groups(groups)
    if groups.startswith("["):
        return [tuple(group) for group in _iota(groups).tolist()]
    lists = [tuple(_ints(group)) for group in re.findall(r"\{([\d, ]+)\}", groups)]
    return lists or [tuple(range(num_devices))]


def source_target_pairs(attributes: str) -> list[tuple[int, int]]:
    """The pairs of sender and receiver of a permutation."""
    match = re.search(r'source_target_pairs="?\{(\{.*?\})\}', attributes)
    pairs = re.findall(r"\{(\d+), *(\d+)\}", match[1]) if match else []
    return [(int(source), int(target)) for source, target in pairs]


def positions_of(program: jax.stages.Compiled | str, mesh: Mesh) -> np.ndarray:
    """The position in the program's device assignment of each device of the mesh."""
    order = {device: position for position, device in enumerate(mesh.devices.flat)}
    if not isinstance(program, str):
        for sharding in jax.tree.leaves((program.input_shardings, program.output_shardings)):
            if isinstance(sharding, NamedSharding) and sharding.mesh.size == mesh.size:
                order = {device: i for i, device in enumerate(sharding.mesh.devices.flat)}
                break
    if set(order) != set(mesh.devices.flat):
        raise ValueError(
            "got a program that runs on other devices than the mesh's, need the same ones; pass "
            "the mesh that the step was made with"
        )
    positions = [order[device] for device in mesh.devices.flat]
    return np.array(positions).reshape(mesh.devices.shape)


def axes_of_groups(mesh: Mesh, positions: np.ndarray) -> dict[frozenset, tuple[str, ...]]:
    """Maps the device groups of each set of mesh axes to that set."""
    sizes = mesh.shape
    wide = [name for name in mesh.axis_names if sizes[name] > 1]
    axes_of = {}
    for size in range(len(wide) + 1):
        for axes in itertools.combinations(wide, size):
            numbers = [mesh.axis_names.index(name) for name in axes]
            last = np.moveaxis(positions, numbers, range(-size, 0))
            groups = last.reshape(-1, math.prod(sizes[name] for name in axes))
            axes_of[frozenset(map(frozenset, groups.tolist()))] = axes
    return axes_of


def axes_crossed(
    pairs: list[tuple[int, int]], positions: np.ndarray, mesh: Mesh
) -> tuple[tuple[str, ...], int]:
    """The axes along which some pair differs, and how many devices a pair joins."""
    where = {position: np.array(index) for index, position in np.ndenumerate(positions)}
    moves = [where[source] != where[target] for source, target in pairs]
    crossed = np.any(np.reshape(moves, (-1, positions.ndim)), axis=0)
    axes = tuple(name for name, cross in zip(mesh.axis_names, crossed, strict=True) if cross)
    return axes, 2 if axes else 1


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Expands `[2,4]<=[4,2]T(1,0)`; without `<=` the result is flat."""
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
