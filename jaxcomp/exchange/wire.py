"""Collectives that move encoded buckets, as one message each.

Bytes in the docstrings are those that leave one replica, for payloads of `m` bytes and R
replicas. Every function runs inside `shard_map` (or `jax.vmap`) over `axis_name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp._printing import text
from jaxcomp.compressors.base import Compressor, Key
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.policies import Order, Policy, last_layers_first, policy_of
from jaxcomp.exchange import decoding
from jaxcomp.exchange.journeys import Hop, Journey, alone
from jaxcomp.exchange.messages import message_of
from jaxcomp.replicas.types import is_tracked


class Mean(NamedTuple):
    """The mean of a bucket over the replicas, and what compression lost."""

    mean: jax.Array  # f32[numel], equal on all replicas
    # f32[numel], what this replica's message decodes to; f32[R, numel / R] if it is R messages
    sent: jax.Array
    owner_residual: jax.Array | None  # f32[numel / R], what this owner did not pass on


class Exchange(NamedTuple):
    """A way to average buckets; the end of this file lists them.

    It is called to send by a code: `two_shot(quantize(4))` is a `Transport`.

    Attributes:
      journey: `(x: f32[numel], owner_residual, compressor, shared: Key, axis_name) -> Journey`,
        which returns a `Mean`.
      owns_chunks: Whether each replica encodes a chunk for the others, and keeps an owner's
        residual of numel / R elements. Otherwise that residual is None.
      sums_linear: Whether linear codes are summed on the wire instead.
    """

    journey: Callable[[jax.Array, jax.Array | None, Compressor, Key, str], Journey]
    owns_chunks: bool
    sums_linear: bool = True

    def mean(self, *args) -> Mean:
        """The `Mean` of one bucket; arguments as of `journey`."""
        return alone(self.journey(*args))

    def __call__(
        self,
        code: Compressor | Policy,
        *,
        bucket_numel: int | None = None,
        seed: int = 0,
        order: Order | None = last_layers_first,
    ) -> Transport:
        """How to send, for any argument of a method that takes a code.

        Args:
          code: Encodes buckets; or a policy `(path, leaf) -> Compressor`.
          bucket_numel: Most elements of one message's bucket; by default at most 8 buckets a code.
          seed: Seed of masks, shifts and stochastic rounding; equal on all replicas.
          order: `path -> key`, by which the leaves of a code are sorted before they are cut into
            buckets: see `jaxcomp.last_layers_first`. None: as in the tree. What owners keep by
            bucket, `owner_residual`, has the order in its structure where it differs from the
            tree's, so that it fits no other one.

        Raises:
          ValueError: For anything but a code.
        """
        _require_code(code)
        return Transport(code, self, bucket_numel, seed, order)

    def __repr__(self) -> str:
        return getattr(self.journey, "__name__", repr(self.journey)).removesuffix("_journey")


class Transport(NamedTuple):
    """How a tree is sent: a code, an exchange, buckets and a seed.

    An exchange makes it: `jaxcomp.gathered(jaxcomp.quantize(4), seed=1)`. Methods take one wherever
    they take a code; a code alone means `jaxcomp.two_shot(code)`.
    """

    code: Compressor | Policy
    exchange: Exchange
    bucket_numel: int | None = None  # most elements of one message's bucket; None: 8 buckets a code
    seed: int = 0  # of masks, shifts and stochastic rounding; equal on all replicas
    order: Order | None = last_layers_first  # `path -> key` that sorts leaves; None: as in the tree
    axis_name: str = ""  # the mesh axis of the replicas, which a method fills in

    def __repr__(self) -> str:
        cut = "" if self.bucket_numel is None else f", bucket_numel={self.bucket_numel}"
        seed = f", seed={self.seed}" if self.seed else ""
        order = "" if self.order is last_layers_first else f", order={text(self.order)}"
        return f"{self.exchange!r}({text(self.code)}{cut}{seed}{order})"


def transport_of(code: Compressor | Policy | Transport, axis_name: str) -> Transport:
    """The transport of a method over its axis; a code alone is sent by `two_shot`.

    Raises:
      ValueError: If it is neither a code nor a transport.
    """
    transport = code if isinstance(code, Transport) else two_shot(code)
    return transport._replace(axis_name=axis_name)


def _require_code(code):
    if isinstance(code, Exchange):
        raise ValueError(f"got {code!r} without a code; write {code!r}(quantize(4)).")
    policy_of(code)


def _encode(compressor, x, shared, private):
    # Decoding must read the message. Fused with the encoding, it would encode again for every
    # entry, and a whole exchange would take 1.3 to 2.9 times as long.
    return lax.optimization_barrier(message_of(compressor.encode(x, shared, private)))


def all_gather(message: jax.Array, axis_name: str) -> jax.Array:
    """Every replica's message, one a row, equal on all replicas by type."""
    return _sent_to_all(message, axis_name).reshape(-1, *message.shape)


