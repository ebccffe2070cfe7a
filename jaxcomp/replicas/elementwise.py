"""Checks that an optimizer may run on pieces of parameters.

An optimizer that sees pieces must do with them what it would do with whole parameters. Its traced
program shows that: two programs are compared, or values are followed through one.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas.types import require_alike, to_varying, varying_axes

# Operations with as many results as entries that still mix entries.
_MIXING = frozenset(
    "sort rev fft cumsum cumprod cummax cummin cumlogsumexp dot_general conv_general_dilated "
    "cholesky eigh lu qr svd triangular_solve gather scatter".split()
)
_RESHAPING = frozenset("broadcast_in_dim reshape squeeze pcast pvary".split())


def ranked(piece: jax.Array, ndim: int) -> jax.Array:
    """A piece `[*stack, n]` with as many axes as the parameter, for masks such as `ndim > 1`.

    The piece of a scalar has one axis.
    """
    kept = piece.shape[-ndim:] if ndim > 1 else (piece.size,)
    return piece.reshape(*[1] * (ndim - len(kept)), *kept[:-1], -1)


def require_elementwise(
    tx: Any, grads: Any, state: Any, params: Any, shapes: Any, **extra_args: Any
) -> None:
    """Raises a ValueError for an optimizer that treats pieces differently from whole parameters.

    Its update gets gradients, a state and parameters, all in pieces, and `extra_args`. `shapes` are
    those of the whole parameters, one tuple per leaf.
    """
    traced = jax.make_jaxpr(
        lambda grads, state, params: tx.update(grads, state, params, **extra_args),
        return_shape=True,
    )
    state = jax.tree.map(_strong, state)
    whole = _whole(tx, grads, state, params, shapes)
    try:
        program = whole and traced(grads, state, params)
        is_other = whole is None or _names(traced(*whole)[0].jaxpr) != _names(program[0].jaxpr)
    except TypeError as error:
        if "must have equal output types" not in str(error):
            raise
        is_other = True  # a branch by shapes, as that of optax.contrib.galore
    if is_other:
        raise ValueError(
            "the optimizer looks at shapes (a mask, a label of optax.partition, or a factored "
            "moment), and parameters are in flat pieces here, of which only the number of axes is "
            "that of the parameters; write masks and labels as trees, or by paths, and optimizers "
            "that work entry by entry, such as optax.adamw."
        )
    _require_own_noise(program[0].jaxpr, params)
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
    """Zeros as an optimizer's arguments for whole parameters; None if its state would differ."""
    leaves, treedef = jax.tree.flatten(params)
    # JAX drops operations on empty arrays; their piece is one zero.
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


def with_whole_norms(
    update: Callable[..., Any], *args: Any, axis_name: str, specs: Any = None
) -> Any:
    """The results of an update that scales no shard of a parameter by a norm of its own.

    Args:
      update: `(grads, state, params) -> (updates, state)`, traced once.
      *args: Its arguments; parameters are local shards.
      axis_name: The axis of the replicas, which does not shard.
      specs: PartitionSpecs of the parameters, a tree like these, for an update with the exchange in
        it. Then only norms of values that are equal on all replicas count, as after a mean: before
        it, codes look at whole shards. Sums over a part of the axes, as of rows, count then if they
        are over an axis that is cut.

    Raises:
      ValueError: If it scales one so, or draws random numbers for one that are those of another; or
        the errors of `require_alike`.
    """
    grads, _, params = args
    if not any(varying_axes(x) - {axis_name} for x in jax.tree.leaves(params)):
        results = update(*args)
        require_alike(results[0], params, axis_name)
        return results

    is_counted = lambda axes: specs is None or axis_name not in axes
    differs = lambda axes: bool(axes - {axis_name}) and is_counted(axes)
    program, like = jax.make_jaxpr(update, return_shape=True)(*args)
    flat = core.jaxpr_as_fun(program)(*jax.tree.leaves(args))
    results = jax.tree.unflatten(jax.tree.structure(like), flat)
    require_alike(results[0], params, axis_name)
    _require_own_noise(program.jaxpr, params, axis_name)
    cuts = set() if specs is None else _cuts(params, specs)
    is_local = lambda eqn: _is_norm(eqn) or _is_over(cuts, eqn)
    scaled = _Tracker(is_local, differs).results(program, like)
    if scaled:
        raise ValueError(
            f"the update's {scaled[0]!r} depends on a norm of local shards, as that of "
            "optax.clip_by_global_norm, of optax.lamb or of Muon: each shard has another. Write "
            "jaxcomp.clip_by_global_norm, jaxcomp.slamb or jaxcomp.one_bit_lamb, which take the "
            "norms of all shards. Muon, as in muloco, needs whole matrices: give them P() in "
            "param_specs."
        )
    return results


