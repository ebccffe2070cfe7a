"""Traces losses without types over the replicas, where JAX cannot trace them with types.

JAX types a value by the axes over which it differs, and by its mesh. The first carry of a loop is
often equal on all replicas, as `jnp.zeros(shape)`, and what the loop makes of it is not. A rule of
`jax.custom_vjp` may return zeros for what differs. Libraries compare types as on one device. JAX
or they refuse all these. A function without collectives computes the same without such types: it
is traced as on one device, and its program is one operation of the typed one, whose results differ
where its arguments do.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, get_abstract_mesh, use_abstract_mesh

from jaxcomp.replicas.types import typed_as, vary_like, varying_axes

_MISMATCH = "manual axis types do not match"
_WORDS = (
    "the loss has a loop, a branch or a custom derivative in which a value that is equal on all "
    "replicas meets one that differs, as the first carry jnp.zeros(shape) of jax.lax.scan, and "
    "collectives or sharded parameters, for which JAX needs the types of values. Begin with "
    "jnp.zeros_like(x) of a part x of the batch, or with jax.lax.pcast(carry, axis_name, "
    "to='varying'). The error above has the places."
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


def as_needed(step: Callable[..., Any], gradient: Any, *given: Any) -> Callable[..., Any]:
    """`step(gradient, *given, ...)`, traced again with a loss without types if that raises.

    Args:
      step: A function whose parts inside `shard_map` call and differentiate the loss.
      gradient: A `Gradient`. Its loss is `(params, *args, **options)` -> any pytree. Without types,
        the first leaf of that has a gradient, at `params` alone.
      *given: Further first arguments.

    Returns:
      The function of the other arguments. If both tries fail, it raises the first error; where JAX
      refused a type, a ValueError if there is a collective over the replicas, or another mesh axis
      shards what the loss gets, and otherwise the error without types.
    """
    plain = gradient._replace(loss_fn=functools.partial(_without_types, gradient.loss_fn))
    typed, plain = (functools.partial(step, own, *given) for own in (gradient, plain))

    def program(*args, **options):
        try:
            return typed(*args, **options)
        except Exception as error:
            first = error
        try:
            return plain(*args, **options)
        except Exception as error:
            second = error
        if _MISMATCH in str(first):
            raise second from first
        raise first

    program.__name__ = step.__name__  # in logs and profiles
    # It has the names of arguments, some of which are donated.
    return functools.update_wrapper(program, typed, assigned=())


def _without_types(function, params, *args, **options):
    """What a function returns; the first leaf has a gradient, at `params` alone."""
    rest, form = (args, options), None
    if not _are_alike(params, rest):
        raise ValueError(_WORDS)

    def leaves(params, rest):
        nonlocal form
        found, form = jax.tree.flatten(function(params, *rest[0], **rest[1]))
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
    first, others = made(params, rest)
    return jax.tree.unflatten(form, [first, *others])


def _are_alike(params, rest):
    """Whether all parameters differ over the same axes, and nothing else over more."""
    own, others = ({varying_axes(x) for x in jax.tree.leaves(tree)} for tree in (params, rest))
    return len(own) == 1 and all(axes <= min(own) for axes in others)


def _traced(function, *args):
    """What a function returns, traced without types."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    try:
        with use_abstract_mesh(_other_axes()):
            program, form = jax.make_jaxpr(function, return_shape=True)(*shapes)
    except (TypeError, AssertionError) as error:
        if _MISMATCH not in str(error) and "ManualAxisType" not in str(error):
            raise
        raise ValueError(_WORDS) from error
    if not _is_untyped(program):
        raise ValueError(_WORDS)
    results = _run.bind(*jax.tree.leaves(args), program=program)
    return jax.tree.unflatten(jax.tree.structure(form), results)


def _other_axes():
    """No mesh, as on one device, if there are no axes over which XLA partitions the function."""
    mesh = get_abstract_mesh()
    return AbstractMesh((), ()) if set(mesh.manual_axes) == set(mesh.axis_names) else mesh


def _is_untyped(program):
    """Whether a program computes and holds nothing that differs between replicas by itself.

    A collective has its axis as an effect; `jax.lax.axis_index` has, too.
    """
    axes = get_abstract_mesh().manual_axes
    if any(getattr(effect, "name", None) in axes for effect in program.effects):
        return False
    if any(isinstance(x, jax.core.Tracer) for x in program.consts):
        return False
    bodies = [program.jaxpr]
    for body in bodies:
        bodies += core.subjaxprs(body)
        if any(varying_axes(x.aval) for each in body.eqns for x in each.outvars):
            return False
    return True