def _sent_to_all(message, axis_name):
    """The concatenated messages. Sends the encoded array itself, not a view.

    XLA:GPU starts a message once its operand is ready, and waits for it where its result is used.
    It would schedule a view in between too late or too early.
    """
    kind = {"to": "invarying"} if is_tracked(axis_name) else {}
    return lax.all_gather(message, axis_name, tiled=True, **kind)


def _messages_of_all(message, axis_name):
    """A journey of one hop that returns every replica's message, one a row."""
    arrived = yield Hop(lambda message: _sent_to_all(message, axis_name), message)
    return arrived.reshape(-1, message.size)


def summed_journey(x, owner_residual, compressor: Compressor, shared: Key, axis_name: str):
    """The mean by summing payloads on the wire, for linear compressors: one all-reduce.

    Sends 2 m (R-1)/R bytes, on CPUs together with other buckets' sums. With `identity` it is the
    exact mean. Only the compressor loses anything; there is no owner, and `owner_residual` does not
    change.
    """
    payload = compressor.encode(x, shared, shared)
    total = yield Hop(lambda tree: lax.psum(tree, axis_name), payload, is_sum=True)
    mean = jax.tree.map(lambda leaf: leaf / lax.axis_size(axis_name), total)
    decode = lambda payload: compressor.decode(payload, shared).astype(x.dtype)
    return Mean(decode(mean), decode(payload), owner_residual)


def gathered_journey(x, owner_residual, compressor: Compressor, shared: Key, axis_name: str):
    """The mean by sending every message to every replica: one all-gather.

    Sends m (R-1) bytes, loses only what this replica's encoding loses, and decodes R messages. Use
    it for two replicas, or if latency matters more than bytes.
    """
    if compressor.shared_selection is not None:
        return (
            yield from _selected_journey(
                gathered_journey, x, 1, owner_residual, compressor, shared, axis_name
            )
        )
    message = _encode(compressor, x, shared, _private(shared, axis_name))
    decode = decoding.decoder(compressor, shared, x.size, x.dtype)
    messages = yield from _messages_of_all(message, axis_name)
    total = decoding.total_of_all(messages, compressor, shared, x)
    return Mean(total / len(messages), decode(message), owner_residual)


def from_senders_journey(x, owner_residual, compressor: Compressor, shared: Key, axis_name: str):
    """The mean over the replicas that sent an entry, not over all: one all-gather.

    An entry that one of R replicas sends is not divided by R. Bytes and losses are those of
    `gathered_journey`.
    """
    message = _encode(compressor, x, shared, _private(shared, axis_name))
    decode = decoding.decoder(compressor, shared, x.size, x.dtype)
    messages = yield from _messages_of_all(message, axis_name)

    with_count = lambda values: (values, (values != 0).astype(values.dtype))
    total, senders = decoding.total_of_all(messages, compressor, shared, x, with_count)
    return Mean(total / jnp.maximum(senders, 1), decode(message), owner_residual)


def two_shot_journey(x, owner_residual, compressor: Compressor, shared: Key, axis_name: str):
    """The mean through owners: each replica averages one chunk, encodes it again and passes it on.

    An all-to-all and an all-gather send 2 m (R-1)/R bytes together. 1-bit Adam's all-reduce,
    CocktailSGD's double-sided compression, CGX and a ZeRO++ hop all have this form.

    Args:
      x: `f32[numel]`, this replica's bucket, numel divisible by R.
      owner_residual: `f32[numel / R]`, what this owner has not passed on yet.
      compressor: Encodes chunks of numel / R elements, in both directions.
      shared: Key that is equal on all replicas.
      axis_name: The mesh axis of the replicas.

    Returns:
      The `Journey` of a `Mean`. Nothing is lost over any number of steps: mean + owner_residual' =
      mean_i(sent_i) + owner_residual.

    References:
      Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021, Section 5; Wang et
      al., `CocktailSGD <https://proceedings.mlr.press/v202/wang23t.html>`_, 2023, Algorithm 1.
    """
    if compressor.shared_selection is not None:
        chunks = lax.axis_size(axis_name)
        return (
            yield from _selected_journey(
                two_shot_journey, x, chunks, owner_residual, compressor, shared, axis_name
            )
        )
    chunk, sent = yield from _reduce_scatter(x, compressor, shared, axis_name)
    total = chunk + owner_residual
    messages, message = yield from _gather(total, compressor, shared, axis_name)
    decode = decoding.decoder(compressor, shared, chunk.size, x.dtype)
    # Sparse codes decode into zeros, so that a loop would need memory for one row more.
    is_sparse = compressor.selection or compressor.stages
    mean = (decoding.rows if is_sparse else decoding.rows_once)(messages, decode)
    return Mean(mean, sent.reshape(-1, chunk.size), total - decode(message))


