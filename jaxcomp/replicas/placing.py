"""Moves leaves with a row per replica to other devices, one row at a time on each device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P


def placed(x: Any, like: Any) -> Any:
    """An array in the dtype of `like`, on the devices of `like` if it names any."""
    x = x if x.dtype == like.dtype else x.astype(like.dtype)
    return _put(x, _sharding(like))


def repeated(row: Any, like: Any) -> Any:
    """A leaf whose rows all equal `row`, placed like `placed`; each device makes its own part."""
    row = row if row.dtype == like.dtype else row.astype(like.dtype)
    sharding = _sharding(like)
    if sharding is None:
        return np.broadcast_to(_whole(row), like.shape)
    row = _put(row, _of_row(sharding))
    return jax.jit(jnp.broadcast_to, static_argnums=1, out_shardings=sharding)(row, like.shape)


def of_rows(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function to an array `[N, ...]`, or a tree of them; it drops the axis `[N]`.

    Runs on the devices that hold the rows, each for its own part.
    """
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(rows)):
        return jax.tree.map(np.asarray, function(rows))
    places = jax.tree.map(lambda x: _of_row(x.sharding), rows)
    return jax.jit(function, out_shardings=places)(rows)


def row(rows: Any, number: int) -> Any:
    """One row of an array `[N, ...]`."""
    if not isinstance(rows, jax.Array):
        return np.asarray(rows[number])
    return jax.jit(_row, out_shardings=_of_row(rows.sharding))(rows, number)


def on_host(rows: Any) -> np.ndarray:
    """An array `[N, ...]` in NumPy, even if its rows are in other processes."""
    if not isinstance(rows, jax.Array):
        return np.asarray(rows)
    return np.stack([_whole(row(rows, number)) for number in range(rows.shape[0])])


def _row(rows, number):
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


def _of_row(sharding: Sharding) -> Sharding:
    """The sharding of one row of a leaf: over all devices that hold any row."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
