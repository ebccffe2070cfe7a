"""The state of N replicas as one for M replicas."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxcomp.replicas import placing, protocol
from jaxcomp.replicas.compact import decode, encode, is_compact
from jaxcomp.replicas.shards import is_shard, recut


def resize(state: Any, like: Any) -> Any:
    """Turns the state of N replicas into one for M replicas that goes on from the same place.

    Rows of replicas (residuals, drift, local moments, accumulators) become their mean, in all
    M rows, so that their mean over replicas, which is what training sees, stays. What owners
    hold of a bucket or a parameter (`owner_residual`, `owned`, a `Shard`) is laid out anew over M
    owners. Counts of steps left out (`skipped`) are added up in the first row. The rest is copied.
    The mesh's other axes must keep their sizes; the axes of `qsdp` count as one, of their product.

    Args:
      state: Global state of N replicas, as arrays or NumPy arrays.
      like: The state for M replicas, or its shapes: `jax.eval_shape(init, params)`. Where the
        mesh has further axes that shard parameters, with the shardings of `state_specs`.

    Returns:
      A tree like `like`, placed as `like` is if it says on which devices; shapes do not, and what
      has another shape than before is then in NumPy arrays. No device holds more of a leaf than
      its own part and three rows, one replica's each, meanwhile; the host, one leaf.

    Raises:
      ValueError: If the two are not states of one transformation and one model.
    """
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
    return jax.tree_util.tree_map_with_path(resized, state, like, is_leaf=is_node)


def reset_residuals(state: Any) -> Any:
    """Sets a state's fields `residual` and `owner_residual` to zero: what was not sent is dropped.

    The rest stays, so that what replicas have learnt since they last agreed (`drift`, moments) is
    not lost.
    """
    owed = protocol.fields(state, "residual", "owner_residual")

    def left(path, x):
        return x if protocol.field_of(path, owed) is None else jnp.zeros_like(x)

    return jax.tree_util.tree_map_with_path(left, state)


class _Place:
    """Where a leaf is in a state."""

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
    if data.shape != new.data.shape:
        data = recut(placing.on_host(data), old.shape, new.data.shape[0])
    return dataclasses.replace(old, data=_resize_leaf(place, data, new.data))


def _resize_compact(place, old, new):
    """Rows as their mean, pieces anew: of the values, not of their codes."""
    if old.data.shape == new.data.shape:
        return jax.tree.map(functools.partial(_resize_leaf, place), old, new)
    bits = 8 if old.scale is not None else 16
    if place.is_owned:
        whole = placing.on_host(decode(old))
        pieces = _resize_owned(whole, new.data.shape, _num_shards(new.data))
        return jax.tree.map(placing.placed, encode(jnp.asarray(pieces), bits), new)
    _require_rows(place, old.data, new.data)
    mean = lambda rows: encode(_mean(decode(rows)), bits)
    return jax.tree.map(placing.repeated, placing.of_rows(mean, old), new)


def _resize_leaf(place, old, new):
    if old.shape == new.shape:
        return placing.placed(old, new)
    if old.ndim > 1 and place.is_owned:
        out = _resize_owned(placing.on_host(old), new.shape, _num_shards(new))
        return placing.placed(out, new)
    if place.field == "skipped":
        out = np.zeros(new.shape, old.dtype)
        out[0] = np.sum(placing.on_host(old))
        return placing.placed(out, new)
    _require_rows(place, old, new)
    if jnp.issubdtype(old.dtype, jnp.inexact):
        return placing.repeated(placing.of_rows(_mean, old), new)
    return placing.repeated(placing.row(old, 0), new)


def _require_rows(place, old, new):
    if not old.ndim == len(new.shape) > 0 or old.shape[1:] != new.shape[1:]:
        raise ValueError(
            f"the leaf {place.name!r} has shape {old.shape}, which no number "
            f"of replicas turns into {new.shape}; is this the same model?"
        )


def _mean(rows):
    """In float32 or wider, of NumPy's arrays and JAX's."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    return rows.mean(axis=0, dtype=wide).astype(rows.dtype)


def _num_shards(like) -> int:
    """Shards behind each other in a row, over the mesh axes other than the replicas'."""
    sharding = getattr(like, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return 1
    return math.prod(
        sharding.mesh.shape[name] for name in jax.tree.leaves(tuple(sharding.spec[1:]))
    )


def _resize_owned(old, shape, num_shards):
    """Chunks `[N, shards * c]` as `[M, shards * c']`; only padding is cut off.

    Of `[N, *stack, c]` each entry of the stack is by itself; shards lie in it.
    """
    rows = old.reshape(old.shape[0], num_shards, -1) if old.ndim == 2 else old
    stack, size = rows.shape[1:-1], shape[0] * shape[-1] // (num_shards if old.ndim == 2 else 1)
    flat = np.moveaxis(rows, 0, -2).reshape(*stack, -1)[..., :size]
    flat = np.pad(flat, [(0, 0)] * len(stack) + [(0, size - flat.shape[-1])])
    return np.moveaxis(flat.reshape(*stack, shape[0], -1), -2, 0).reshape(shape)
