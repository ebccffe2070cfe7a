"""Optimizers whose parameters are cut over devices: what they must not look at.

An optimizer that sees pieces must do with them what it would do with whole parameters. What it
does is read from its program: two are traced and compared, or one is followed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.types import to_varying, varying_axes

# What has as many results as entries, and still mixes them.
_MIXING = frozenset(
    "sort rev fft cumsum cumprod cummax cummin cumlogsumexp dot_general conv_general_dilated "
    "cholesky eigh lu qr svd triangular_solve gather scatter".split()
)
_OF_SHAPE = frozenset("broadcast_in_dim reshape squeeze pcast pvary".split())


def ranked(piece: jax.Array, ndim: int) -> jax.Array:
    """A piece `[*stack, n]` with as many axes as the parameter, that masks such as `ndim > 1` see.

    That of a number has one axis.
    """
    kept = piece.shape[-ndim:] if ndim > 1 else (piece.size,)
    return piece.reshape(*[1] * (ndim - len(kept)), *kept[:-1], -1)


def require_elementwise(
    tx: Any, grads: Any, state: Any, params: Any, shapes: Any, **extra_args: Any
) -> None:
    """Raises a ValueError for an optimizer that does not treat pieces as it would the parameters.

    Its update gets gradients, a state, parameters, all of pieces, and `extra_args`. `shapes` has
    those of the whole parameters, a tuple a leaf.
    """
    traced = jax.make_jaxpr(
        lambda grads, state, params: tx.update(grads, state, params, **extra_args),
        return_shape=True,
    )
    whole = _whole(tx, grads, state, params, shapes)
    program = whole and traced(grads, state, params)
    if whole is None or _names(traced(*whole)[0].jaxpr) != _names(program[0].jaxpr):
        raise ValueError(
            "the optimizer looks at shapes (a mask, a label of optax.partition, or a factored "
            "moment), and parameters are in flat pieces here, of which only the number of axes is "
            "that of the parameters; write masks and labels as trees, or by paths, and optimizers "
            "that work entry by entry, as optax.adamw."
        )
    mixed = _Tracker(_mixes, bool).results(*program)
    if mixed:
        raise ValueError(
            f"the optimizer's {mixed[0]!r} depends on several entries of a piece, and each device "
            "has other pieces (a norm, a trust ratio, a test for what is finite); write "
            "jaxcomp.clip_by_global_norm for optax.clip_by_global_norm, no optax.apply_if_finite "
            "(steps leave out by themselves what is not finite), and an optimizer that works entry "
            "by entry, as optax.adamw."
        )


def _whole(tx, grads, state, params, shapes):
    """What an optimizer would get of whole parameters, zeros; None if its state had other parts."""
    leaves, treedef = jax.tree.flatten(params)
    # JAX leaves out operations on nothing, of which the piece is one zero.
    shapes = [
        shape if math.prod(shape) else x.shape
        for shape, x in zip(treedef.flatten_up_to(shapes), leaves, strict=True)
    ]
    whole = treedef.unflatten(map(_zeros, shapes, leaves))
    whole_state = jax.eval_shape(tx.init, whole)
    if jax.tree.structure(whole_state) != jax.tree.structure(state):
        return None
    like = lambda x, piece: _zeros(x.shape, piece)
    return jax.tree.map(like, whole, grads), jax.tree.map(like, whole_state, state), whole


def require_whole_norms(
    update: Callable[..., Any], *args: Any, axis_name: str, of_mean: bool = True
) -> None:
    """Raises a ValueError for an update that scales each shard of a parameter by a norm of its own.

    Args:
      update: `(grads, state, params) -> (updates, state)`, traced once more, if any of the
        parameters, local shards, is sharded.
      *args: Its arguments.
      axis_name: The axis of the replicas, which is no shards'.
      of_mean: Whether only norms of what is equal on all replicas count, as behind a mean: codes
        look at whole shards in front of it.
    """
    if not any(varying_axes(x) - {axis_name} for x in jax.tree.leaves(args[2])):
        return

    differs = lambda axes: bool(axes - {axis_name}) and not (of_mean and axis_name in axes)
    program = jax.make_jaxpr(update, return_shape=True)(*args)
    scaled = _Tracker(_is_norm, differs).results(*program)
    if scaled:
        raise ValueError(
            f"the update's {scaled[0]!r} depends on a norm of local shards, as that of "
            "optax.clip_by_global_norm or of optax.lamb: each shard has another. Write "
            "jaxcomp.clip_by_global_norm, jaxcomp.slamb or jaxcomp.one_bit_lamb, which take the "
            "norms of all shards."
        )


def _zeros(shape, like):
    """Zeros of a shape, of the dtype and varying axes of an array; a random key as it is."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
        return like
    return to_varying(jnp.zeros(shape, like.dtype), tuple(sorted(varying_axes(like))))