def _require_own_noise(jaxpr, params, *but):
    """Raises a ValueError for random numbers that are equal for different shards."""
    every = [e for eqn in jaxpr.eqns for e in innermost(eqn)]
    for drawn in [e.outvars[0].aval for e in every if e.primitive.name == "random_bits"]:
        for x in jax.tree.leaves(params):
            if x.shape == drawn.shape and varying_axes(x) - varying_axes(drawn) - {*but}:
                raise ValueError(
                    "the optimizer draws the same random numbers for every shard of a parameter, "
                    "as optax.add_noise or optax.noisy_sgd: its key is equal on all devices. Add "
                    "noise where gradients are whole: write optax.chain(optax.add_noise(...), "
                    "jaxcomp.sharded_optimizer(...)), or a mesh whose devices hold all parameters."
                )


def _cuts(params, specs):
    """The local shapes of parameters, each with an axis that is cut into shards."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True)
    return {(x.shape, i) for x, spec in pairs for i, names in enumerate(spec) if names}


def _strong(x):
    """An array whose type is not weak, as that of `jnp.asarray(1e-3)`, which adds conversions."""
    return jnp.asarray(x, x.dtype) if jax.typeof(x).weak_type else x


def _zeros(shape, like):
    """Zeros with the dtype and varying axes of an array; a random key is returned as it is."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.extended):
        return like
    return to_varying(jnp.zeros(shape, like.dtype), tuple(sorted(varying_axes(like))))


class _Tracker(NamedTuple):
    """Follows values through a program that depend on several entries of one device's arrays.

    A value is dropped once JAX's type says that it is equal where it has to be, which is the case
    after a sum over the shards of all devices.
    """

    mixes: Callable[[Any], bool]  # whether an operation makes such a value
    differs: Callable[[frozenset[str]], bool]  # of the mesh axes that a value varies over

    def results(self, program, like) -> list[str]:
        """The paths of the results that are such values; `like` is the tree of all results."""
        paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(like)]
        found = self.followed(program.jaxpr, [False] * len(program.jaxpr.invars))
        return [path for path, is_found in zip(paths, found, strict=True) if is_found]

    def followed(self, jaxpr, inputs: list[bool]) -> list[bool]:
        known = dict(zip(jaxpr.invars, inputs, strict=True))
        is_tracked = lambda x: not isinstance(x, core.Literal) and known.get(x, False)
        for eqn in jaxpr.eqns:
            outputs = self.through(eqn, [is_tracked(x) for x in eqn.invars])
            for var, is_made in zip(eqn.outvars, outputs, strict=True):
                known[var] = is_made and self.differs(varying_axes(var.aval))
        return [is_tracked(x) for x in jaxpr.outvars]

    def through(self, eqn, inputs: list[bool]) -> list[bool]:
        inner, name = [*core.jaxprs_in_params(eqn.params)], eqn.primitive.name
        if name == "cond":
            branches = [self.followed(branch, inputs[1:]) for branch in inner]
            return [inputs[0] or any(outputs) for outputs in zip(*branches, strict=True)]
        if len(inner) == 1 and name not in ("scan", "while"):
            return self.followed(inner[0], inputs)
        # If any value of a loop is one, all are: the carry goes around.
        makes = any(inputs) or any(map(self.mixes, innermost(eqn)))
        return [makes] * len(eqn.outvars)


def innermost(eqn: Any) -> list[Any]:
    """The operations inside an operation, such as a branch or a loop, or the operation itself."""
    parts = core.jaxprs_in_params(eqn.params)
    return [e for jaxpr in parts for inner in jaxpr.eqns for e in innermost(inner)] or [eqn]


def _names(jaxpr) -> list[str]:
    """The names of a program's operations in order, without those that only change shapes."""
    names = [e.primitive.name for eqn in jaxpr.eqns for e in innermost(eqn)]
    return [name for name in names if name not in _RESHAPING]


def _sizes(eqn):
    size = lambda x: math.prod(getattr(x.aval, "shape", ()))
    return max(map(size, eqn.invars), default=0), [size(x) for x in eqn.outvars]


def _mixes(eqn) -> bool:
    largest, sizes = _sizes(eqn)
    return largest > 1 and (eqn.primitive.name in _MIXING or min(sizes, default=1) < largest)


def _is_over(cuts, eqn) -> bool:
    axes = eqn.params.get("axes", ())
    return bool(axes) and any((eqn.invars[0].aval.shape, axis) in cuts for axis in axes)


def _is_norm(eqn) -> bool:
    largest, sizes = _sizes(eqn)
    # One entry of a message is a slice or bytes. A sum of a mask's bits is not a norm.
    is_real = all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.outvars)
    is_message = eqn.primitive.name in ("slice", "bitcast_convert_type")
    return largest > 1 and sizes == [1] and is_real and not is_message
