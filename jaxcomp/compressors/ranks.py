"""Marked entries of each row moved to its first places, and back.

Each machine has the form that suits it; all return the same bits. On a CPU a running sum numbers
the marked entries, and a loop moves them one by one. Elsewhere such a loop is slow, on a TPU most
of all, which moves a whole tile for each entry: there, places of short rows are compared with each
other, all in one kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax

SHORT = 256  # most entries of a row whose places are all compared with each other
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def ranks(marked: jax.Array) -> jax.Array:
    """Counts the marked entries before each one in its row: `bool[rows, n] -> i32[rows, n]`."""
    return lax.platform_dependent(marked, cpu=ranks_in_turn, default=ranks_by_tiles)


def taken(x: jax.Array, marked: jax.Array, k: int) -> jax.Array:
    """Takes the k marked entries of each row, in their order: `[rows, n] -> [rows, k]`."""
    in_turn = lambda x, marked: taken_in_turn(x, marked, k)
    compared = lambda x, marked: taken_by_comparing(x, marked, k)
    other = compared if x.shape[1] <= SHORT else in_turn
    return lax.platform_dependent(x, marked, cpu=in_turn, default=other)


def put_back(values: jax.Array, marked: jax.Array) -> jax.Array:
    """Undoes `taken`, with zeros at the other entries: `[rows, k] -> [rows, n]`."""
    other = put_back_by_comparing if marked.shape[1] <= SHORT else put_back_in_turn
    return lax.platform_dependent(values, marked, cpu=put_back_in_turn, default=other)


def put_at(values: jax.Array, places: jax.Array, n: int) -> jax.Array:
    """Puts values at places of their row, all different: `[rows, k], i32[rows, k] -> [rows, n]`."""
    in_turn = lambda values, places: put_at_in_turn(values, places, n)
    compared = lambda values, places: put_at_by_comparing(values, places, n)
    other = compared if n <= SHORT else in_turn
    return lax.platform_dependent(values, places, cpu=in_turn, default=other)


def ranks_in_turn(marked: jax.Array) -> jax.Array:
    """`ranks` by a running sum over the whole, four entries at a time."""
    rows, n = marked.shape
    fours = jnp.pad(marked, ((0, 0), (0, -n % 4))).astype(jnp.uint8).reshape(rows, -1, 4)
    # Entries are bytes of 0 or 1: as many bits of four of them together are ones.
    word = lax.bitcast_convert_type(fours, jnp.uint32)
    ones = lax.population_count(word).astype(jnp.int32)
    sums = (jnp.cumsum(ones.reshape(-1)) - ones.reshape(-1)).reshape(ones.shape)
    earlier = (jnp.uint32(1) << (8 * lax.iota(jnp.uint32, 4))) - jnp.uint32(1)
    within = lax.population_count(word[:, :, None] & earlier).astype(jnp.int32)
    return ((sums - sums[:, :1])[:, :, None] + within).reshape(rows, -1)[:, :n]


def ranks_by_tiles(marked: jax.Array) -> jax.Array:
    """`ranks` by comparing all places of a tile, and of the sums of tiles."""
    return _before(marked.astype(jnp.int32))


def _before(counts):
    """Sums what comes before each entry of a row: `i32[rows, n] -> i32[rows, n]`."""
    rows, n = counts.shape
    size = n if n <= SHORT else SHORT // 2
    tiles = jnp.pad(counts, ((0, 0), (0, -n % size))).reshape(-1, size)
    place, other = (lax.broadcasted_iota(jnp.int32, (1, size, size), axis) for axis in (1, 2))
    within = jnp.sum(jnp.where(other < place, tiles[:, None, :], 0), axis=2).reshape(rows, -1, size)
    if n > size:
        within += _before(jnp.sum(tiles, axis=1).reshape(rows, -1))[:, :, None]
    return within.reshape(rows, -1)[:, :n]


def taken_in_turn(x: jax.Array, marked: jax.Array, k: int) -> jax.Array:
    """`taken`, one entry after the other."""
    rows, n = x.shape
    first = k * lax.iota(jnp.int32, rows)[:, None]
    place = jnp.where(marked, first + ranks(marked), rows * k).reshape(-1)
    return jnp.zeros(rows * k, x.dtype).at[place].set(x.reshape(-1), mode="drop").reshape(rows, k)


def put_back_in_turn(values: jax.Array, marked: jax.Array) -> jax.Array:
    """`put_back`, each entry from where its value is."""
    rows, k = values.shape
    place = k * lax.iota(jnp.int32, rows)[:, None] + ranks(marked)
    return jnp.where(marked, values.reshape(-1).at[place].get(mode="clip"), 0)


def put_at_in_turn(values: jax.Array, places: jax.Array, n: int) -> jax.Array:
    """`put_at`, one value after the other."""
    row = jnp.arange(values.shape[0])[:, None]
    x = jnp.zeros((values.shape[0], n), values.dtype)
    return x.at[row, places].set(values, unique_indices=True, mode="promise_in_bounds")


def taken_by_comparing(x: jax.Array, marked: jax.Array, k: int) -> jax.Array:
    """`taken` of short rows: each of the k places looks at all entries."""
    place = jnp.where(marked, ranks(marked), k)[:, None, :]
    return _picked(x[:, None, :], place == lax.broadcasted_iota(jnp.int32, (1, k, 1), 1))


def put_back_by_comparing(values: jax.Array, marked: jax.Array) -> jax.Array:
    """`put_back` of short rows: each entry looks at all k values."""
    place, k = jnp.where(marked, ranks(marked), values.shape[1])[:, :, None], values.shape[1]
    return _picked(values[:, None, :], place == lax.broadcasted_iota(jnp.int32, (1, 1, k), 2))


def put_at_by_comparing(values: jax.Array, places: jax.Array, n: int) -> jax.Array:
    """`put_at` in short rows: each entry looks at all places."""
    mine = places[:, None, :] == lax.broadcasted_iota(places.dtype, (1, n, 1), 1)
    return _picked(values[:, None, :], mine)


def _picked(x, mine):
    """The entry of the last axis that is `mine`, at most one; zero if none. Keeps its bits."""
    bits = lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize])
    total = jnp.sum(jnp.where(mine, bits, 0), axis=-1, dtype=bits.dtype)
    return lax.bitcast_convert_type(total, x.dtype)
