"""nnx modules as functions of plain parameters; stacks; random keys by path."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class PathRngs:
    """Keys for parameters by path, as in linen: the `rngs` of nnx layers.

    A layer's initial values depend on its name, not on layers created before it. For a stack of
    layers there are several paths, and an index, which may be traced, chooses one.
    """

    def __init__(self, seed: int, paths: Sequence[str] = ("",), index: Any = 0):
        self.seed, self.paths, self.index, self.count = seed, paths, index, 0

    def at(self, name: str) -> "PathRngs":
        """The keys of the submodule with that name."""
        return PathRngs(self.seed, [path + name for path in self.paths], self.index)

    def params(self) -> jax.Array:
        """The key of the module's next parameter."""
        self.count += 1
        numbers = jnp.asarray([_number(path, self.count) for path in self.paths], jnp.uint32)
        return jax.random.fold_in(jax.random.key(self.seed), numbers[self.index])


def _number(path: str, count: int) -> int:
    return int.from_bytes(hashlib.sha1(path.encode() + bytes([count])).digest()[:4], "big")


def split(module: nnx.Module) -> tuple[Callable, Any]:
    """A module as a function `(params, *args)`, and its parameters as nested dicts of arrays."""
    graph, state = nnx.split(module)
    apply = lambda params, *args, **kwargs: nnx.merge(graph, params)(*args, **kwargs)
    return apply, nnx.to_pure_dict(state)


def stacked(make: Callable[..., nnx.Module], names: Sequence[str], rngs: PathRngs) -> nnx.Module:
    """Modules with these names as one module, whose parameters are stacked along a first axis."""
    paths = [path + name for path in rngs.paths for name in names]
    one = lambda index: make(rngs=PathRngs(rngs.seed, paths, index))
    return nnx.vmap(one)(jnp.arange(len(paths)))


def windows(x: Any, window: int) -> Any:
    """Cuts `[batch, side, side, width]` into `[batch * windows, window**2, width]`."""
    batch, side, _, width = x.shape
    x = x.reshape(batch, side // window, window, side // window, window, width)
    return x.swapaxes(2, 3).reshape(-1, window**2, width)


def in_turn(function: Callable) -> Callable:
    """Like `jaxcomp.QSDP.layers`, for whole parameters: `(trees, x) -> x`."""

    def run(trees, x):
        if not isinstance(trees, list):
            return jax.lax.scan(lambda x, params: (function(params, x), None), x, trees)[0]
        for params in trees:
            x = function(params, x)
        return x

    return run


def run(blocks: nnx.Module | list, x: Any, *args: Any, layers: Callable = in_turn) -> Any:
    """Calls equal modules in order, stacked or in a list, through `layers`."""
    if isinstance(blocks, list):
        applies, trees = zip(*map(split, blocks), strict=True)
        apply, trees = applies[0], list(trees)
    else:
        apply, trees = split(blocks)
    return layers(lambda params, x: apply(params, x, *args))(trees, x)