def _selected_journey(journey, x, num_chunks, owner_residual, compressor, shared, axis_name):
    """A journey for the entries that all replicas select; it does not touch the others.

    An owner's residual at the other entries waits until they are selected.
    """
    selection, rest = compressor.shared_selection
    chunks = x.reshape(num_chunks, -1)
    pick = lambda chunk: selection.select(chunk, shared)[0]
    put = lambda values: selection.scatter(values, (), shared, chunks.shape[1])
    whole = lambda values: jax.vmap(put)(values.reshape(num_chunks, -1)).reshape(-1)
    picked = None if owner_residual is None else pick(owner_residual)
    # As in `compose`, each stage has a key of its own.
    key = fold(shared, 1)
    picked_chunks = jax.vmap(pick)(chunks).reshape(-1)
    mean, sent, kept = yield from journey(picked_chunks, picked, rest, key, axis_name)
    if owner_residual is not None:
        owner_residual = owner_residual - put(picked) + put(kept)
    return Mean(whole(mean), whole(sent), owner_residual)


def reduce_scatter(x, compressor: Compressor, shared: Key, axis_name: str):
    """Gives each replica the mean of its own chunk of everyone's bucket.

    Uses an all-to-all and a local sum, since gloo's reduce-scatter is wrong on JAX 0.10.2 for large
    chunks. Sends m (R-1)/R bytes; chunk number i belongs to replica number i.

    Args:
      x: `f32[numel]`, numel divisible by R.
      compressor: Encodes chunks of numel / R elements.
      shared: Key that is equal on all replicas.
      axis_name: The mesh axis of the replicas.

    Returns:
      `(chunk: f32[numel / R], sent: f32[numel])`: the decoded mean of this replica's chunk, and
      what its messages decode to.
    """
    return alone(_reduce_scatter(x, compressor, shared, axis_name))


def _reduce_scatter(x, compressor, shared, axis_name):
    num_replicas = lax.axis_size(axis_name)
    chunks = x.reshape(num_replicas, -1)
    private = _private(shared, axis_name)
    decode = decoding.decoder(compressor, shared, chunks.shape[1], x.dtype)
    messages = jax.vmap(
        lambda chunk, index: _encode(compressor, chunk, shared, fold(private, index))
    )(chunks, jnp.arange(num_replicas))
    if not is_tracked(axis_name):
        # Under vmap a value that is equal everywhere has no axis, and JAX returns other shapes for
        # it.
        messages += (0 * lax.axis_index(axis_name)).astype(messages.dtype)
    exchange = functools.partial(lax.all_to_all, axis_name=axis_name, split_axis=0, concat_axis=0)
    received = yield Hop(exchange, messages)
    return decoding.mean(received, decode), decoding.rows(messages, decode)


def gather(chunk, compressor: Compressor, shared: Key, axis_name: str):
    """Gives every replica the chunks of all, each encoded once by its owner.

    Sends m (R-1) bytes, where a chunk is m bytes. The owner uses its decoded chunk too, so that the
    result is equal on all replicas, by type too.

    Args:
      chunk: `f32[chunk_numel]`.
      compressor: Encodes the chunk.
      shared: Key that is equal on all replicas.
      axis_name: The mesh axis of the replicas.

    Returns:
      `(full: f32[R * chunk_numel], kept: f32[chunk_numel])`: the decoded chunks in order of their
      owners, and this replica's own, of a type that varies.
    """
    messages, message = alone(_gather(chunk, compressor, shared, axis_name))
    decode = decoding.decoder(compressor, shared, chunk.size, chunk.dtype)
    return decoding.rows(messages, decode), decode(message)


def _gather(chunk, compressor, shared, axis_name):
    """The owners' messages, one a row, and this replica's own."""
    message = encode_own(chunk, compressor, shared, axis_name)
    return (yield from _messages_of_all(message, axis_name)), message


def encode_own(chunk, compressor: Compressor, shared: Key, axis_name: str | tuple[str, ...]):
    """An owner's message: the first half of `gather`, with owners over all axes."""
    private = fold(_private(shared, axis_name), lax.axis_size(axis_name))
    return _encode(compressor, chunk, shared, private)


def _private(shared: Key, axis_name: str | tuple[str, ...]) -> Key:
    """This replica's key: independent of the others', so that rounding noise averages out."""
    return fold(shared, lax.axis_index(axis_name), 1)


summed = Exchange(summed_journey, owns_chunks=False)
gathered = Exchange(gathered_journey, owns_chunks=False)
from_senders = Exchange(from_senders_journey, owns_chunks=False)
two_shot = Exchange(two_shot_journey, owns_chunks=True)
