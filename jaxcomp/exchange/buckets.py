"""Pytrees as a few flat buckets of bounded size, planned from shapes alone."""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxcomp._checks import instead_of
from jaxcomp._printing import Printed
from jaxcomp.compressors.platforms import LANES, platform
from jaxcomp.compressors.policies import Order, path_of
from jaxcomp.replicas.layers import common_value
from jaxcomp.replicas.types import size_over_shards

_MOST_BUCKETS = 8
_UNIT = 10 * 2**17


class Segment(NamedTuple):
    """The entries `start:stop` of leaf number `leaf`, in the order of `line_of`."""

    leaf: int
    start: int
    stop: int


class Bucket(NamedTuple):
    """A flat array that is sent as one message: segments, then zeros up to `numel`."""

    label: Any  # hashable: the label of its leaves
    segments: tuple[Segment, ...]
    dtype: Any  # float32, or float64 if a leaf is
    numel: int

    @property
    def used(self) -> int:
        """Entries that belong to leaves; the others are padding."""
        return sum(segment.stop - segment.start for segment in self.segments)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The place of each entry of a pytree in the buckets; static and hashable."""

    treedef: jax.tree_util.PyTreeDef
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    labels: tuple[Any, ...]  # one a leaf
    buckets: tuple[Bucket, ...]
    reordered: bool  # whether leaves are in another order than that of the tree


def small_or_vector(*replica_axes: str, numel: int = 1024) -> Callable[[str, Any], bool]:
    """Makes the default rule for the leaves that are sent in float32.

    They are norms and biases (anything with fewer than two axes) and leaves of fewer than
    1,024 elements, over all their shards, as in CGX. They are about 1% of the bytes, and the most
    sensitive leaves.

    Args:
      *replica_axes: Mesh axes that a leaf may vary over without being a shard.
      numel: Another number of elements; leaves without any are small in any case.
    """
    least = max(numel, 1)
    rule = lambda path, leaf: leaf.ndim < 2 or size_over_shards(leaf, *replica_axes) < least
    return Printed(rule, f"small_or_vector({', '.join(map(repr, replica_axes))})")


def make_plan(
    tree: Any,
    label: Callable[[str, Any], Hashable],
    num_replicas: int,
    bucket_numel: int | None = None,
    order: Order | None = None,
) -> Plan:
    """Concatenates the leaves of each label and cuts them into buckets.

    Bucket boundaries depend only on the leaves and on `bucket_numel`, so state per bucket can move
    to another number of replicas; only the padding at its end differs.

    Args:
      tree: Pytree of floating arrays, or anything with `shape` and `dtype`, of any sizes.
      label: `(path, leaf) -> label`, for example the compressor of the leaf. It sees the layers
        of stacks, which are in the buckets as they are in their arrays: layer follows layer.
      num_replicas: Every bucket is padded to a multiple of this.
      bucket_numel: Most elements of a bucket before padding, at least 1. By default each label has
        at most 8 buckets; see `default_numel`.
      order: `path -> key`, by which the leaves of a label are sorted; equal keys and None: as in
        the tree.

    Returns:
      The `Plan`. Leaves without elements are in no bucket.

    Raises:
      ValueError: If the tree has no leaves, or a leaf is not a real floating array. It is a
        `LayersDiffer` if the layers of a stack have different labels.
    """
    if bucket_numel is not None and bucket_numel < 1:
        raise ValueError(f"bucket_numel is {bucket_numel}; write at least 1, or None.")
    keyed, treedef = jax.tree.flatten_with_path(tree)
    if not keyed:
        raise ValueError(
            "got a pytree without leaves; give the gradients of some parameters. In "
            "optax.partition, leave out a label that no parameter has."
        )
    paths = tuple(path_of(key_path) for key_path, _ in keyed)
    leaves = [leaf for _, leaf in keyed]
    for path, leaf in zip(paths, leaves, strict=True):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"the leaf {path!r} has dtype {leaf.dtype}, but only floating gradients can be "
                f"averaged; {instead_of(leaf.dtype)}"
            )
    labels = tuple(common_value(label, key_path, leaf) for key_path, leaf in keyed)
    buckets, changed = [], False
    for value in dict.fromkeys(labels):
        chosen = [i for i, leaf in enumerate(leaves) if labels[i] == value and leaf.size]
        if order is not None:
            chosen, in_tree = sorted(chosen, key=lambda i: order(paths[i])), chosen
            changed |= chosen != in_tree
        most = bucket_numel or default_numel(sum(leaves[i].size for i in chosen))
        for segments in _cut(chosen, [leaf.size for leaf in leaves], most):
            dtypes_inside = {jnp.dtype(leaves[s.leaf].dtype) for s in segments}
            buckets.append(_bucket(value, segments, dtypes_inside, num_replicas))
    shapes = tuple(tuple(leaf.shape) for leaf in leaves)
    dtypes = tuple(jnp.dtype(leaf.dtype) for leaf in leaves)
    return Plan(treedef, paths, shapes, dtypes, labels, tuple(buckets), changed)


def default_numel(numel: int) -> int:
    """Elements of each bucket except the last, for `numel` elements in all.

    There are at most 8 buckets, of at least 21 MB of float32 each. So one is encoded while another
    is sent, but kernels and compile time do not grow with the model. Sizes are multiples of
    10 * 2**17, which the blocks and the period of every default code divide.
    """
    share = -(-numel // (_MOST_BUCKETS * _UNIT))
    return _UNIT * max(share, 4)


def _cut(chosen: list[int], sizes: list[int], bucket_numel: int):
    """Yields the segments of each bucket: the `chosen` leaves in order, cut when full."""
    segments, room = [], bucket_numel
    for leaf in chosen:
        start = 0
        while start < sizes[leaf]:
            stop = min(sizes[leaf], start + room)
            segments.append(Segment(leaf, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield tuple(segments)
                segments, room = [], bucket_numel
    if segments:
        yield tuple(segments)


def _bucket(label, segments, dtypes, num_replicas: int) -> Bucket:
    """Pads so that every replica owns an equal chunk, of whole blocks where that is cheap."""
    dtype = jnp.result_type(jnp.float32, *dtypes)
    used = sum(segment.stop - segment.start for segment in segments)
    # Padding is at most 1/64 of the last chunk, so that it hardly changes the scales there.
    align = 1
    while align < 1024 and 2 * align * num_replicas**2 * 64 <= used:
        align *= 2
    unit = align * num_replicas
    return Bucket(label, segments, dtype, math.ceil(used / unit) * unit)


def flatten(plan: Plan, tree: Any) -> list[jax.Array]:
    """Copies the leaves of a tree of the plan's structure into its buckets, `f32[numel]` each."""
    leaves = plan.treedef.flatten_up_to(tree)
    return [fill(bucket, leaves) for bucket in plan.buckets]


