"""Converts the state of N replicas into a state for M replicas.

Leaves with a row per replica move to other devices one row at a time on each device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import require_kept
from jaxcomp.replicas import protocol
from jaxcomp.replicas.compact import decode, encode, is_compact
from jaxcomp.replicas.shards import is_shard, recut


def resize(state: Any, like: Any) -> Any:
    """Turns the state of N replicas into one for M replicas that goes on from the same place.

    Rows of replicas (residuals, drift, local moments, accumulators) are replaced by their mean, in
    all M rows. This keeps the mean over replicas, which is what training sees. So do counts of an
    inner optimizer, which differ where a replica has skipped steps; they are rounded up. The
    owners' parts of a bucket or a parameter (`owner_residual`, `owned`, a `Shard`) are
    redistributed over M owners. Counts of skipped steps (`skipped`) are added up in the first row.
    The rest is copied, keys from the first row. The mesh's other axes must keep their sizes; the
    axes of `qsdp` count as one axis. If M is N, nothing changes.

    Args:
      state: Global state of N replicas, as arrays or NumPy arrays.
      like: The state for M replicas, or its shapes: `jax.eval_shape(init, params)`. If other axes
        of the mesh shard parameters, it needs the shardings of `state_specs`.

    Returns:
      A tree like `like`, on the devices of `like` if it has any. If `like` is shapes only, leaves
      that change their shape are NumPy arrays. Meanwhile a device holds at most its own part of a
      leaf and three rows of one replica each; the host holds one leaf.

    Raises:
      ValueError: If the two are not states of one transformation and one model.
    """
    require_kept((), state)
    if jax.tree.structure(state) != jax.tree.structure(like):
        raise ValueError(
            f"cannot resize a state of structure {jax.tree.structure(state)} to "
            f"{jax.tree.structure(like)}; build `like` with the same transformation and model."
        )
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True))
    changes = {(old.shape[:1], new.shape[:1]) for old, new in pairs if old.shape != new.shape}
    if len(changes) > 1:
        raise ValueError(
            f"the first axes change in more than one way, {sorted(changes)}, but only the number "
            "of replicas may change; is this the same model?"
        )
    is_node = lambda x: is_shard(x) or is_compact(x)
    known = protocol.fields(state, "owner_residual", "owned", "skipped")
    resized = lambda path, old, new: _resize_node(_Place(path, known), old, new)
    return jax.tree.map_with_path(resized, state, like, is_leaf=is_node)


def reset_residuals(state: Any) -> Any:
    """Sets a state's fields `residual` and `owner_residual` to zero, which drops what was not sent.

    The rest stays, so that what replicas have learned since they last agreed (`drift`, moments) is
    not lost.
    """
    owed = protocol.fields(state, "residual", "owner_residual")

    def left(path, x):
        return x if protocol.field_of(path, owed) is None else jnp.zeros_like(x)

    return jax.tree.map_with_path(left, state)


class _Place:
    """The place of a leaf in a state."""

    def __init__(self, path, known):
        self.name = jax.tree_util.keystr(path)
        self.field = protocol.field_of(path, known)  # of the protocol; None for others

    @property
    def is_owned(self) -> bool:
        return self.field in ("owner_residual", "owned")


def _resize_node(place, old, new):
    if is_compact(old):
        return _resize_compact(place, old, new)
    if not is_shard(old):
        return _resize_leaf(place, old, new)
    data = old.data
    if protocol.is_masked(data):
        return old
    if data.shape != new.data.shape:
        data = recut(on_host(data), old.shape, new.data.shape[0])
    return dataclasses.replace(old, data=_resize_leaf(place, data, new.data))


def _resize_compact(place, old, new):
    """Averages rows and redistributes pieces, of the values and not of their codes."""
    if old.data.shape == new.data.shape:
        return jax.tree.map(functools.partial(_resize_leaf, place), old, new)
    bits = 8 if old.scale is not None else 16
    if place.is_owned:
        whole = on_host(decode(old))
        pieces = _resize_owned(whole, new.data.shape, _num_shards(new.data))
        return jax.tree.map(_placed_like, encode(jnp.asarray(pieces), bits), new)
    _require_rows(place, old.data, new.data)
    mean = lambda rows: encode(_mean(decode(rows)), bits)
    return jax.tree.map(_repeated, _map_rows(mean, old), new)


def _resize_leaf(place, old, new):
    if old.shape == new.shape:
        return _placed_like(old, new)
    if old.ndim > 1 and place.is_owned:
        out = _resize_owned(on_host(old), new.shape, _num_shards(new))
        return _placed_like(out, new)
    if place.field == "skipped":
        out = np.zeros(new.shape, old.dtype)
        out[0] = np.sum(on_host(old))
        return _placed_like(out, new)
    _require_rows(place, old, new)
    if jnp.issubdtype(old.dtype, jnp.inexact) or jnp.issubdtype(old.dtype, jnp.signedinteger):
        return _repeated(_map_rows(_mean, old), new)
    return _repeated(_row_at(old, 0), new)  # of flags and keys


def _require_rows(place, old, new):
    if not old.ndim == len(new.shape) > 0 or old.shape[1:] != new.shape[1:]:
        raise ValueError(
            f"the leaf {place.name!r} has shape {old.shape}, which no number "
            f"of replicas turns into {new.shape}; is this the same model?"
        )


def _mean(rows):
    """The mean over rows in float32 or wider, for NumPy and JAX arrays; of counts rounded up."""
    if jnp.issubdtype(rows.dtype, jnp.signedinteger):
        least = rows.min(axis=0)  # sums of the rest do not overflow
        return least - (least - rows).sum(axis=0, dtype=rows.dtype) // rows.shape[0]
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return rows.mean(axis=0, dtype=wide).astype(rows.dtype)


def _num_shards(like) -> int:
    """How many shards one row holds, over the mesh axes other than the replicas'."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return 1
    return math.prod(
        sharding.mesh.shape[name] for name in jax.tree.leaves(tuple(sharding.spec[1:]))
    )


