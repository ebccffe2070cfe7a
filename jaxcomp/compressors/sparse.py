"""Sparsifiers: a share of the entries, chosen by the step, by chance or by magnitude."""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxcomp._checks import is_power_of_two, require, require_choice, require_integer
from jaxcomp._printing import call
from jaxcomp.compressors import positions
from jaxcomp.compressors.base import Compressor, Entries, Payload, Selection, identity
from jaxcomp.compressors.blocks import in_blocks, in_lanes, indexed, per_block
from jaxcomp.compressors.largest import find_largest, put_at, put_back
from jaxcomp.compressors.packing import fold, pack, uniform, unpack
from jaxcomp.compressors.platforms import LANES, by_platform, platform

_TILE = (8, LANES)  # of a TPU
_RUN = 8 * LANES  # neighbours that are sent together: a whole tile
_LARGE = 2**30  # entries of a bucket whose positions are counted where its size is not known


def random_k(density: float, pattern: str = "runs") -> Compressor:
    """Sends one of every `1 / density` entries, the same on all replicas, so it sends no positions.

    Costs `32 * density` bits per parameter as float32; `compose` encodes the values further.
    Linear. A contraction with alpha = density in expectation, over `1 / density` consecutive steps
    ("runs" and "strided", which visit each entry once in them) or over the shared key ("random").

    Args:
      density: Share of the entries to send, in [2**-20, 1]; `1 / density` is an integer.
      pattern: "runs", one of every `1 / density` runs of 1,024 neighbours, the next one each step.
        Runs are shorter at the bucket's end and in small buckets. It copies whole rows, which is
        fast on any machine. "strided", every `1 / density`-th entry, rolled by one each step.
        "random", one entry drawn from each of `ceil(numel * density)` groups by the shared key.

    Raises:
      ValueError: At construction, for arguments outside these ranges.

    References:
      J. Wang et al., "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks", ICML 2023,
      algorithm 2, step 1. The paper draws each entry independently; "strided" is what the authors'
      code does. Their code rounds down to a multiple of 128 entries; this does not.
    """
    stride = _stride(density)
    require_choice("random_k", "pattern", pattern, "runs", "strided", "random")
    halves = {"runs": _runs, "strided": _strided, "random": _drawn}
    select, scatter = halves[pattern](stride)
    selection = Selection(
        kept=lambda numel: -(-numel // stride),
        select=select,
        scatter=scatter,
        density=1 / stride,
        position_bits=0.0,
    )
    name = call(random_k, density=density, pattern=pattern)
    return sparsifier(name, selection, contraction=1 / stride, linear=True)


def top_k(density: float, block: int | None = None) -> Compressor:
    """Sends the entries of largest magnitude, of the bucket or of each block of it.

    Each position is sent in about `log2(1 / density) + 2` bits, for example 8 for 64 of 4,096
    entries, or as a bit mask, where that takes less than twice as many bits: for densities above
    about a tenth. So with float32 values a parameter takes `density * (32 + log2(1 / density) + 2)`
    or `32 * density + 1` bits. Values are sent in the order of their positions. Ties go to the
    first entries.

    A contraction with alpha = density, the largest of all codes that keep as many entries.
    `group_top_1` is several times faster on CPUs, where this passes over a block until it has found
    the least entry to send. GPUs from Ampere on find it in one kernel, in blocks of up to 16,384;
    TPUs sort blocks of up to 4,096.

    Args:
      density: Share of the entries to send, in (0, 1]; it sends `ceil(density * n)`.
      block: Neighbours among which to choose; None to choose from the whole bucket. A last,
        incomplete block sends as many as the others.

    Raises:
      ValueError: At construction, for arguments outside these ranges.

    References:
      D. Alistarh et al., "The Convergence of Sparsified Gradient Methods", NeurIPS 2018.
      P. Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", Journal of
      the ACM, 1974, for the code of the positions.
      J. Wang et al., "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks", ICML 2023,
      algorithm 2, step 2. Its code rounds down to a multiple of 128 entries; this does not.
    """
    _check_density("top_k", density)
    require_integer("top_k", "block", block, "block=4096", none="the whole bucket")

    def layout(numel):
        size = min(block or numel, numel)
        return size, -(-numel // size), _ceil(density * size)

    select, scatter, places = _largest_of_blocks(layout)
    size = block or _LARGE
    kept = _ceil(density * size)
    selection = Selection(
        kept=lambda numel: math.prod(layout(numel)[1:]),
        select=select,
        scatter=scatter,
        density=kept / size if block else density,
        position_bits=positions.bits(size, kept) / size,
        places=places,
    )
    name = call(top_k, density=density, block=block)
    return sparsifier(name, selection, contraction=density, linear=False)


def group_top_1(group: int) -> Compressor:
    """Sends the entry of largest magnitude of each group of `group`, in one pass.

    Costs `(32 + log2(group)) / group` bits per parameter as float32. A contraction with alpha = 1 /
    group; on data without structure it keeps nearly as much as `top_k` at equal bits. Entries of a
    group lie `numel / group` apart. Ties go to the first entry.

    Args:
      group: Entries per group, a power of two from 2 to 256.

    Raises:
      ValueError: At construction, for another group.
    """
    holds = is_power_of_two(group) and 2 <= group <= 256
    require(holds, "group_top_1", "a power of two from 2 to 256", "group=8", group=group)
    bits = group.bit_length() - 1

    def select(x, shared):
        values, place = _largest_in_columns(in_lanes(_in_rows(x, group)))
        return values.reshape(-1), pack(place, bits)

    def scatter(values, where, shared, numel):
        # A select, which XLA fuses into its reader. The dense result of a scatter, and its zeros,
        # would stay in memory until the end of the step.
        place, values = in_lanes(unpack(where, bits, values.size)[None]), in_lanes(values[None])
        mine = place == per_block(lax.iota(place.dtype, group), place)
        return jnp.where(mine, values, 0.0).reshape(-1)[:numel]

    selection = Selection(
        kept=lambda numel: -(-numel // group),
        select=select,
        scatter=scatter,
        density=1 / group,
        position_bits=bits / group,
    )
    name = call(group_top_1, group=group)
    return sparsifier(name, selection, contraction=1 / group, linear=False)


def sparsifier(name: str, selection: Selection, contraction: float, linear: bool) -> Compressor:
    """Makes the compressor that sends what a selection keeps, in float32; `compose` can chain it.

    Args:
      name: The call that makes it.
      selection: What is kept, and how the receiver learns where.
      contraction: Least share of the squared norm that is kept, in expectation.
      linear: Whether the positions are the same on all replicas.
    """
    exact = identity()
    encode, decode, entries = chained(selection, exact.encode, exact.decode)
    return Compressor(
        name=name,
        encode=encode,
        decode=decode,
        bits_per_parameter=selection.position_bits + selection.density * exact.bits_per_parameter,
        contraction=contraction,
        unbiased=contraction == 1.0,
        linear=linear,
        selection=selection,
        entries=entries,
    )


def chained(
    selection: Selection, encode_kept: Callable[..., Any], decode_kept: Callable[..., Any]
) -> tuple[Callable[..., Payload], Callable[..., Any], Callable[..., Entries | None]]:
    """The `encode`, `decode` and `entries` of a selection whose values another code has.

    It folds the shared key, so that two stages never draw the same numbers.
    """

    def encode(x, shared, private):
        values, where = selection.select(x, shared)
        return Payload((where, encode_kept(values, fold(shared, 1), private).data), x.size)

    def values_of(payload, shared):
        kept = Payload(payload.data[1], selection.kept(payload.numel))
        return decode_kept(kept, fold(shared, 1))

    def decode(payload, shared):
        where, values = payload.data[0], values_of(payload, shared)
        return selection.scatter(values, where, shared, payload.numel)

    def entries(payload, shared):
        if selection.places is None:
            return None
        places = selection.places(payload.data[0], payload.numel)
        return None if places is None else Entries(values_of(payload, shared), places)

    return encode, decode, entries


def _largest_of_blocks(layout):
    def select(x, shared):
        size, _, k = layout(x.size)
        found = find_largest(in_blocks(x, size), k)
        return found.values.reshape(-1), positions.write(found)

    def scatter(values, where, shared, numel):
        size, num_blocks, k = layout(numel)
        # The barrier keeps each reader of a value from decoding it again.
        values = lax.optimization_barrier(values).reshape(num_blocks, k)
        if positions.is_marks(size, k):
            blocks = put_back(values, positions.marks(where, num_blocks, size))
        else:
            blocks = put_at(values, positions.read(where, num_blocks, size, k), size)
        return blocks.reshape(-1)[:numel]

    def places(where, numel):
        size, num_blocks, k = layout(numel)
        if positions.is_marks(size, k):
            return None
        first = size * lax.iota(jnp.int32, num_blocks)[:, None]
        return (first + positions.read(where, num_blocks, size, k)).reshape(-1)

    return select, scatter, places


def _largest_in_columns(rows):
    # A knock-out of neighbours, twice to ten times as fast on a CPU as argmax.
    values, place = rows, jnp.zeros_like(rows, jnp.uint8)
    for bit in range((rows.shape[0] - 1).bit_length()):
        first, second = values[0::2], values[1::2]
        larger = jnp.abs(second) > jnp.abs(first)
        values = jnp.where(larger, second, first)
        place = jnp.where(larger, place[1::2] | jnp.uint8(2**bit), place[0::2])
    return values[0], place[0]


def _ceil(x):
    return math.ceil(x - 1e-9 * x)


def _check_density(name, density):
    holds = isinstance(density, numbers.Real) and 0 < float(density) <= 1
    needs, write = "a share of the entries in (0, 1]", f"{name}(0.1) to send a tenth"
    require(holds, name, needs, write, density=density)


def _stride(density):
    _check_density("random_k", density)
    stride = round(1 / density)
    below = math.floor(1 / density)
    holds, write = abs(1 / density - stride) <= 1e-6, f"1/{below + 1} or 1/{below}"
    require(holds, "random_k", "1 / density to be an integer", write, density=density)
    # Positions have 32 bits, and a run for each of `stride` has to fit.
    write = "random_k(1 / 4096) to send little"
    require(stride <= 2**20, "random_k", "at least 2**-20", write, density=density)
    return stride


# The patterns of `random_k`: each gives the two halves of a `Selection`.


def _runs(stride):
    """One of each `stride` runs of neighbours, the next one in each step."""

    def select(x, shared):
        mine = shared.count % stride
        tiles, rest = _tiled(x, stride)
        parts = [lax.dynamic_index_in_dim(tiles, mine, axis=1, keepdims=False).reshape(-1)]
        if rest.size:
            parts.append(lax.dynamic_index_in_dim(_in_rows(rest, stride), mine, keepdims=False))
        # The barrier keeps each reader of the values from picking them again.
        return lax.optimization_barrier(jnp.concatenate(parts)), ()

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

    return jnp.concatenate([put(piece) for piece in indexed(numel, stride * _RUN)])


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


def _strided(stride):
    """Every `stride`-th entry, rolled by one each step."""

    def select(x, shared):
        padded = jnp.pad(x, (0, -x.size % stride)).reshape(-1, stride)
        return lax.dynamic_index_in_dim(padded, shared.count % stride, axis=1, keepdims=False), ()

    def scatter(values, where, shared, numel):
        # A select, which XLA fuses into its reader. The barrier keeps the producer of the values
        # out of that fusion, which would run it `stride` times.
        values = lax.optimization_barrier(values)
        first = jnp.asarray(shared.count % stride, jnp.uint32)

        def put(piece):
            index = lax.iota(jnp.uint32, piece.stop - piece.start)
            kept = values[piece.start // stride :].at[index // stride]
            return jnp.where(index % stride == first, kept.get(mode="promise_in_bounds"), 0)

        return jnp.concatenate([put(piece) for piece in indexed(numel, stride)])

    return select, scatter


def _drawn(stride):
    """One of each `stride` entries, far from each other, by the shared key."""

    def draw(shared, count):
        return jnp.floor(uniform(shared, (count,)) * stride).astype(jnp.int32)

    def select(x, shared):
        rows = _in_rows(x, stride)
        place = draw(shared, rows.shape[1])
        return jnp.take_along_axis(rows, place[None, :], axis=0)[0], ()

    def scatter(values, where, shared, numel):
        # Not a select: XLA would fuse the producer of the values (later stages) into it, and run it
        # for each entry.
        place = draw(shared, values.size)

        def put(piece):
            mine = values[piece]
            x = jnp.zeros((stride, mine.size), values.dtype)
            return x.at[place[piece], jnp.arange(mine.size)].set(
                mine, unique_indices=True, mode="promise_in_bounds"
            )

        put_all = [put(piece) for piece in indexed(values.size)]
        return jnp.concatenate(put_all, axis=1).reshape(-1)[:numel]

    return select, scatter


def _in_rows(x, length):
    """Rows that are contiguous slices of `f32[numel]`, which XLA vectorizes best."""
    return jnp.pad(x, (0, -x.size % length)).reshape(length, -1)
