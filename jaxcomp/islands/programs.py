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
from jax.sharding import NamedSharding

from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold, random_bits
from jaxcomp.exchange import averaging, buckets, decoding, messages, wire
from jaxcomp.methods.local_steps import Fragments, outer_step
from jaxcomp.methods.moments import to_moment_dtype
from jaxcomp.replicas.finite import finite

AXIS = "part"
Cuts = tuple[int, ...]  # of one leaf: the parts along each of its axes


class Programs(NamedTuple):
    """The programs of one fragment; all are compiled, and donate nothing but sums."""

    # `(params, consensus, residual, count, number) -> (messages, residual)`
    encode: Callable[..., tuple[Any, Any]]
    # `(sums, messages, weight, count) -> (sums, bool[])`: a difference that is not finite weighs 0.
    add: Callable[..., tuple[Any, jax.Array]]
    # `(params, consensus, sums, outer, stays) -> (params, consensus, outer, u32[])`
    merge: Callable[..., tuple[Any, Any, Any, jax.Array]]
    # `() -> sums` of no message: `sum_i w_i x_i` and `sum_i w_i`, trees
    nothing: Callable[[], Any]
    messages: Any  # their shapes, u8[parts, bytes] each

    @property
    def payload(self) -> int:
        """Bytes of one island's payload."""
        return sum(x.size for x in jax.tree.leaves(self.messages))

    def cut(self, payload: np.ndarray) -> Any:
        """The messages of a payload, u8[bytes]."""
        leaves, treedef = jax.tree.flatten(self.messages)
        *pieces, _ = np.split(payload, np.cumsum([x.size for x in leaves]))
        return treedef.unflatten(x.reshape(s.shape) for x, s in zip(pieces, leaves, strict=True))


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
      like: Its leaves, float32 or wider: their shapes, and where they are sharded.
      cuts: How each leaf is cut.
      transport: The codes, and `jaxcomp.gathered` or `jaxcomp.from_senders`.
      outer: The outer optimizer.
      error_decay: See `jaxcomp.local_steps`.
      keep: Share of its own difference that an island keeps.
    """
    places = jax.tree.map(place_of, like)
    like = jax.eval_shape(lambda: like)  # programs keep no arrays
    treedef, parts = jax.tree.structure(like), [math.prod(cut) for cut in cuts]
    kinds, cut_tree = sorted(set(parts)), treedef.unflatten(cuts)
    groups = Fragments(treedef, tuple(map(kinds.index, parts)))  # leaves of as many parts
    # One tree per group, with leaves `[parts, ...]`, and back.
    rows = lambda tree: groups.cut(jax.tree.map(_in_rows, tree, cut_tree))
    whole = lambda trees: jax.tree.map(_whole, groups.merged(trees), cut_tree)
    one = lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    rows_like = [jax.tree.map(one, tree) for tree in jax.eval_shape(rows, like)]
    transport = transport._replace(axis_name=AXIS)
    counts_senders = transport.exchange == wire.from_senders

    def encode(params, consensus, residual, count, number):
        kept = [None] * len(kinds)
        if error_decay is not None:
            kept = rows(jax.tree.map(lambda e: error_decay * e, residual))
        code = functools.partial(_encoded, transport, count, number)
        sent, left = zip(*map(code, rows(_drift(params, consensus)), kept), strict=True)
        if error_decay is None:
            return list(sent), None
        # What is not finite does not count, and would stay so.
        left, is_finite = whole(left), finite(left)
        return list(sent), jax.tree.map(functools.partial(jnp.where, is_finite), left, residual)

    def add(sums, sent, weight, count):
        decode = functools.partial(_decoded, transport, count)
        found = whole(list(map(decode, kinds, rows_like, sent)))
        good = finite(found)
        weight = jnp.where(good, weight, 0.0)
        plus = lambda total, x: total + jnp.where(good, weight.astype(x.dtype) * x, 0.0)
        share = lambda w, x: w + (jnp.where(x != 0, weight, 0) if counts_senders else weight)
        return (jax.tree.map(plus, sums[0], found), jax.tree.map(share, sums[1], found)), good

    def merge(params, consensus, sums, outer_state, stays):
        mean = lambda x, w: x / jnp.where(w > 0, w, 1).astype(x.dtype)
        drift = finite_drift(params, consensus)
        means = jax.tree.map(mean, *sums)
        change, left, outer_state = outer_step(outer, keep, consensus, drift, means, outer_state)
        consensus = jax.tree.map(jnp.add, consensus, change)
        drift = jax.tree.map(functools.partial(jnp.where, stays), drift, left)
        moved = lambda p, c, d: (c + d).astype(p.dtype)
        params = jax.tree.map(moved, params, consensus, drift)
        return params, consensus, outer_state, checksum(consensus)

    weight = lambda x: jnp.zeros(x.shape if counts_senders else (), jnp.float32)
    number, left = jax.ShapeDtypeStruct((), jnp.int32), None if error_decay is None else like
    sent, _ = jax.eval_shape(encode, like, like, left, number, number)
    # Sums lie where the consensus does, though messages come to every device.
    totals = places, (places if counts_senders else None)
    nothing = lambda: (jax.tree.map(jnp.zeros_like, like), jax.tree.map(weight, like))
    return Programs(
        in_turn(jax.jit(encode)),
        in_turn(jax.jit(add, donate_argnums=0, out_shardings=(totals, None))),
        in_turn(jax.jit(merge, out_shardings=(None, places, None, None))),
        in_turn(jax.jit(nothing, out_shardings=totals)),
        sent,
    )


def in_turn(program: Callable) -> Callable:
    """The program; among several processes of CPUs it ends before another one begins.

    Their collectives would meet those of the other in any order. GPUs and TPUs keep the order.
    """

    def call(*args):
        unordered = jax.process_count() > 1 and jax.default_backend() == "cpu"
        if not unordered:
            return program(*args)
        return jax.block_until_ready(program(*jax.block_until_ready(args)))

    return call


def place_of(x: Any) -> NamedSharding | None:
    """The sharding of an array that lies on a mesh of several devices."""
    found = getattr(x, "sharding", None)
    return found if isinstance(found, NamedSharding) and found.mesh.size > 1 else None


def checksum(tree: Any) -> jax.Array:
    """u32[] of the bits of a tree, the same for any sharding: sums have no order.

    It is for differences by rounding, not against somebody who means to hide one.
    """
    total = jnp.uint32(0)
    for number, leaf in enumerate(jax.tree.leaves(tree)):
        bits = lax.bitcast_convert_type(leaf, jnp.uint32)
        odd = random_bits(fold(Key(jnp.int32(0), jnp.uint32(number)), 1), bits.shape) | 1
        total += jnp.sum(bits * odd, dtype=jnp.uint32)
    return total


def cuts_of(leaf: jax.Array) -> Cuts:
    """The parts that a leaf's sharding makes along each of its axes."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    return tuple(whole // max(part, 1) or 1 for whole, part in zip(leaf.shape, shard, strict=True))


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


def _decoded(transport, count, parts, like, sent):
    """What the messages of a group decode to."""

    def one(sent):
        plan = averaging.plan_of(transport, like)

        def line(key, bucket, message):
            code = bucket.label.compressor
            return decoding.decoder(code, key, bucket.numel, bucket.dtype)(message)

        shared = Key(count, jnp.uint32(transport.seed))
        return buckets.unflatten(plan, averaging.map_buckets(line, plan, shared, sent))

    return jax.vmap(one, axis_name=AXIS, axis_size=parts)(sent)  # which may be empty


def finite_drift(params: Any, consensus: Any) -> Any:
    """How far parameters are from the consensus; nothing if they are not finite."""
    drift = _drift(params, consensus)
    good = finite(drift)
    return jax.tree.map(lambda d: jnp.where(good, d, 0.0), drift)


def _drift(params, consensus):
    return jax.tree.map(lambda p, c: to_moment_dtype(p) - c, params, consensus)
