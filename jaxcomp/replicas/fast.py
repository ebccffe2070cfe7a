"""Parameters cut over a fast axis: each device of a host holds one share of each parameter.

A parameter is cut along one of its own axes, so that its share has the same rank, and state leaves
of its shape have a PartitionSpec. If no axis divides evenly, the parameter is padded with zeros.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.compressors.platforms import by_platform
from jaxcomp.replicas.protocol import is_masked, widened
from jaxcomp.replicas.types import to_varying


@dataclasses.dataclass(frozen=True)
class Share:
    """How one parameter is cut; a leaf, not a pytree node."""

    axis: int | None  # the axis that is cut; None: all devices of a host hold, and send, the whole
    shape: tuple[int, ...]  # of the whole parameter, padded
    spec: P  # over all axes of the mesh


def shares_of(params: Any, specs: Any, mesh: Mesh | AbstractMesh, fast_axis: str) -> Any:
    """Makes a `Share` for each parameter, from shapes alone.

    Args:
      params: Global parameters, or their shapes.
      specs: Their PartitionSpecs over the other axes of the mesh, a tree like `params`.
      mesh: The mesh.
      fast_axis: Its axis over which parameters are cut.

    Returns:
      A tree like `params`. Scalars and empty arrays stay whole. So do parameters whose axes are all
      sharded already, if they do not divide evenly.

    Raises:
      ValueError: If the mesh has no such axis, or if it shards a parameter already.
    """
    if fast_axis not in mesh.axis_names:
        raise ValueError(
            f"the mesh has no axis {fast_axis!r} for fast_axis; its axes are "
            f"{tuple(mesh.axis_names)}."
        )
    return jax.tree.map(lambda x, spec: _share_of(x.shape, spec, mesh, fast_axis), params, specs)


def _share_of(shape, spec, mesh, fast_axis):
    if fast_axis in jax.tree.leaves(tuple(spec)):
        raise ValueError(
            f"param_specs shard a parameter over the fast axis {fast_axis!r} ({spec}): each of its "
            "devices sends a shard of its own already; leave fast_axis out."
        )
    num, names = mesh.shape[fast_axis], [*spec, *[None] * (len(shape) - len(spec))]
    # The first of several axes may count the layers of a scan, which must stay together.
    axes = range(len(shape) > 1, len(shape)) if math.prod(shape) else ()
    up = lambda axis: -(-shape[axis] // num) * num
    free = [axis for axis in axes if not names[axis]]
    if free:
        axis = min(free, key=lambda axis: up(axis) / shape[axis])
        names[axis] = fast_axis
        return Share(axis, (*shape[:axis], up(axis), *shape[axis + 1 :]), P(*names))
    for axis in axes:
        # Zeros at the end would move entries from one device of the other axes to the next.
        others = tuple(jax.tree.leaves(names[axis]))
        if shape[axis] % (num * math.prod(mesh.shape[name] for name in others)) == 0:
            names[axis] = (*others, fast_axis)
            return Share(axis, shape, P(*names))
    return Share(None, shape, spec)


def filled(params: Any, shares: Any) -> tuple[Any, Any]:
    """Shapes and dtypes, and PartitionSpecs, of the padded parameters."""
    shape = lambda share, x: jax.ShapeDtypeStruct(share.shape, x.dtype)
    return jax.tree.map(shape, shares, params), jax.tree.map(lambda share: share.spec, shares)


def own_shares(params: Any, shares: Any, fast_axis: str) -> Any:
    """This device's shares of whole parameters; inside `jax.shard_map` over all axes."""

    def take(share, x):
        if share.axis is None:
            return x
        rows = to_varying(_rows(share, x, fast_axis), fast_axis)
        return lax.dynamic_index_in_dim(rows, lax.axis_index(fast_axis), share.axis, keepdims=False)

    return jax.tree.map(take, shares, params)


def scatter_shares(grads: Any, shares: Any, fast_axis: str) -> Any:
    """This device's share of the mean of gradients, which differ between a host's devices.

    In float32 or wider, so that narrow parameters do not round the mean before it is encoded.
    """

    def mean(share, x):
        x = widened(x)
        if share.axis is None:
            return lax.pmean(x, fast_axis)
        rows = _rows(share, x, fast_axis)
        total = by_platform(
            rows,
            cpu=lambda rows: _sum_by_all_to_all(rows, fast_axis, share.axis),
            default=lambda rows: lax.psum_scatter(
                rows, fast_axis, scatter_dimension=share.axis, tiled=False
            ),
        )
        return total / lax.axis_size(fast_axis)

    return jax.tree.map(mean, shares, grads)


def _sum_by_all_to_all(rows, fast_axis, axis):
    """Sums with an all-to-all: gloo's reduce-scatter is wrong on JAX 0.10.2 for large chunks."""
    received = lax.all_to_all(rows, fast_axis, split_axis=axis, concat_axis=axis)
    return jnp.sum(received, axis)


def gather_shares(own: Any, shares: Any, like: Any, fast_axis: str) -> Any:
    """Undoes `own_shares`: whole parameters of the shapes of `like`, equal on a host's devices.

    Nodes of `own` without arrays, as in `optax.masked`, stay.
    """

    def gather(x, share, like):
        if is_masked(x) or share.axis is None:  # masked nodes may stand for a branch
            return x
        whole = lax.all_gather(x, fast_axis, axis=share.axis, tiled=True, to="invarying")
        return lax.slice_in_dim(whole, 0, like.shape[share.axis], axis=share.axis)

    return jax.tree.map(gather, own, shares, like, is_leaf=is_masked)


def _rows(share, x, fast_axis):
    """Reshapes `[..., numel, ...]` to `[..., F, numel / F, ...]`, padded."""
    num, size = lax.axis_size(fast_axis), x.shape[share.axis]
    padding = [(0, -size % num if axis == share.axis else 0) for axis in range(x.ndim)]
    before, behind = x.shape[: share.axis], x.shape[share.axis + 1 :]
    return jnp.pad(x, padding).reshape(*before, num, -(-size // num), *behind)
