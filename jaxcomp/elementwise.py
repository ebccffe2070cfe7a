"""Optimizers of parameters in pieces: natural ranks for them, and no update that mixes entries.

An optimizer whose parameters are cut over devices sees flat pieces. It must do with them what it
would do with whole parameters: here its two programs are traced and compared.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxcomp.buckets import path_of
from jaxcomp.sharding import to_varying, varying_axes

# What has as many results as entries, and still mixes them.
_MIXING = frozenset(
    "sort rev fft cumsum cumprod cummax cummin cumlogsumexp dot_general conv_general_dilated "
    "cholesky eigh lu qr svd triangular_solve gather scatter".split()
)
_OF_SHAPE = frozenset("broadcast_in_dim reshape squeeze pcast pvary".split())


def ranked(piece: jax.Array, ndim: int) -> jax.Array:
    """A piece `[*stack, n]` with as many axes as the parameter, that masks such as `ndim > 1` see.

    The piece of a scalar of a stack keeps one.
    """
    kept = piece.shape[-ndim:] if ndim > 1 else (piece.size,)
    if not ndim and piece.size == 1:
        return piece.reshape(())
    return piece.reshape(*[1] * (ndim - len(kept)), *kept[:-1], -1)


def require_elementwise(
    tx: Any, grads: Any, state: Any, params: Any, shapes: Any, **extra_args: Any
) -> None:
    """Raises a ValueError for an optimizer that does not treat pieces as it would the parameters.

    Args:
      tx: The optimizer.
      grads: Gradients in pieces.
      state: Of the optimizer of pieces.
      params: Pieces, of natural rank.
      shapes: Tuples, one a leaf of `params`: of the whole parameters.
      **extra_args: Of its update.
    """
    leaves, treedef = jax.tree.flatten(params)
    whole = treedef.unflatten(
        [_zeros(shape, x) for shape, x in zip(treedef.flatten_up_to(shapes), leaves, strict=True)]
    )
    whole_state = jax.eval_shape(tx.init, whole)
    kinds = jax.tree.structure(whole_state), jax.tree.structure(state)
    if kinds[0] == kinds[1]:
        whole_state = jax.tree.map(lambda x, like: _zeros(x.shape, like), whole_state, state)
        update = lambda grads, state, params: tx.update(grads, state, params, **extra_args)
        whole_grads = jax.tree.map(lambda x, g: _zeros(x.shape, g), whole, grads)
        programs = [
            jax.make_jaxpr(update, return_shape=True)(*of)
            for of in ((whole_grads, whole_state, whole), (grads, state, params))
        ]
        names = [list(_names(program.jaxpr)) for program, _ in programs]
    if kinds[0] != kinds[1] or names[0] != names[1]:
        raise ValueError(
            "the optimizer looks at shapes (a mask, a label of optax.partition, or a factored "
            "moment), and parameters are in flat pieces here, of which only the number of axes is "
            "that of the parameters; write masks and labels as trees, or by paths, and optimizers "
            "that work entry by entry, as optax.adamw."
        )
    program, like = programs[1]
    mixed = _mixed(program.jaxpr, [False] * len(program.jaxpr.invars))
    for (path, _), is_mixed in zip(jax.tree_util.tree_leaves_with_path(like), mixed, strict=True):
        if is_mixed:
            raise ValueError(
                f"the optimizer's {path_of(path)!r} depends on several entries of a piece, and "
                "each device has other pieces (a norm, a trust ratio, a test for what is finite); "
                "write jaxcomp.clip_by_global_norm for optax.clip_by_global_norm, or an optimizer "
                "that works entry by entry, as optax.adamw."
            )


def _zeros(shape, like):
    """Zeros of a shape, of the dtype and varying axes of an array; a random key as it is."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
        return like
    return to_varying(jnp.zeros(shape, like.dtype), tuple(sorted(varying_axes(like))))


def _names(jaxpr) -> Iterator[str]:
    """The operations of a program in turn, but those that only change shapes."""
    for eqn in jaxpr.eqns:
        inner = [j for x in eqn.params.values() for j in _jaxprs(x)]
        if not inner and eqn.primitive.name not in _OF_SHAPE:
            yield eqn.primitive.name
        for jaxpr in inner:
            yield from _names(jaxpr)


def _jaxprs(x):
    parts = x if isinstance(x, tuple | list) else (x,)
    return [getattr(j, "jaxpr", j) for j in parts if isinstance(j, core.Jaxpr | core.ClosedJaxpr)]


def _mixed(jaxpr, inputs: list[bool]) -> list[bool]:
    """Which results of a program depend on several entries of what differs between devices.

    A value that does is forgiven where JAX's type says that it is equal everywhere: what was summed
    over the shards of all devices.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    is_mixed = lambda x: not isinstance(x, core.Literal) and known.get(x, False)
    for eqn in jaxpr.eqns:
        inputs = [is_mixed(x) for x in eqn.invars]
        outputs = _mixed_by(eqn, inputs)
        for var, mixed in zip(eqn.outvars, outputs, strict=True):
            known[var] = mixed and bool(varying_axes(var.aval))
    return [is_mixed(x) for x in jaxpr.outvars]


def _mixed_by(eqn, inputs: list[bool]) -> list[bool]:
    inner = [j for x in eqn.params.values() for j in _jaxprs(x)]
    if eqn.primitive.name == "cond":
        branches = [_mixed(branch, inputs[1:]) for branch in inner]
        return [inputs[0] or any(of) for of in zip(*branches, strict=True)]
    if len(inner) == 1 and eqn.primitive.name not in ("scan", "while"):
        return _mixed(inner[0], inputs)
    mixes = any(inputs) or any(_mixes(e) for e in _flat(eqn, inner))
    return [mixes] * len(eqn.outvars)


def _flat(eqn, inner):
    if not inner:
        return [eqn]
    parts = [e for jaxpr in inner for e in jaxpr.eqns]
    return [f for e in parts for f in _flat(e, [j for x in e.params.values() for j in _jaxprs(x)])]


def _mixes(eqn) -> bool:
    size = lambda x: math.prod(getattr(x.aval, "shape", ()))
    largest = max(map(size, eqn.invars), default=0)
    return largest > 1 and (
        eqn.primitive.name in _MIXING or any(size(x) < largest for x in eqn.outvars)
    )
