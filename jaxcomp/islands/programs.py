"""The arithmetic of islands, on their devices: what `local_steps` does, with a store in between.

A tree is one fragment, in its natural shapes. Inside a program each leaf is cut as the run's first
member had sharded it, `[parts, ...]`, so that each device encodes its own shard; every island
encodes and decodes these parts, whatever its own mesh is.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold, random_bits
from jaxcomp.exchange import averaging, buckets, decoding, messages, wire
from jaxcomp.islands.envelopes import Floats
from jaxcomp.methods.local_steps import Fragments, outer_step
from jaxcomp.methods.moments import to_moment_dtype
from jaxcomp.replicas.finite import finite

AXIS = "part"
Cuts = tuple[int, ...]  # of one leaf: the parts along each of its axes


class Sums(NamedTuple):
    """What has been added up of a round's messages."""

    total: Any  # sum_i w_i x_i, a tree
    weight: Any  # sum_i w_i; a tree if each entry is divided by the weight of its senders


class Programs(NamedTuple):
    """The programs of one fragment; all are compiled, and donate nothing."""

    sizes: tuple[tuple[int, int], ...]  # parts and bytes of each message
    floats: tuple[Floats, ...]
    # `(params, consensus, residual, count, number) -> (messages, residual)`
    encode: Callable[..., tuple[list[jax.Array], Any]]
    # `(sums, messages, weight, count) -> (sums, bool[])`: a difference that is not finite weighs 0.
    add: Callable[..., tuple[Sums, jax.Array]]
    # `(params, consensus, sums, outer, stays) -> (params, consensus, outer, u32[2])`
    merge: Callable[..., tuple[Any, Any, Any, jax.Array]]
    nothing: Callable[[], Sums]

    @property
    def payload(self) -> int:
        """Bytes of one island's payload."""
        return sum(parts * size for parts, size in self.sizes)

    def cut(self, payload: memoryview) -> list[np.ndarray]:
        """The messages of a payload of so many bytes."""
        ends = np.cumsum([0, *(parts * size for parts, size in self.sizes)])
        flat = np.frombuffer(payload, np.uint8)
        pieces = zip(ends, ends[1:], self.sizes, strict=False)
        return [flat[start:end].reshape(size) for start, end, size in pieces]