def _resize_owned(old, shape, num_shards):
    """Converts chunks `[N, shards * c]` to `[M, shards * c']`; only padding is cut off.

    In `[N, *stack, c]` each entry of the stack is converted on its own.
    """
    rows = old.reshape(old.shape[0], num_shards, -1) if old.ndim == 2 else old
    stack, size = rows.shape[1:-1], shape[0] * shape[-1] // (num_shards if old.ndim == 2 else 1)
    flat = np.moveaxis(rows, 0, -2).reshape(*stack, -1)[..., :size]
    flat = np.pad(flat, [(0, 0)] * len(stack) + [(0, size - flat.shape[-1])])
    return np.moveaxis(flat.reshape(*stack, shape[0], -1), -2, 0).reshape(shape)


def _placed_like(x: Any, like: Any) -> Any:
    """An array in the dtype of `like`, on the devices of `like` if it names any."""
    x = x if x.dtype == like.dtype else x.astype(like.dtype)
    return _put(x, _sharding(like))


def _repeated(row: Any, like: Any) -> Any:
    """A leaf whose rows all equal `row`, where `like` is; each device makes its own part."""
    row = row if row.dtype == like.dtype else row.astype(like.dtype)
    sharding = _sharding(like)
    if sharding is None:
        if jnp.issubdtype(row.dtype, jax.dtypes.prng_key):  # which NumPy cannot hold
            return jnp.broadcast_to(row, like.shape)
        return np.broadcast_to(_whole(row), like.shape)
    row = _put(row, _row_sharding(sharding))
    return jax.jit(jnp.broadcast_to, static_argnums=1, out_shardings=sharding)(row, like.shape)


def _map_rows(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function to an array `[N, ...]`, or a tree of them; it drops the axis `[N]`.

    Runs on the devices that hold the rows, each for its own part.
    """
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(rows)):
        return jax.tree.map(np.asarray, function(rows))
    places = jax.tree.map(lambda x: _row_sharding(x.sharding), rows)
    return jax.jit(function, out_shardings=places)(rows)


def _row_at(rows: Any, number: int) -> Any:
    """One row of an array `[N, ...]`."""
    if not isinstance(rows, jax.Array):
        return np.asarray(rows[number])
    return jax.jit(_chosen_row, out_shardings=_row_sharding(rows.sharding))(rows, number)


def on_host(rows: Any) -> np.ndarray:
    """An array `[N, ...]` in NumPy, even if its rows are in other processes."""
    if not isinstance(rows, jax.Array):
        return np.asarray(rows)
    return np.stack([_whole(_row_at(rows, number)) for number in range(rows.shape[0])])


def _chosen_row(rows, number):
    if jnp.issubdtype(rows.dtype, jax.dtypes.prng_key):
        row = _chosen_row(jax.random.key_data(rows), number)
        return jax.random.wrap_key_data(row, impl=jax.random.key_impl(rows))
    # XLA would gather all rows for `rows[number]`; a sum needs only each device's own part.
    bits = rows.view(f"uint{8 * rows.dtype.itemsize}")
    chosen = jnp.arange(rows.shape[0]).reshape(-1, *[1] * (rows.ndim - 1)) == number
    return jnp.where(chosen, bits, 0).sum(axis=0, dtype=bits.dtype).view(rows.dtype)


def _whole(x) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        assert isinstance(x.sharding, NamedSharding)
        x = jax.device_put(x, NamedSharding(x.sharding.mesh, P()))
    return np.asarray(x)


def _put(x, sharding):
    if sharding is None:
        return x
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _sharding(like) -> Sharding | None:
    sharding = getattr(like, "sharding", None)
    # On an explicit mesh `jax.eval_shape` returns shardings without devices.
    nowhere = isinstance(getattr(sharding, "mesh", None), AbstractMesh)
    return None if nowhere else sharding


def _row_sharding(sharding: Sharding) -> Sharding:
    """The sharding of one row of a leaf: over all devices that hold any row."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