class _Tracker(NamedTuple):
    """Follows through a program what is made of several entries of one device's arrays.

    A value is forgotten where JAX's type says that it is equal wherever it has to be: what was
    summed over the shards of all devices.
    """

    mixes: Callable[[Any], bool]  # whether an operation makes such a value
    differs: Callable[[frozenset[str]], bool]  # of the mesh axes that a value varies over

    def results(self, program, like) -> list[str]:
        """The paths of a program's results, of which `like` is the tree, that are such values."""
        paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
        found = self.followed(program.jaxpr, [False] * len(program.jaxpr.invars))
        return [path for path, is_found in zip(paths, found, strict=True) if is_found]

    def followed(self, jaxpr, inputs: list[bool]) -> list[bool]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        of = lambda x: not isinstance(x, core.Literal) and known.get(x, False)
        for eqn in jaxpr.eqns:
            outputs = self.through(eqn, [of(x) for x in eqn.invars])
            for var, is_made in zip(eqn.outvars, outputs, strict=True):
                known[var] = is_made and self.differs(varying_axes(var.aval))
        return [of(x) for x in jaxpr.outvars]

    def through(self, eqn, inputs: list[bool]) -> list[bool]:
        inner, name = _inner(eqn), eqn.primitive.name
        if name == "cond":
            branches = [self.followed(branch, inputs[1:]) for branch in inner]
            return [inputs[0] or any(of) for of in zip(*branches, strict=True)]
        if len(inner) == 1 and name not in ("scan", "while"):
            return self.followed(inner[0], inputs)
        # All of a loop, where anything is: what is carried goes round.
        makes = any(inputs) or any(map(self.mixes, _flat(eqn)))
        return [makes] * len(eqn.outvars)


def _inner(eqn):
    """The programs inside of an operation."""
    parts = [y for x in eqn.params.values() for y in (x if isinstance(x, tuple | list) else (x,))]
    return [getattr(j, "jaxpr", j) for j in parts if isinstance(j, core.Jaxpr | core.ClosedJaxpr)]


def _flat(eqn):
    """The operations inside of an operation, or itself."""
    inner = [e for jaxpr in _inner(eqn) for e in jaxpr.eqns]
    return [f for e in inner for f in _flat(e)] or [eqn]


def _names(jaxpr) -> list[str]:
    """The operations of a program in turn, but those that only change shapes."""
    names = [e.primitive.name for eqn in jaxpr.eqns for e in _flat(eqn)]
    return [name for name in names if name not in _OF_SHAPE]


def _sizes(eqn):
    size = lambda x: math.prod(getattr(x.aval, "shape", ()))
    return max(map(size, eqn.invars), default=0), [size(x) for x in eqn.outvars]


def _mixes(eqn) -> bool:
    largest, sizes = _sizes(eqn)
    return largest > 1 and (eqn.primitive.name in _MIXING or min(sizes, default=1) < largest)


def _is_norm(eqn) -> bool:
    largest, sizes = _sizes(eqn)
    # A slice is one entry, as of a message; and what counts bits of a mask is no norm.
    is_real = all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.outvars)
    return largest > 1 and sizes == [1] and is_real and eqn.primitive.name != "slice"
