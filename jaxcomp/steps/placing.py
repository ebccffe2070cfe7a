"""Placing batches on a mesh, and the mesh's other axes, of any axis type."""

import functools
import math
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


def over_replicas(specs: Any, axis_name: str | tuple[str, ...]) -> Any:
    """The specs if only the axes of the replicas are manual."""
    cut = lambda spec: P(names_of(axis_name)) if is_cut(spec, axis_name) else P()
    return jax.tree.map(cut, specs)


def over_others(specs: Any, axis_name: str | tuple[str, ...]) -> Any:
    """The specs for one replica's part, over the other axes."""
    count = len(names_of(axis_name))
    rest = lambda spec: P(_first(spec)[count:] or None, *spec[1:])
    own = lambda spec: rest(spec) if is_cut(spec, axis_name) else spec
    return jax.tree.map(own, specs)


def check_batch(
    batch: Any, axis_name: Any, num_replicas: int, accumulate: int, specs: Any = None
) -> None:
    """Raises a ValueError for a batch that cannot be divided."""
    specs = full_batch_specs(specs, batch, axis_name)
    leaves = jax.tree.leaves_with_path(batch)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        if not is_cut(spec, axis_name):
            continue
        if leaf.ndim == 0 or leaf.shape[0] % (num_replicas * accumulate):
            raise ValueError(
                f"the batch's leaf {jax.tree_util.keystr(path)!r} has shape {leaf.shape}, but its "
                f"first axis must be divisible by {num_replicas * accumulate}: {num_replicas} "
                f"replicas over {axis_name!r} times accumulate={accumulate}. What all replicas "
                "hold alike has batch_specs P()."
            )


def microbatches(accumulate: int, batch: Any, specs: Any, axis_name: Any) -> Any:
    """This replica's batch with a leading axis of microbatches; None for leaves not cut."""

    def parts(x, spec, rest):
        if not is_cut(spec, axis_name):
            return None
        # Not -1, which an array without entries does not determine.
        rows = x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:])
        return constrained(rows, P(None, *rest))

    return jax.tree.map(parts, batch, specs, over_others(specs, axis_name))


def with_uncut_leaves(part: Any, batch: Any) -> Any:
    """A microbatch, with the leaves that are not cut."""
    whole = lambda part, leaf: leaf if part is None else part
    return jax.tree.map(whole, part, batch, is_leaf=lambda x: x is None)


def sharded_batch(batch: Any, batch_specs: Any, axis_name: Any) -> Any:
    """This replica's batch, cut over the other axes that `batch_specs` name."""
    specs = over_others(full_batch_specs(batch_specs, batch, axis_name), axis_name)
    return jax.tree.map(constrained, batch, specs)


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


def on_auto_axes(mesh: Mesh | AbstractMesh, function: Callable, out_specs: Any) -> Callable:
    """Runs a function with all axes of the mesh as type Auto.

    XLA then partitions it without a sharding for each product, which most models do not state.
    `out_specs` are the specs of the results.
    """
    if not _explicit(mesh):
        return function
    shardings = _shardings(mesh, out_specs)
    return jax.sharding.auto_axes(function, axes=_explicit(mesh), out_sharding=shardings)


def spec_of(x: Any) -> P:
    """An array's PartitionSpec over axes of type Explicit, from its type."""
    return jax.typeof(x).sharding.spec


def within(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh | None:
    """The mesh argument of a `shard_map` inside a function of `on_auto_axes`."""
    return None if _explicit(mesh) else mesh


def num_parts(mesh: Mesh | AbstractMesh, axis_name: str | tuple[str, ...]) -> int:
    """The number of parts that a batch is cut into."""
    return math.prod(mesh.shape[name] for name in names_of(axis_name))


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
