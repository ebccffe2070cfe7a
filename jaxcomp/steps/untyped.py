"""Calls of functions whose loops have no type over the replicas, as JAX sees it.

The first carry of a loop is often equal on all replicas, as `jnp.zeros(shape)`, and what the loop
makes of it is not. JAX, which types a value by the axes over which it differs, refuses such a loop.
A function without collectives computes the same without these types: it is traced without them,
and its program is one operation of the typed one, whose results differ where its arguments do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir

from jaxcomp.replicas.types import typed_as, vary_like, varying_axes

_MISMATCH = "manual axis types do not match"
_WORDS = (
    "the loss has a loop or a branch in which a value that is equal on all replicas becomes one "
    "that differs, as the first carry jnp.zeros(shape) of jax.lax.scan, and collectives or sharded "
    "parameters, for which JAX needs the types of values. Begin with jnp.zeros_like(x) of a part x "
    "of the batch, or with jax.lax.pcast(carry, axis_name, to='varying'). The error above has the "
    "places."
)
_run = core.Primitive("untyped")
_run.multiple_results = True


@_run.def_abstract_eval
def _types_of_results(*types, program):
    axes = dict(zip(program.jaxpr.invars, map(varying_axes, types), strict=True))

    def together(atoms):
        held = [x for x in atoms if not isinstance(x, core.Literal)]
        return frozenset().union(*(axes.get(x, ()) for x in held))

    for each in program.jaxpr.eqns:
        axes |= dict.fromkeys(each.outvars, together(each.invars))
    found = [together([x]) for x in program.jaxpr.outvars]
    return [typed_as(*pair, types) for pair in zip(program.out_avals, found, strict=True)]


def _lowered(context, *args, program):
    return mlir.core_call_lowering(context, *args, name="untyped", call_jaxpr=program)


mlir.register_lowering(_run, _lowered)


def called(function: Callable[..., Any], params: Any, *args: Any, **options: Any) -> Any:
    """Calls a function inside `shard_map`, without types if a loop of it needs that.

    Then the first leaf of the result has a gradient, at `params` alone.

    Args:
      function: `(params, *args, **options)` -> any pytree.
      params: The first argument.
      *args, **options: The others.

    Raises:
      ValueError: For a loop that JAX cannot type, if there is a collective over the replicas, or
        another mesh axis shards what the function gets.
    """
    rest = jax.tree.map(lambda x: x, (args, options))  # Equinox forbids to use a state twice
    try:
        return function(params, *args, **options)
    except TypeError as error:
        if _MISMATCH not in str(error):
            raise
        if not _are_alike(params, rest):
            raise ValueError(_WORDS) from error
        whole = lambda params, rest: function(params, *rest[0], **rest[1])
        return _without_types(whole)(params, rest)


def _are_alike(params, rest):
    """Whether all parameters differ over the same axes, and nothing else over more."""
    own, others = ({varying_axes(x) for x in jax.tree.leaves(tree)} for tree in (params, rest))
    return len(own) == 1 and all(axes <= min(own) for axes in others)


def _without_types(function):
    """The function `(params, rest) -> tree`, whose first leaf has a gradient at `params`."""
    form = None

    def leaves(params, rest):
        nonlocal form
        found, form = jax.tree.flatten(function(params, rest))
        first, *others = map(jnp.asarray, found)
        return first, others

    def forward(params, rest):
        at = lambda rest: lambda params: leaves(params, rest)
        pulled = lambda params, rest: jax.vjp(at(rest), params, has_aux=True)
        first, pull, others = _traced(pulled, params, rest)
        return (first, others), pull

    def backward(pull, gradients):
        (found,) = _traced(lambda pull, gradient: pull(gradient), pull, gradients[0])
        # That of a parameter without influence is zero on all replicas.
        return jax.tree.map(lambda g: vary_like(g, gradients[0]), found), None

    made = jax.custom_vjp(lambda params, rest: _traced(leaves, params, rest))
    made.defvjp(forward, backward)

    def run(params, rest):
        first, others = made(params, rest)
        return jax.tree.unflatten(form, [first, *others])

    return run


def _traced(function, *args):
    """What a function returns, traced without types."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    try:
        program, form = jax.make_jaxpr(function, return_shape=True)(*shapes)
    except TypeError as error:
        if _MISMATCH not in str(error):
            raise
        raise ValueError(_WORDS) from error
    if not _is_untyped(program):
        raise ValueError(_WORDS)
    results = _run.bind(*jax.tree.leaves(args), program=program)
    return jax.tree.unflatten(jax.tree.structure(form), results)


def _is_untyped(program):
    """Whether a program computes and holds nothing that differs between replicas by itself."""
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        return False
    bodies = [program.jaxpr]
    for body in bodies:
        bodies += core.subjaxprs(body)
        if any(varying_axes(x.aval) for each in body.eqns for x in each.outvars):
            return False
    return True