def fill(bucket: Bucket, leaves: list[jax.Array], zeroed: list[Any] | None = None) -> jax.Array:
    """Copies the segments of one bucket out of the leaves of a tree, `f32[numel]`.

    Leaves whose `zeroed`, bool[], holds count as zeros.
    """
    parts = [
        line_of(leaves[s.leaf])[s.start : s.stop].astype(bucket.dtype) for s in bucket.segments
    ]
    if zeroed is not None:
        pairs = zip(parts, bucket.segments, strict=True)
        parts = [jnp.where(zeroed[s.leaf], 0.0, part) for part, s in pairs]
    padding = bucket.numel - bucket.used
    return jnp.concatenate([*parts, jnp.zeros(padding, bucket.dtype)] if padding else parts)


def unflatten(plan: Plan, buckets: list[jax.Array], dtypes: Any = None) -> Any:
    """Copies buckets back into a tree of the planned shapes.

    Args:
      plan: The plan that filled the buckets.
      buckets: One `f32[numel]` or `f32[rows, numel / rows]` per bucket of the plan.
      dtypes: One dtype per leaf; by default the planned ones.

    Returns:
      The tree, without padding; leaves without elements are empty.
    """
    parts: list[list[jax.Array]] = [[] for _ in plan.shapes]
    for bucket, flat in zip(plan.buckets, buckets, strict=True):
        start = 0
        for segment in bucket.segments:
            size = segment.stop - segment.start
            parts[segment.leaf].append(_entries(flat, start, start + size))
            start += size
    leaves = [
        leaf_of(jnp.concatenate(part) if part else jnp.zeros(0), shape).astype(dtype)
        for part, shape, dtype in zip(parts, plan.shapes, dtypes or plan.dtypes, strict=True)
    ]
    return plan.treedef.unflatten(leaves)


def _entries(bucket, start, stop):
    """The entries `start:stop` of a bucket.

    On CPUs no more than a row's come from the one or two rows that hold them. An entry of the
    joined rows would need a division, so that XLA would not vectorize the loop that decodes it.
    """
    if bucket.ndim == 1 or stop - start > bucket.shape[1] or platform() != "cpu":
        return bucket.reshape(-1)[start:stop]
    (first, begin), (last, end) = (divmod(i, bucket.shape[1]) for i in (start, stop - 1))
    if first == last:
        return bucket[first, begin : end + 1]
    return jnp.concatenate([bucket[first, begin:], bucket[last, : end + 1]])


def line_of(x: jax.Array) -> jax.Array:
    """The entries of a leaf, `[numel]`, in their order in buckets.

    TPUs keep a matrix in tiles of 8 rows and 128 columns. There a bucket has tile after tile, so
    that no entry has to move; elsewhere it has row after row.
    """
    if _in_tiles(x.shape):
        *stack, rows, columns = x.shape
        x = x.reshape(*stack, rows // 8, 8, columns // LANES, LANES).swapaxes(-3, -2)
    return x.reshape(-1)


def leaf_of(line: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The leaf of a line that `line_of` made."""
    if _in_tiles(shape):
        *stack, rows, columns = shape
        line = line.reshape(*stack, rows // 8, columns // LANES, 8, LANES).swapaxes(-3, -2)
    return line.reshape(shape)


def _in_tiles(shape):
    are_whole = len(shape) > 1 and shape[-2] % 8 == 0 and shape[-1] % LANES == 0
    return are_whole and platform() == "tpu"
