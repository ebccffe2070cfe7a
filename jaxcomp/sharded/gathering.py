"""Gathers a layer's weights from shards and scatters their gradients: one VJP.

Shards are cut over one axis, or over a fast axis and then over the slow one. Weights cross the slow
axis first and gradients last, so that only 1/n_fast of each crosses it on each device.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxcomp.compressors.base import Compressor, Key, Payload
from jaxcomp.compressors.packing import fold
from jaxcomp.exchange import decoding, wire
from jaxcomp.exchange.messages import payload_like, payload_of
from jaxcomp.replicas.shards import Shard, cut, natural, numel_of, without_padding
from jaxcomp.replicas.types import num_replicas, to_varying

SECONDARY = "jaxcomp.qsdp.secondary"  # the name of the result of `send`, for `jax.checkpoint`


class _Bundle(NamedTuple):
    """The static description of leaves that are sent as one message."""

    axes: tuple[str, ...]  # of the shards: `(slow,)` or `(fast, slow)`
    weights: tuple[Compressor, ...]
    gradients: tuple[Compressor, ...]
    fast_gradients: tuple[Compressor, ...]
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]  # of a shard of each leaf
    dtypes: tuple[Any, ...]  # of the shards
    computed: tuple[Any, ...]  # of the decoded weights

    @property
    def wide(self):
        """The dtype of the values before they are encoded."""
        return jnp.result_type(jnp.float32, *self.dtypes)


def send(
    shards: list[Shard], axes: tuple[str, ...], after: Any = None, behind: Any = None
) -> jax.Array:
    """Sends the codes of a layer's shards across the slow axis: the first half of a gather.

    Args:
      shards: The `Shard`s of one layer, each with a key; the first one's is the layer's.
      axes: Their mesh axes, the slow one last.
      after: A tree of arrays; nothing is encoded before they are known.
      behind: A tree of arrays; nothing is sent before they are known.

    Returns:
      A message from each owner along the slow axis with all its shards, one a row. If kept, it is
      the layer's secondary shard.
    """
    bundle = _bundle_of(shards, axes)
    key = _keys(shards)[0]
    flat = jnp.concatenate([lax.stop_gradient(shard.data).astype(bundle.wide) for shard in shards])
    bits = jnp.dtype(f"uint{8 * flat.dtype.itemsize}")
    token = _token(after, key.count).astype(bits)
    flat = lax.bitcast_convert_type(lax.bitcast_convert_type(flat, bits) ^ token, flat.dtype)
    codes = wire.encode_own(flat, _fused(bundle.weights, bundle.sizes), key, axes)
    codes ^= _token(behind, key.count).astype(codes.dtype)
    return checkpoint_name(wire.all_gather(codes, axes[-1]), SECONDARY)


def keep(messages: jax.Array, shards: list[Shard], after: Any) -> jax.Array:
    """The result of `send`, for a gather that waits for `after`."""
    return messages ^ _token(after, _keys(shards)[0].count).astype(messages.dtype)


def pass_on(messages: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sends the result of `send` over the other axes unchanged: `[num_shards, ...]`, all owners."""
    for axis in reversed(axes[:-1]):
        messages = wire.all_gather(messages, axis)
    return messages.reshape(-1, messages.shape[-1])


def receive(
    shards: list[Shard], axes: tuple[str, ...], messages: jax.Array, dtype: Any = None
) -> list[jax.Array]:
    """Decodes a layer's weights, which vary by type, from the result of `pass_on`: the second half.

    Weights of two axes or more are decoded to `dtype`, if given; others, such as norms, have the
    shards' dtype. The VJP returns the gradients of the shards.
    """
    data, counters = [shard.data for shard in shards], [shard.counter for shard in shards]
    bundle = _bundle_of(shards, axes, dtype)
    return _received(bundle, data, messages, _keys(shards), counters)


