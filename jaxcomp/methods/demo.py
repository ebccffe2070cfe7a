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

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.compose import compose
from jaxcomp.compressors.policies import path_of
from jaxcomp.compressors.sparse import top_k
from jaxcomp.exchange import averaging, wire
from jaxcomp.methods import moments
from jaxcomp.methods.common import method, require, schedule_of
from jaxcomp.replicas.finite import not_finite, poisoned, unless
from jaxcomp.replicas.protocol import MethodState
from jaxcomp.replicas.types import num_replicas, to_varying


@MethodState.register
class DemoState(NamedTuple):
    """State of `demo`."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    residual: (
        Any  # f32 leaves of the parameters' shapes: this replica's momentum, less what it sent
    )


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
        replicas that sent it; `jaxcomp.gathered` divides by all, and gives other signs.
      seed: Seed for the code of the values.

    Returns:
      A `GradientTransformationExtraArgs` that keeps one float32 a parameter. It sends at most what
      a float32 all-reduce does: leaves whose tiles have at most `top` entries are sent so; others
      that cost more, too, if all coefficients together would. Each receives those of all others,
      so that this depends on the number of replicas. A gradient that is not
      finite makes the update NaN on all replicas and changes no state.

    Raises:
      ValueError: At construction for arguments out of range; at trace time without `params`, for an
        unknown axis, gradients that are already reduced, or leaves that are not floating.

    Examples:
      >>> import jaxcomp
      >>> tx = jaxcomp.demo(1e-3, "replica", weight_decay=0.1)

    References:
      B. Peng et al., `DeMo: Decoupled Momentum Optimization <https://arxiv.org/abs/2411.19870>`_,
      2024, algorithm 1, and the form of its code: the rate in the momentum, the mean over senders.
      Deviations: sides without a large divisor are padded, and leaves may be sent in float32, as
      above. Positions are sent in as many bits as a tile needs (its code: 64). In all buckets of a
      code but the first, tiles whose size does not divide 1,310,720 are shifted.
    """
    name = "demo"
    require(0 <= decay <= 1, name, "[0, 1]", "decay=0.999", decay=decay)
    require(top >= 1, name, "at least 1", "top=32", top=top)
    require(tile >= 2, name, "at least 2", "tile=64", tile=tile)
    rate = schedule_of(name, learning_rate)
    settings = _Settings(rate, decay, top, tile, weight_decay, values, mean, axis_name, seed)
    init, update = (functools.partial(function, settings) for function in (_init, _update))
    return method(name, axis_name, init, update)


class _Settings(NamedTuple):
    rate: optax.Schedule
    decay: float
    top: int
    tile: int
    weight_decay: float
    values: Compressor | None
    mean: wire.Exchange
    axis_name: str
    seed: int

    def transport(self, tiles: dict[str, jax.Array], numels: dict[str, int]) -> averaging.Transport:
        """How coefficients are exchanged; tiles are concatenated.

        `tiles` and `numels` are the tiles `[count, *sides]` and the size of each leaf.
        """
        codes = {path: self._code(math.prod(x.shape[1:])) for path, x in tiles.items()}
        # In units of an all-reduce's bits: it sends 2 (R - 1) / R of them, a gather R - 1.
        # A bucket is padded, which may make one tile more of it.
        padded = lambda x: x.size + math.prod(x.shape[1:])
        share = lambda path: codes[path].bits_per_parameter * padded(tiles[path]) / 32
        often = num_replicas(self.axis_name) / 2
        cost = {
            path: numels[path] if code == averaging.EXACT else often * share(path)
            for path, code in codes.items()
        }
        if sum(cost.values()) > sum(numels.values()):
            dear = [path for path in codes if cost[path] > numels[path]]
            codes |= dict.fromkeys(dear, averaging.EXACT)
        policy = lambda path, leaf: codes[path]
        return averaging.Transport(policy, self.mean, self.axis_name, None, self.seed)

    def _code(self, block: int) -> Compressor:
        """The code of tiles of `block` entries; no places are sent with all of them."""
        if block <= self.top:
            return averaging.EXACT
        sparse = top_k(self.top / block, block=block)
        return sparse if self.values is None else compose(sparse, self.values)

    def sides(self, leaf: Any) -> tuple[int, int]:
        """The sides of a leaf's tiles."""
        rows, columns = _matrix(leaf.shape)
        return _side(rows, self.tile), _side(columns, self.tile)


def _init(settings, params):
    residual = to_varying(jax.tree.map(moments.zeros, params), settings.axis_name)
    return DemoState(jnp.zeros([], jnp.int32), residual)


def _update(settings, updates, state, params, **_):
    rate = jnp.asarray(settings.rate(state.count), jnp.float32)
    moved = lambda m, g: settings.decay * m + rate * g.astype(m.dtype)
    momentum = jax.tree.map(moved, state.residual, updates)
    keyed, treedef = jax.tree_util.tree_flatten_with_path(momentum)
    tiles = [_tiles(leaf, settings.sides(leaf)) for _, leaf in keyed]
    paths = [path_of(path) for path, _ in keyed]
    numels = {path: leaf.size for path, (_, leaf) in zip(paths, keyed, strict=True)}
    transport = settings.transport(dict(zip(paths, tiles, strict=True)), numels)
    there = [_turned(x, backwards=False) for x in tiles]
    bad = not_finite(updates, settings.axis_name) > 0
    flat = treedef.unflatten([x.reshape(-1) for x in there])
    got = averaging.average(transport, flat, state.count, "", bad=bad)
    back = lambda tree: treedef.unflatten(
        [
            _whole(_turned(x.reshape(like.shape), backwards=True), leaf.shape)
            for x, like, (_, leaf) in zip(jax.tree.leaves(tree), there, keyed, strict=True)
        ]
    )
    residual = jax.tree.map(jnp.subtract, momentum, back(got.sent))

    def change(param, common):
        decayed = settings.weight_decay * param.astype(common.dtype)
        return -rate * (jnp.sign(common) + decayed)

    new = poisoned(got.failed, jax.tree.map(change, params, back(got.mean)))
    residual = unless(got.failed, residual, state.residual)
    return new, DemoState(optax.safe_increment(state.count), residual)


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
    of_rows, of_columns = (cosines(n).astype(tiles.dtype) for n in tiles.shape[1:])
    if not backwards:
        of_rows, of_columns = of_rows.T, of_columns.T
    product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    return product("ai,kij,bj->kab", of_rows.T, tiles, of_columns.T)


def cosines(n: int) -> np.ndarray:
    """The orthonormal cosine transform (DCT-II) of n values: f64[n, n], one row per coefficient."""
    number, place = np.arange(n)[:, None], np.arange(n)[None]
    matrix = np.cos(np.pi * (2 * place + 1) * number / (2 * n)) * np.sqrt(2 / n)
    matrix[0] /= np.sqrt(2)
    return matrix
