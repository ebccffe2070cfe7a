"""Placing batches on a mesh, and the mesh's other axes, of any axis type."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import is_array
from jaxcomp.replicas.specs import over_some, require_specs
from jaxcomp.replicas.types import names_of


def full_batch_specs(batch_specs: Any, batch: Any, axis_name: str | tuple[str, ...]) -> Any:
    """A PartitionSpec for each leaf of the batch; without `batch_specs`, over the replicas.

    Raises a ValueError for a spec that mentions the replica axes elsewhere than at the beginning.
    """
    names = names_of(axis_name)
    require_specs("batch_specs", batch_specs)
    specs = jax.tree.broadcast(P(names) if batch_specs is None else batch_specs, batch)
    for spec in jax.tree.leaves(specs):
        used = set(jax.tree.leaves(tuple(spec))) & set(names)
        if used and _first(spec)[: len(names)] != names:
            raise ValueError(
                f"batch_specs has {spec}, which must be without the axes {names}, for what all "
                f"replicas hold alike, or begin with them, as P({names + ('other',)}, ...)."
            )
    return specs


def is_cut(spec: P, axis_name: str | tuple[str, ...]) -> bool:
    """Whether a batch leaf with this spec has a part for each replica."""
    return _first(spec)[: len(names_of(axis_name))] == names_of(axis_name)


def constrained(x: jax.Array, spec: P) -> jax.Array:
    """A sharding constraint for XLA, if the spec names any axis."""
    return lax.with_sharding_constraint(x, spec) if jax.tree.leaves(tuple(spec)) else x


def placed(mesh: Mesh | AbstractMesh, tree: Any, specs: Any) -> Any:
    """The tree placed as the specs say, which JAX's types require on Explicit axes."""
    if not _explicit(mesh):
        return tree
    return jax.tree.map(jax.sharding.reshard, tree, _shardings(mesh, specs))


def movable(mesh: Mesh | AbstractMesh | None, tree: Any) -> Any:
    """The tree with arrays of other devices than the mesh's in NumPy, from where JAX moves them.

    `jax.device_put(x, device)` and readers of checkpoints commit arrays to their devices, and JAX
    refuses these beside arrays of the mesh. It also refuses the same devices in another order, as
    of `Mesh(jax.devices(), ...)` beside `jax.make_mesh`.
    """
    if not isinstance(mesh, Mesh):
        return tree
    return jax.tree.map(lambda x: np.asarray(x) if _is_bound(x, mesh) else x, tree)


def _is_bound(x, mesh):
    """Whether an array of this process is committed to other devices; keys stay where they are."""
    return (
        is_array(x)
        and not _has_its_devices(x.sharding, mesh)  # first, since nearly all arrays end here
        and x.committed
        and x.is_fully_addressable
        and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )


def _has_its_devices(sharding, mesh):
    """Whether a sharding has the devices of a mesh, in the same order if it has a mesh itself."""
    own = getattr(sharding, "mesh", None)
    if isinstance(own, Mesh):
        return own is mesh or [*own.devices.flat] == [*mesh.devices.flat]
    return sharding.device_set == {*mesh.devices.flat}


def placed_rows(mesh: Mesh | AbstractMesh, tree: Any, axis_name: str) -> Any:
    """The tree with its first axes cut over the replicas, as `placed`."""
    return placed(mesh, tree, jax.tree.map(lambda x: P(axis_name, *spec_of(x)[1:]), tree))


def everywhere(mesh: Mesh | AbstractMesh) -> NamedSharding | None:
    """Where results lie that are equal on all devices of an Explicit mesh.

    With arguments in NumPy, nothing else tells `jax.jit` the devices.
    """
    return NamedSharding(mesh, P()) if _explicit(mesh) else None


def over_axes(
    mesh: Mesh | AbstractMesh,
    names: tuple[str, ...],
    function: Callable,
    in_specs: Any,
    out_specs: Any,
    full_out_specs: Any,
) -> Callable:
    """A function inside `shard_map` over some axes of a mesh, with the others as type Auto.

    XLA then partitions it over these without a sharding for each product, which most models do not
    state. `full_out_specs` are the specs of the results over all axes.
    """
    explicit = _explicit(mesh)
    mapped = jax.shard_map(
        function,
        mesh=None if explicit else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(names),
    )
    if not explicit:
        return mapped
    shardings = _shardings(mesh, full_out_specs)
    return jax.sharding.auto_axes(mapped, axes=explicit, out_sharding=shardings)


def spec_of(x: Any) -> P:
    """An array's PartitionSpec over axes of type Explicit, from its type."""
    return jax.typeof(x).sharding.spec


def _explicit(mesh):
    """The names of a mesh's Explicit axes."""
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in named if kind == AxisType.Explicit)


def _shardings(mesh, specs):
    """The specs over Explicit axes, as shardings."""
    over_explicit = over_some(specs, _explicit(mesh))
    return jax.tree.map(functools.partial(NamedSharding, mesh), over_explicit)


def _first(spec):
    """The axes that cut the first axis of an array."""
    return names_of(spec[0]) if len(spec) and spec[0] is not None else ()
