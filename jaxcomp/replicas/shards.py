"""Parameters in equal flat shards, one per replica, and back in their natural shapes."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomp._printing import array
from jaxcomp.compressors.base import Compressor, Key, identity
from jaxcomp.compressors.packing import fold


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """One parameter in flat shards; a pytree node, whose array optimizers see.

    The concatenated shards, cut to the parameter's size, are the flattened parameter; the rest is
    zeros. A stacked parameter, one slice for each of L layers in a scan, has shards of every layer.
    """

    data: Any  # [num_shards, *stack, numel]; a replica's own: [*stack, numel]; stack: () or (L,)
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # of one layer's
    weights: Compressor = dataclasses.field(metadata={"static": True})  # code of the parameter
    gradients: Compressor = dataclasses.field(metadata={"static": True})  # code of its gradient
    # Code of its gradient across a fast axis, if there is one.
    fast_gradients: Compressor = dataclasses.field(default=identity(), metadata={"static": True})
    # For the whole parameter, even where a scan has taken one layer of it:
    stack: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    # Only during a gather, each with leading axes [*stack]:
    key: Key | None = None  # of the step and the parameter
    levels: Any = None  # `levels.Tables` of the two codes
    counter: Any = None  # f32[bins]; its gradient is the tally of what is encoded, unless zero

    def __repr__(self) -> str:
        stack = f", stack={self.stack}" if self.stack else ""
        codes = f"weights={self.weights}, gradients={self.gradients}"
        return f"Shard({array(self.data)}, shape={self.shape}, {codes}{stack})"


def is_shard(x: Any) -> bool:
    """Whether a node of a tree is a `Shard`."""
    return isinstance(x, Shard)


def map_shards(function, tree: Any, *rest: Any) -> Any:
    """Maps over the `Shard`s of trees of one structure; other nodes stay as in the first tree."""
    keep = lambda x, *others: function(x, *others) if is_shard(x) else x
    return jax.tree.map(keep, tree, *rest, is_leaf=is_shard)


def key_of(step: Key, index: int, stack: tuple[int, ...]) -> Key:
    """The key of a parameter, or one for each layer of a stacked one."""
    key = fold(step, index)
    if not stack:
        return key
    count = jnp.broadcast_to(key.count, stack)
    return Key(count, jax.vmap(lambda layer: fold(key, layer).seed)(jnp.arange(stack[0])))


def numel_of(shape: tuple[int, ...], num_shards: int) -> int:
    """Elements of one shard, at least 1: empty arrays have no sharding."""
    return max(1, -(-math.prod(shape) // num_shards))


def cut(x: Any, num_stacked: int, num_shards: int, numpy: Any = jnp) -> Any:
    """Cuts an array `[*stack, *shape]` into shards: `[num_shards, *stack, numel]`."""
    stack, shape = x.shape[:num_stacked], x.shape[num_stacked:]
    flat = x.reshape(*stack, math.prod(shape))
    padding = num_shards * numel_of(shape, num_shards) - math.prod(shape)
    flat = numpy.pad(flat, [(0, 0)] * num_stacked + [(0, padding)])
    return numpy.moveaxis(flat.reshape(*stack, num_shards, -1), num_stacked, 0)


def natural(data: Any, shape: tuple[int, ...], numpy: Any = jnp) -> Any:
    """Undoes `cut`: `[num_shards, *stack, numel] -> [*stack, *shape]`."""
    stack = data.shape[1:-1]
    flat = numpy.moveaxis(data, 0, len(stack)).reshape(*stack, data.shape[0] * data.shape[-1])
    # As a tuple: for a scalar NumPy does not take separate arguments.
    return flat[..., : math.prod(shape)].reshape((*stack, *shape))


def recut(data: np.ndarray, shape: tuple[int, ...], num_shards: int) -> np.ndarray:
    """Redistributes a parameter's shards: `[N, *stack, n] -> [num_shards, *stack, m]`."""
    return cut(natural(data, shape, np), data.ndim - 2, num_shards, np)


def without_padding(piece: jax.Array, numel: int, axes: str | tuple[str, ...]) -> jax.Array:
    """This replica's shard `[n]` of a parameter of `numel` elements, with zeros in its padding.

    Otherwise an optimizer would turn rounding noise in the padding into steps.
    """
    if piece.size * lax.axis_size(axes) == numel:
        return piece
    entries = entries_of(lax.axis_index(axes), piece.size, numel)
    return jnp.where(lax.iota(jnp.uint32, piece.size) < entries, piece, 0.0)


def entries_of(owner: jax.Array, size: int, numel: int) -> jax.Array:
    """u32[]: how many of the `size` entries of a shard lie before the parameter's end.

    Positions in the parameter itself may not fit in 32 bits, JAX's default.
    """
    full, rest = divmod(numel, size)
    last = jnp.where(owner == full, np.uint32(rest), np.uint32(0))
    return jnp.where(owner < full, np.uint32(size), last)