def programs_of(
    like: Any,
    cuts: tuple[Cuts, ...],
    transport: wire.Transport,
    outer: optax.GradientTransformation,
    error_decay: float | None,
    keep: float,
) -> Programs:
    """The programs of one fragment.

    Args:
      like: The shapes of its leaves, float32 or wider.
      cuts: How each leaf is cut.
      transport: The codes, and `jaxcomp.gathered` or `jaxcomp.from_senders`.
      outer: The outer optimizer.
      error_decay: See `jaxcomp.local_steps`.
      keep: Share of its own difference that an island keeps.
    """
    groups = _Groups(like, cuts)
    transport = transport._replace(axis_name=AXIS)
    counts_senders = transport.exchange == wire.from_senders

    def encode(params, consensus, residual, count, number):
        drift, kept = _drift(params, consensus), None
        if error_decay is not None:
            kept = [jax.tree.map(lambda e: error_decay * e, e) for e in groups.rows(residual)]
        rows = groups.rows(drift)
        encoded = [
            _encoded(transport, count, number, *trees)
            for trees in zip(rows, kept or [None] * len(rows), strict=True)
        ]
        sent, left = zip(*encoded, strict=True)
        return sum(sent, []), None if kept is None else groups.whole(left)

    def add(sums, sent, weight, count):
        rows, start = [], 0
        for tree, number in zip(groups.rows_like(), counts, strict=True):
            rows.append(_decoded(transport, count, tree, sent[start : start + number]))
            start += number
        found = groups.whole(rows)
        good = finite(found)
        weight = jnp.where(good, weight, 0.0)
        more = lambda total, x: total + jnp.where(good, weight.astype(x.dtype) * x, 0.0)
        share = weight
        if counts_senders:
            share = jax.tree.map(lambda x: jnp.where(good & (x != 0), weight, 0.0), found)
        total = jax.tree.map(more, sums.total, found)
        return Sums(total, jax.tree.map(jnp.add, sums.weight, share)), good

    def merge(params, consensus, sums, outer_state, stays):
        weight = sums.weight if counts_senders else jax.tree.map(lambda _: sums.weight, like)
        share = lambda x, w: x / jnp.where(w > 0, w, 1).astype(x.dtype)
        drift = _drift(params, consensus)
        drift = jax.tree.map(functools.partial(jnp.where, finite(drift)), drift, _zeros(drift))
        means = jax.tree.map(share, sums.total, weight)
        change, left, outer_state = outer_step(outer, keep, consensus, drift, means, outer_state)
        consensus = jax.tree.map(jnp.add, consensus, change)
        drift = jax.tree.map(functools.partial(jnp.where, stays), drift, left)
        moved = lambda p, c, d: (c + d).astype(p.dtype)
        params = jax.tree.map(moved, params, consensus, drift)
        return params, consensus, outer_state, checksum(consensus)

    def nothing():
        zero = np.zeros([], np.float32)
        weight = (
            jax.tree.map(lambda x: np.zeros(x.shape, np.float32), like) if counts_senders else zero
        )
        return Sums(_zeros(like), weight)

    laid = [_laid_out(transport, tree) for tree in groups.rows_like()]
    counts = [len(buckets_of_group) for buckets_of_group in laid]
    sizes, floats, start = [], [], 0
    for parts, rows in zip(groups.parts, laid, strict=True):
        for size, leaves in rows:
            for part in range(parts):
                at = start + part * size
                floats += [Floats(at + offset, *leaf) for offset, *leaf in leaves]
            sizes.append((parts, size))
            start += parts * size
    compiled = jax.jit(encode), jax.jit(add), jax.jit(merge)
    return Programs(tuple(sizes), tuple(floats), *compiled, nothing=nothing)


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """u32[2] of the bits of a tree, the same for any sharding: sums have no order.

    It is for differences by rounding, not against somebody who means to hide one.
    """
    total = jnp.zeros(2, jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        bits = lax.bitcast_convert_type(leaf, jnp.uint32)
        for half in range(2):
            key = Key(jnp.int32(0), jnp.uint32(2 * number + half))
            odd = random_bits(fold(key, 1), bits.shape) | 1
            total = total.at[half].add(jnp.sum(bits * odd, dtype=jnp.uint32))
    return total


def cuts_of(leaf: jax.Array) -> Cuts:
    """The parts that a leaf's sharding makes along each of its axes."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    return tuple(whole // max(part, 1) or 1 for whole, part in zip(leaf.shape, shard, strict=True))


class _Groups:
    """The leaves of a tree by their number of parts."""

    def __init__(self, like: Any, cuts: tuple[Cuts, ...]):
        leaves, treedef = jax.tree.flatten(like)
        parts_of_leaves = [math.prod(cut) for cut in cuts]
        self.parts, self._like, self._treedef = sorted(set(parts_of_leaves)), leaves, treedef
        self._cuts = treedef.unflatten(cuts)
        self._fragments = Fragments(treedef, tuple(self.parts.index(n) for n in parts_of_leaves))

    def rows(self, tree: Any) -> list[Any]:
        """One tree per group, with leaves `[parts, ...]`."""
        return self._fragments.cut(jax.tree.map(_in_rows, tree, self._cuts))

    def rows_like(self) -> list[Any]:
        """The shapes of one part of `rows`."""
        trees = jax.eval_shape(self.rows, self._treedef.unflatten(self._like))
        one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        return [jax.tree.map(one, tree) for tree in trees]

    def whole(self, rows: Any) -> Any:
        """Undoes `rows`."""
        return jax.tree.map(_whole, self._fragments.merged(rows), self._cuts)


def _in_rows(x, cuts):
    pairs = [(cut, size // cut) for cut, size in zip(cuts, x.shape, strict=True)]
    x = x.reshape([size for pair in pairs for size in pair])
    x = x.transpose(*range(0, x.ndim, 2), *range(1, x.ndim, 2))
    return x.reshape(math.prod(cuts), *(size for _, size in pairs))


def _whole(rows, cuts):
    axes, blocks = len(cuts), rows.shape[1:]
    x = rows.reshape(*cuts, *blocks).transpose([i for a in range(axes) for i in (a, axes + a)])
    return x.reshape([cut * size for cut, size in zip(cuts, blocks, strict=True)])


def _encoded(transport, count, number, rows, residual):
    """The messages of a group, `u8[parts, bytes]` each, and its residual."""

    def one(drift, residual):
        sent: list[jax.Array] = []

        def journey(x, owner_residual, code, shared, axis_name):
            yield from ()  # nothing travels here
            private = fold(shared, number, 1)
            # Bytes on every platform: islands of several platforms read each other's messages.
            message = messages.bytes_of(code.encode(x, shared, private))
            sent.append(lax.optimization_barrier(message))
            decoded = decoding.decoder(code, shared, x.size, x.dtype)(sent[-1])
            return wire.Mean(decoded, decoded, owner_residual)

        own = transport._replace(exchange=wire.Exchange(journey, False, sums_linear=False))
        return sent, averaging.average(own, drift, count, "", residual=residual).residual

    return jax.vmap(one, axis_name=AXIS)(rows, residual)


def _decoded(transport, count, like, sent):
    """What the messages of a group decode to."""

    def one(sent):
        plan = averaging.plan_of(transport, like)

        def line(key, bucket, message):
            code = bucket.label.compressor
            return decoding.decoder(code, key, bucket.numel, bucket.dtype)(message)

        shared = Key(count, jnp.uint32(transport.seed))
        return buckets.unflatten(plan, averaging.map_buckets(line, plan, shared, sent))

    return jax.vmap(one, axis_name=AXIS)(sent)


def _laid_out(transport, like):
    """For each bucket of one part its bytes, and where its floating leaves lie: plain numbers."""
    found = []

    def look(_):
        for bucket in averaging.plan_of(transport, like).buckets:
            code, leaves, start = bucket.label.compressor, [], 0
            for leaf in jax.tree.leaves(messages.payload_like(code, bucket.numel, bucket.dtype)):
                if jnp.issubdtype(leaf.dtype, jnp.floating):
                    leaves.append((start, np.dtype(leaf.dtype), math.prod(leaf.shape)))
                start += -4 * (-math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize // 4)
            found.append((messages.message_bytes(code, bucket.numel, bucket.dtype), leaves))
        return 0

    parts = jax.ShapeDtypeStruct((1,), jnp.float32)
    jax.eval_shape(jax.vmap(look, axis_name=AXIS), parts)
    return found


def _drift(params, consensus):
    return jax.tree.map(lambda p, c: to_moment_dtype(p) - c, params, consensus)


def _zeros(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
