"""DeMo: sends the largest coefficients of each momentum's cosine transform, keeps the rest."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomp._checks import is_count, require, require_decay, require_static, schedule_of
from jaxcomp._printing import Printed, text
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.compose import compose
from jaxcomp.compressors.policies import last_layers_first, path_of
from jaxcomp.compressors.sparse import top_k
from jaxcomp.exchange import averaging, wire
from jaxcomp.methods import moments
from jaxcomp.methods.common import method
from jaxcomp.replicas.finite import not_finite, poisoned, unless
from jaxcomp.replicas.protocol import MethodState
from jaxcomp.replicas.types import num_replicas, to_varying


@MethodState.register
class DemoState(NamedTuple):
    """State of `demo`."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    # f32 leaves of the parameters' shapes: this replica's momentum, less what it sent.
    residual: Any
    # f32[numel / R] per bucket: coefficients of the mean that this owner has not passed on yet;
    # None without owners.
    owner_residual: Any = None


def demo(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    *,
    decay: float = 0.999,
    top: int = 32,
    tile: int = 64,
    weight_decay: float = 0.0,
    values: Compressor | None = None,
    mean: wire.Exchange = wire.from_senders,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """DeMo: averages a few cosine coefficients of the replicas' momenta, and steps by the sign.

    With m_i the momentum of replica i, D the orthonormal cosine transform of its tiles and T the
    largest coefficients of each tile, one step is

        m_i <- decay m_i + rate g_i,  q_i = T(D m_i),  m_i <- m_i - D^-1 q_i,
        params <- (1 - rate weight_decay) params - rate sign(D^-1 mean_i q_i).

    What a replica has not sent stays in its momentum: there is no other residual. Parameters are
    equal on all replicas. With the sign, all entries of a step have equal magnitude.

    Args:
      learning_rate: Learning rate, or a schedule `count -> rate`.
      axis_name: Mesh axis of the replicas.
      decay: Decay of the momentum in each step.
      top: Coefficients of each tile that are sent, at least 1; all of a smaller tile.
      tile: Longest side of a tile; its sides are the largest divisors of the matrix's sides up to
        this. Where that is less than a quarter of it, as for a prime side, the side is padded with
        zeros to equal parts of at most `tile`: 32,003 to 501 of 64. A tile of a vector is a run.
        With more than two axes, all but the last are merged.
      weight_decay: Weight decay, decoupled; multiplied by the learning rate.
      values: Code of the coefficients that are sent; default: float32.
      mean: `jaxcomp.from_senders`, as in the authors' code, divides a coefficient by the number of
        replicas that sent it; `jaxcomp.gathered` divides by all, and gives other signs. With both,
        each replica receives what all others send. `jaxcomp.two_shot` is for many replicas: each
        averages a part of the coefficients, sends the largest of the mean to all, and keeps the
        others for the next step.
      seed: Seed for the code of the values.

    Returns:
      A `GradientTransformationExtraArgs` that keeps one float32 a parameter, and 1 / R more with
      owners. It sends at most what a float32 all-reduce does: leaves whose tiles have at most `top`
      entries are sent so; others that cost more, too, if all coefficients together would. Without
      owners that depends on the number of replicas. A gradient that is not finite makes the update
      NaN on all replicas and changes no state.

    Raises:
      ValueError: At construction for arguments out of range; at trace time without `params`, for an
        unknown axis, gradients that are already reduced, or leaves that are not floating.

    Examples:
      >>> import jaxcomp
      >>> tx = jaxcomp.demo(1e-3, "replica", weight_decay=0.1)

    References:
      B. Peng et al., `DeMo: Decoupled Momentum Optimization <https://arxiv.org/abs/2411.19870>`_,
      2024, algorithm 1, and the form of its code: the rate in the momentum, the mean over senders.
      Deviations: there may be owners; sides without a large divisor are padded, and leaves may be
      sent in float32, as above. Positions are sent in as many bits as a tile needs (its code: 64).
      In all buckets of a code but the first, tiles whose size does not divide 1,310,720 are
      shifted, and so are those of an owner.
    """
    name = "demo"
    require_static(name, decay=decay, top=top, tile=tile, weight_decay=weight_decay)
    require(0 <= decay <= 1, name, "[0, 1]", "decay=0.999", decay=decay)
    require(is_count(top), name, "at least 1, as an integer", "top=32", top=top)
    require(is_count(tile, 2), name, "at least 2, as an integer", "tile=64", tile=tile)
    require_decay(name, weight_decay)
    holds, write = isinstance(mean, wire.Exchange), "mean=jaxcomp.two_shot, values=quantize(4)"
    require(holds, name, "an exchange without a code", write, mean=mean)
    rate_of = schedule_of(name, learning_rate)

    def code_of(block):
        """The code of tiles of `block` entries; no places are sent with all of them."""
        if block <= top:
            return averaging.EXACT
        sparse = top_k(top / block, block=block)
        return sparse if values is None else compose(sparse, values)

    def planned(momentum):
        """How the coefficients of a momentum are sent, and its leaves' tiles."""
        keyed, _ = jax.tree.flatten_with_path(momentum)
        tiles = [_tiles(leaf, _sides(leaf, tile)) for _, leaf in keyed]
        rows = [
            (code_of(math.prod(x.shape[1:])), x, leaf.size)
            for (_, leaf), x in zip(keyed, tiles, strict=True)
        ]
        codes = _cheapest(rows, mean, num_replicas(axis_name))
        # Leaves have numbers, since two may have one path.
        by_number = lambda number, leaf: codes[int(number)]
        late = lambda number: last_layers_first(path_of(keyed[int(number)][0]))
        order = Printed(late, text(last_layers_first))
        return wire.transport_of(mean(by_number, seed=seed, order=order), axis_name), tiles

    def init_fn(params):
        residual = to_varying(jax.tree.map(moments.zeros, params), axis_name)
        owed = None
        if mean.owns_chunks:
            transport, tiles = planned(residual)
            flat = [x.reshape(-1) for x in tiles]
            owed = averaging.zero_owner_residual(averaging.plan_of(transport, flat), transport)
        zero = jnp.zeros([], jnp.int32)
        return DemoState(count=zero, residual=residual, owner_residual=owed)

    def update_fn(updates, state, params, **_):
        rate = jnp.asarray(rate_of(state.count), jnp.float32)
        moved = lambda m, g: decay * m + rate * g.astype(m.dtype)
        momentum = jax.tree.map(moved, state.residual, updates)
        transport, tiles = planned(momentum)
        there = [_turned(x, backwards=False) for x in tiles]
        flat, owed = [x.reshape(-1) for x in there], state.owner_residual
        bad = not_finite(updates, axis_name) > 0
        got = averaging.average(transport, flat, state.count, "", owner_residual=owed, bad=bad)
        leaves, treedef = jax.tree.flatten(momentum)

        def back(tree):
            return treedef.unflatten(
                _whole(_turned(x.reshape(like.shape), backwards=True), leaf.shape)
                for x, like, leaf in zip(tree, there, leaves, strict=True)
            )

        def change(param, common):
            decayed = weight_decay * param.astype(common.dtype)
            return -rate * (jnp.sign(common) + decayed)

        residual = jax.tree.map(jnp.subtract, momentum, back(got.sent))
        new = poisoned(got.failed, jax.tree.map(change, params, back(got.mean)))
        return new, DemoState(
            count=optax.safe_increment(state.count),
            residual=unless(got.failed, residual, state.residual),
            owner_residual=None if owed is None else unless(got.failed, got.owner_residual, owed),
        )

    return method(name, axis_name, init_fn, update_fn)


def _cheapest(rows, mean, replicas):
    """The code of each leaf: float32 for those that cost more, if all together would.

    Args:
      rows: For each leaf its code, its tiles `[count, *sides]`, and its size.
      mean: The exchange.
      replicas: How many replicas exchange.
    """
    # In units of an all-reduce's bits: it sends 2 (R - 1) / R of them, as owners do; a gather sends
    # R - 1.
    hops, messages = (1, replicas) if mean.owns_chunks else (replicas / 2, 1)
    cost = []
    for code, tiles, numel in rows:
        # What is encoded is padded, which may make one tile more of it.
        padded = tiles.size + messages * math.prod(tiles.shape[1:])
        coded = hops * (code.bits_per_parameter * padded / 32)
        cost.append(numel if code == averaging.EXACT else coded)
    codes, numels = [row[0] for row in rows], [row[2] for row in rows]
    if sum(cost) <= sum(numels):
        return codes
    priced = zip(codes, cost, numels, strict=True)
    return [averaging.EXACT if dear > numel else code for code, dear, numel in priced]


def _sides(leaf, tile):
    """The sides of a leaf's tiles, each at most `tile`."""
    rows, columns = _matrix(leaf.shape)
    return _side(rows, tile), _side(columns, tile)


def _matrix(shape):
    """The sides of a leaf as a matrix: a vector is one row."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def _side(n, tile):
    """The side of tiles along a side of n: its largest divisor, or an equal part of more than n."""
    n = max(n, 1)
    divisor = max(d for d in range(1, min(n, tile) + 1) if n % d == 0)
    return divisor if 4 * divisor >= min(n, tile) else math.ceil(n / math.ceil(n / tile))


def _tiles(x, sides):
    """Cuts a leaf into tiles, padded with zeros: `[count, *sides]`."""
    x, (high, wide) = x.reshape(_matrix(x.shape)), sides
    down, across = (math.ceil(n / side) for n, side in zip(x.shape, sides, strict=True))
    x = jnp.pad(x, ((0, down * high - x.shape[0]), (0, across * wide - x.shape[1])))
    cut = x.reshape(down, high, across, wide)
    return cut.transpose(0, 2, 1, 3).reshape(down * across, high, wide)


def _whole(tiles, shape):
    """Undoes `_tiles`."""
    (rows, columns), (_, high, wide) = _matrix(shape), tiles.shape
    down, across = math.ceil(rows / high), math.ceil(columns / wide)
    cut = tiles.reshape(down, across, high, wide)
    whole = cut.transpose(0, 2, 1, 3).reshape(down * high, across * wide)
    return whole[:rows, :columns].reshape(shape)


def _turned(tiles, *, backwards):
    """The cosine transform of each tile, or its inverse, as two matrix products."""
    row_basis, column_basis = (cosines(n).astype(tiles.dtype) for n in tiles.shape[1:])
    if not backwards:
        row_basis, column_basis = row_basis.T, column_basis.T
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    return product("ai,kij,bj->kab", row_basis.T, tiles, column_basis.T)


def cosines(n: int) -> np.ndarray:
    """The orthonormal cosine transform (DCT-II) of n values: f64[n, n], one row per coefficient."""
    number, place = np.arange(n)[:, None], np.arange(n)[None]
    matrix = np.cos(np.pi * (2 * place + 1) * number / (2 * n)) * np.sqrt(2 / n)
    matrix[0] /= np.sqrt(2)
    return matrix
