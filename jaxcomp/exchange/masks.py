"""Means over the replicas at the entries of a mask, which they share without sending it."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp.compressors.base import Compressor, Key, Selection, identity
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.policies import Policy, path_of
from jaxcomp.exchange import averaging, wire
from jaxcomp.exchange.buckets import leaf_of, line_of
from jaxcomp.replicas.layers import common_value, is_stack
from jaxcomp.replicas.types import to_varying


class Mask(NamedTuple):
    """Which entries of a leaf a step exchanges, and how it encodes their values."""

    selection: Selection
    values: Compressor
    is_stack: bool = False  # of each layer of a stack, whose first axis counts them

    def select(self, x: jax.Array, key: Key) -> jax.Array:
        """The values of a leaf at its mask: `f32[k]`, or `f32[layers, k]` of a stack."""
        line = line_of(x).reshape(len(x), -1) if self.is_stack else line_of(x)
        return self._map(lambda x, key: self.selection.select(x, key)[0], line, key)

    def scatter(self, values: jax.Array, key: Key, like: jax.Array) -> jax.Array:
        """Values at their places in zeros, with the shape of `like`."""
        numel = like[0].size if self.is_stack else like.size
        put = lambda values, key: self.selection.scatter(values, (), key, numel)
        return leaf_of(self._map(put, values, key).reshape(-1), like.shape)

    def _map(self, function, x, key):
        if not self.is_stack:
            return function(x, key)
        numbers = jnp.arange(len(x), dtype=jnp.uint32)
        return jax.vmap(lambda row, number: function(row, fold(key, number)))(x, numbers)


def masks_of(tree: Any, policy: Policy) -> dict[str, Mask | None]:
    """The masks of all leaves by name; None for leaves that are exchanged whole.

    A name is the path, and a number where two leaves have the same: `{"a/b": x, "a": {"b": y}}`.

    Args:
      tree: Floating leaves. Each layer of a stack has a mask like that of a leaf of its own.
      policy: `(path, leaf) -> Compressor`: `identity()`, or a `random_k`, alone or first in a
        `compose`.

    Raises:
      ValueError: For a compressor whose entries differ between replicas; a `LayersDiffer` for
        different compressors in the layers of a stack.
    """

    def mask(key_path, leaf):
        made = _mask_of(path_of(key_path), common_value(policy, key_path, leaf))
        return made and made._replace(is_stack=is_stack(key_path))

    keyed = jax.tree.leaves_with_path(tree)
    paths = [path_of(key_path) for key_path, _ in keyed]
    found = collections.Counter(paths)
    names = [f"{path} {i}" if found[path] > 1 else path for i, path in enumerate(paths)]
    return {name: mask(*pair) for name, pair in zip(names, keyed, strict=True)}


def _mask_of(path: str, compressor: Compressor) -> Mask | None:
    if compressor == averaging.EXACT:
        return None
    if compressor.shared_selection is not None:
        return Mask(*compressor.shared_selection)
    if compressor.selection is not None and compressor.linear:
        return Mask(compressor.selection, identity())
    raise ValueError(
        f"got {compressor.name} for {path!r}; needs entries that all replicas pick alike; write "
        "random_k(0.1), compose(random_k(0.1), quantize(8)), or identity() for the whole leaf."
    )


class Exchanged(NamedTuple):
    """A tree after an exchange, and where it was exchanged."""

    tree: Any  # the mean where `on`, else this replica's own values
    on: Any  # bool of the leaves' shapes, equal on all replicas; None: everywhere


def mean_on_masks(
    masks: dict[str, Mask | None],
    part: str,
    tree: Any,
    transport: wire.Transport,
    count: jax.Array,
) -> Exchanged:
    """Replaces leaves by their mean over the replicas, only at the entries of their masks.

    Args:
      masks: As `masks_of` makes them.
      part: Name of what is sent in `jaxcomp.report`.
      tree: One leaf per mask, varying.
      transport: How values are sent; the masks' codes replace its own.
      count: i32[], equal on all replicas. Masks roll with it, or are drawn from it.
    """
    leaves, treedef = jax.tree.flatten(tree)
    codes = {path: mask.values if mask else averaging.EXACT for path, mask in masks.items()}
    keys = _keys(masks, transport.seed, count)
    columns = list(zip(masks.items(), leaves, keys, strict=True))
    picked = {path: x if mask is None else mask.select(x, key) for (path, mask), x, key in columns}
    transport = transport._replace(code=lambda path, leaf: codes[path])
    means = averaging.average(transport, picked, count, part).mean

    def put(mask, x, key, mean):
        if mask is None:
            return to_varying(mean, transport.axis_name), None
        on = mask.scatter(jnp.ones(mean.shape, jnp.uint8), key, x) != 0
        return jnp.where(on, mask.scatter(mean, key, x), x), on

    pairs = [put(mask, x, key, means[path]) for (path, mask), x, key in columns]
    return Exchanged(*map(treedef.unflatten, zip(*pairs, strict=True)))


def _keys(masks, seed: int, count: jax.Array) -> list[Key]:
    return [fold(Key(count, jnp.uint32(seed)), i) for i in range(len(masks))]
