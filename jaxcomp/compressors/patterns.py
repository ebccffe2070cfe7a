"""Which entries `random_k` picks, and where it puts them back: one of every `stride`.

Each pattern gives the two halves of a `Selection`, `select` and `scatter`.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.blocks import indexed
from jaxcomp.compressors.packing import uniform
from jaxcomp.compressors.platforms import LANES, by_platform, platform

_TILE = (8, LANES)  # of a TPU
_RUN = 8 * LANES  # neighbours that are sent together: a whole tile


def runs(stride):
    """One of each `stride` runs of neighbours, the next one in each step."""

    def select(x, shared):
        mine = shared.count % stride
        tiles, rest = _tiled(x, stride)
        parts = [lax.dynamic_index_in_dim(tiles, mine, axis=1, keepdims=False).reshape(-1)]
        if rest.size:
            parts.append(lax.dynamic_index_in_dim(in_rows(rest, stride), mine, keepdims=False))
        # The barrier keeps each reader of the values from picking them again.
        return lax.optimization_barrier(_joined(parts)), ()

    def scatter(values, where, shared, numel):
        # Selects, which XLA fuses into their readers. The barrier keeps the producer of the values
        # out of that fusion, which would run it `stride` times.
        values, mine = lax.optimization_barrier(values), shared.count % stride
        forms = {"cpu": _runs_in_place, "default": _runs_by_tiles}
        forms = {name: functools.partial(form, stride, numel) for name, form in forms.items()}
        return by_platform(values, mine, **forms)

    return select, scatter


def _runs_by_tiles(stride, numel, values, mine):
    """Puts runs back at `mine` in their groups of `stride`, zeros elsewhere: `f32[numel]`."""
    picked = numel // (stride * _RUN) * _RUN
    groups = values[:picked].reshape(-1, 1, *_TILE)
    is_mine = lax.iota(jnp.int32, stride)[None, :, None, None] == mine
    whole = jnp.where(is_mine, groups, 0)
    rest = _rest(stride, numel - whole.size, values[picked:], mine)
    parts = [whole, rest] if rest.size else [whole]
    return jnp.concatenate([_tiles_of(part, numel) for part in parts]).reshape(-1)


def _runs_in_place(stride, numel, values, mine):
    # On XLA:CPU a broadcast with a reshape, or a concatenation, takes five to ten times as long.
    def put(piece):
        size, picked = piece.stop - piece.start, values[piece.start // stride :]
        count, x = size // (stride * _RUN), jnp.zeros(size, values.dtype)
        if count:
            starts = (stride * lax.iota(jnp.int32, count) + mine) * _RUN
            x = lax.scatter(
                x,
                starts[:, None],
                picked[: count * _RUN].reshape(count, _RUN),
                lax.ScatterDimensionNumbers((1,), (), (0,)),
                indices_are_sorted=True,
                unique_indices=True,
                mode="promise_in_bounds",
            )
        whole = count * stride * _RUN
        rest = _rest(stride, size - whole, picked[count * _RUN :], mine)
        return lax.dynamic_update_slice(x, rest, (whole,)) if rest.size else x

    return _joined([put(piece) for piece in indexed(numel, stride * _RUN)])


def _rest(stride, size, values, mine):
    """The `size` entries after the last whole group: one shorter run of each `stride`."""
    if not size:
        return values[:0]
    is_mine = lax.iota(jnp.int32, stride)[:, None] == mine
    return jnp.where(is_mine, values[: -(-size // stride)], 0).reshape(-1)[:size]


def _tiled(x, stride):
    """Whole groups of `stride` runs, as `f32[groups, stride, 8, 128]`, and what is left over."""
    tiles, groups = _tiles_of(x, x.size), x.size // (stride * _RUN)
    end = groups * stride * (_RUN if tiles.ndim == 1 else 1)
    return tiles[:end].reshape(-1, stride, *_TILE), tiles[end:].reshape(-1)


def _tiles_of(part, numel):
    """A part of `numel` entries: `[entries]`, or `[tiles, 8, 128]` on TPUs if these are whole.

    A TPU cuts and joins tiles of all layers of a stack as they are in memory.
    """
    is_whole = platform() == "tpu" and numel % _RUN == 0
    return part.reshape(-1, *_TILE) if is_whole else part.reshape(-1)


def strided(stride):
    """Every `stride`-th entry, rolled by one each step."""

    def select(x, shared):
        padded = jnp.pad(x, (0, -x.size % stride)).reshape(-1, stride)
        return lax.dynamic_index_in_dim(padded, shared.count % stride, axis=1, keepdims=False), ()

    def scatter(values, where, shared, numel):
        # A select, which XLA fuses into its reader. The barrier keeps the producer of the values
        # out of that fusion, which would run it `stride` times.
        values, first = lax.optimization_barrier(values), (shared.count % stride).astype(jnp.uint32)

        def spread(piece):
            index = lax.iota(jnp.uint32, piece.stop - piece.start)
            kept = values[piece.start // stride :].at[index // stride]
            return jnp.where(index % stride == first, kept.get(mode="promise_in_bounds"), 0)

        return _joined([spread(piece) for piece in indexed(numel, stride)])

    return select, scatter


def drawn(stride):
    """One of each `stride` entries, far from each other, by the shared key."""

    def draw(shared, count):
        return jnp.floor(uniform(shared, (count,)) * stride).astype(jnp.int32)

    def select(x, shared):
        rows = in_rows(x, stride)
        place = draw(shared, rows.shape[1])
        return jnp.take_along_axis(rows, place[None, :], axis=0)[0], ()

    def scatter(values, where, shared, numel):
        # Not a select: XLA would fuse the producer of the values (later stages) into it, and run it
        # for each entry.
        place = draw(shared, values.size)

        def spread(piece):
            mine = values[piece]
            x = jnp.zeros((stride, mine.size), values.dtype)
            return x.at[place[piece], jnp.arange(mine.size)].set(
                mine, unique_indices=True, mode="promise_in_bounds"
            )

        return _joined([spread(piece) for piece in indexed(values.size)]).reshape(-1)[:numel]

    return select, scatter


def _joined(pieces):
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-1)


def in_rows(x, length):
    """Rows that are contiguous slices of `f32[numel]`, which XLA vectorizes best."""
    return jnp.pad(x, (0, -x.size % length)).reshape(length, -1)
