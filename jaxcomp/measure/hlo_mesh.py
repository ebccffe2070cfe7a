"""Where the devices of a program lie in its mesh, and which axes groups of them span."""

import itertools
import math

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


def positions_of(program: jax.stages.Compiled | str, mesh: Mesh) -> np.ndarray:
    """Returns the position in the program's device assignment of each device of the mesh."""
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
    """Maps the groups that each set of mesh axes makes to that set."""
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
    """Returns the axes along which some pair differs, and how many devices a pair joins."""
    where = {position: np.array(index) for index, position in np.ndenumerate(positions)}
    moves = [where[source] != where[target] for source, target in pairs]
    crossed = np.any(np.reshape(moves, (-1, positions.ndim)), axis=0)
    axes = tuple(name for name, cross in zip(mesh.axis_names, crossed, strict=True) if cross)
    return axes, 2 if axes else 1