def scatter(shards: list[Shard], axes: tuple[str, ...], grads: list[jax.Array]) -> list[Shard]:
    """The gradients of a layer's shards from those of its weights, as the VJP of `receive` does.

    The gradients of the counters are tallies of what was sent.
    """
    saved = _keys(shards)[1], [shard.counter for shard in shards]
    owned, _, _, tallies = _received_bwd(_bundle_of(shards, axes), saved, grads)
    return [
        dataclasses.replace(shard, data=data, key=None, levels=None, counter=tally)
        for shard, data, tally in zip(shards, owned, tallies, strict=True)
    ]


def _bundle_of(shards, axes, dtype=None):
    sizes = [numel_of(shard.shape, num_replicas(axes)) for shard in shards]
    for shard, size in zip(shards, sizes, strict=True):
        if shard.data.shape != (size,) or shard.key is None:
            raise ValueError(
                f"got shards {shard.data.shape} {'with' if shard.key else 'without'} a key of a "
                f"parameter {shard.shape}, need ({size},) and a key: give what QSDP.local "
                "returns, and scan over stacked parameters."
            )
    return _Bundle(
        axes,
        tuple(shard.weights for shard in shards),
        tuple(shard.gradients for shard in shards),
        tuple(shard.fast_gradients for shard in shards),
        tuple(shard.shape for shard in shards),
        tuple(sizes),
        tuple(jnp.dtype(shard.data.dtype) for shard in shards),
        tuple(weight_dtype(shard.shape, shard.data.dtype, dtype) for shard in shards),
    )


def weight_dtype(shape: tuple[int, ...], own: Any, dtype: Any) -> Any:
    """The dtype in which a layer sees a weight: `dtype` for matrices, else its own."""
    return jnp.dtype(own if dtype is None or len(shape) < 2 else dtype)


def _keys(shards) -> list[Key]:
    """The layer's key for its weights' codes, and for its gradients'."""
    tables = [shard.levels or (None, None) for shard in shards]
    key = shards[0].key
    return [key._replace(levels=list(levels)) for levels in zip(*tables, strict=True)]


def _token(after, count):
    """u32[], always zero, but XLA cannot know that, so the message waits for `after`.

    XLA:CPU drops optimization barriers before it orders a program, and would gather all layers
    first, or take the second gather of a layer for the first.
    """
    is_number = lambda x: (
        x.dtype != jax.dtypes.float0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )
    leaves = [x for x in jax.tree.leaves(after) if x.size and is_number(x)]
    if not leaves:
        return jnp.uint32(0)
    seen = sum((x.reshape(-1)[0] != 0).astype(jnp.uint32) for x in leaves)
    return seen & (count >> 31).astype(jnp.uint32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _received(bundle: _Bundle, shards, messages, keys: list[Key], counters) -> list[jax.Array]:
    """The parameters of a layer, differentiable with respect to the shards."""
    code = _fused(bundle.weights, bundle.sizes)
    like = payload_like(code, sum(bundle.sizes), bundle.wide)
    payloads = jax.vmap(lambda message: payload_of(message, like).data)(messages)
    weights = []
    # Each by itself, in its own dtype, so that no array holds all of them.
    for index, (shape, size, dtype) in enumerate(
        zip(bundle.shapes, bundle.sizes, bundle.computed, strict=True)
    ):
        decode = _part_decoder(bundle.weights[index], size, _part_key(keys[0], index))
        flat = decoding.rows(payloads[index], decode).astype(dtype)
        # Equal by type until here, then varying, so that JAX sums no gradient in float32.
        rows = to_varying(flat, bundle.axes).reshape(-1, size)
        weights.append(natural(rows, shape))
    return weights


def _received_fwd(bundle, shards, messages, keys, counters):
    return _received(bundle, shards, messages, keys, counters), (keys[1], counters)


def _received_bwd(bundle, saved, grads):
    key, counters = saved
    *fast, slow = bundle.axes
    num_shards = lax.axis_size(bundle.axes)
    parts = [cut(grad.astype(bundle.wide), 0, num_shards) for grad in grads]
    for axis in fast:
        # Keys differ between groups that exchange: shared noise would not average out.
        group_key = fold(key, lax.axis_size(axis), lax.axis_index(slow))
        parts = _scattered(parts, bundle.fast_gradients, group_key, axis)
        key = fold(key, lax.axis_index(axis))
    chunks = [part.reshape(lax.axis_size(slow), -1) for part in parts]
    pieces = _scattered(chunks, bundle.gradients, key, slow)
    owned = [
        without_padding(piece, math.prod(shape), bundle.axes).astype(dtype)
        for piece, shape, dtype in zip(pieces, bundle.shapes, bundle.dtypes, strict=True)
    ]
    tallies = [
        None if counter is None else _counted(chunk, counter, code, bundle.axes)
        for chunk, counter, code in zip(chunks, counters, bundle.gradients, strict=True)
    ]
    return owned, None, None, tallies


_received.defvjp(_received_fwd, _received_bwd)


def _scattered(parts, codes, key, axis_name):
    """The mean over the axis of this device's chunk of each part, in one message."""
    rows = [part.reshape(lax.axis_size(axis_name), -1) for part in parts]
    sizes = [row.shape[1] for row in rows]
    chunks = jnp.concatenate(rows, axis=1).reshape(-1)
    mean, _ = wire.reduce_scatter(chunks, _fused(codes, sizes), key, axis_name)
    return jnp.split(mean, _cuts(sizes))


def _fused(codes, sizes):
    return fused(*zip(codes, sizes, strict=True))


def _counted(chunks, counter, code, axes):
    """The tally of what this device sends across the slow axis; the sum over devices is of all."""
    own = chunks[lax.axis_index(axes[-1])]
    tally = lambda: to_varying(code.levels.tally(own), axes)
    return lax.cond(counter[0] > 0, tally, lambda: jnp.zeros_like(counter))


def _cuts(sizes):
    return list(itertools.accumulate(sizes))[:-1]


def fused(*parts: tuple[Compressor, int]) -> Compressor:
    """Encodes the parts of a bucket separately, as one payload, so that no block crosses parts.

    All parts have the same shared key, and so the same random shift; each has its own rounding
    noise and levels. Unlike other compressors it is for buckets of one size. It promises what all
    parts promise.

    Args:
      *parts: The code and the number of elements of each part, at least 1, in order.

    Raises:
      ValueError: At construction, without parts; at trace time, for a bucket of another size.
    """
    if not parts:
        raise ValueError("fused() got no part; write fused((quantize(8), numel))")
    codes, sizes = zip(*parts, strict=True)
    numel, ends = sum(sizes), list(itertools.accumulate(sizes))

    def encode(x, shared, private):
        if x.size != numel:
            raise ValueError(
                f"fused got a bucket of {x.size} values, needs the {numel} of its parts"
            )
        pieces = [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        data = [
            code.encode(piece, _part_key(shared, index), fold(private, index)).data
            for index, (code, piece) in enumerate(zip(codes, pieces, strict=True))
        ]
        return Payload(tuple(data), numel)

    def decode(payload, shared):
        pieces = [
            _part_decoder(code, size, _part_key(shared, index))(data)
            for index, (code, size, data) in enumerate(zip(codes, sizes, payload.data, strict=True))
        ]
        return jnp.concatenate(pieces)

    contractions = [code.contraction for code in codes]
    return Compressor(
        name=f"fused({', '.join(f'({code.name}, {size})' for code, size in parts)})",
        encode=encode,
        decode=decode,
        bits_per_parameter=sum(c.bits_per_parameter * n for c, n in parts) / numel,
        contraction=None if None in contractions else min(contractions),
        unbiased=all(code.unbiased for code in codes),
        linear=all(code.linear for code in codes),
    )


def _part_decoder(code, size, key):
    """What decodes the data of one part of what `fused` encodes."""
    return lambda data: code.decode(Payload(data, size), key)


def _part_key(shared, index):
    return shared if shared.levels is None else shared._replace(levels=shared.levels[index])
