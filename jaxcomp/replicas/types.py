"""JAX's types over replicas: which values vary over the slow axis.

The only file that uses JAX's manual-axis types. Inside `jax.shard_map` a value's type says
over which mesh axes it varies. A state leaf that varies over the replicas is a global array
with a leading axis `[num_replicas, ...]`; `per_replica` adds and removes that axis.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

_COLLECTIVES = ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter")


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes along which an array, or a shape, may differ, according to JAX's type."""
    kind = getattr(x, "manual_axis_type", None)
    return (kind if kind is not None else jax.typeof(x).manual_axis_type).varying


def varies_over(x: jax.Array, axis_name: str | tuple[str, ...]) -> bool:
    """Whether JAX's type of `x` says that it may differ along a mesh axis, or one of several."""
    return not varying_axes(x).isdisjoint(names_of(axis_name))


def largest(x: jax.Array, *but: str) -> jax.Array:
    """The maximum of `x` over all mesh axes that it varies over, except `but`."""
    axes = tuple(sorted(varying_axes(x) - set(but)))
    return lax.pmax(x, axes) if axes else x


def sums_over_shards(xs: list[jax.Array], *but: str) -> list[jax.Array]:
    """Sums each of `xs` over all mesh axes that it varies over, except `but`.

    Values that vary over the same axes are sent together.
    """
    return _over_shards(lax.psum, xs, but)


def any_over_shards(xs: list[jax.Array], *but: str) -> list[jax.Array]:
    """As `sums_over_shards`, of bool: whether each is true in any shard."""
    largest = lambda xs, names: lax.pmax([x.astype(jnp.int32) for x in xs], names)
    return _over_shards(lambda xs, names: [n > 0 for n in largest(xs, names)], xs, but)


def _over_shards(reduce, xs, but):
    axes = [tuple(sorted(varying_axes(x) - set(but))) for x in xs]
    reduced = list(xs)
    for names in dict.fromkeys(own for own in axes if own):
        alike = [i for i, own in enumerate(axes) if own == names]
        for i, x in zip(alike, reduce([xs[i] for i in alike], names), strict=True):
            reduced[i] = x
    return reduced


def size_over_shards(x: jax.Array, *but: str) -> int:
    """Elements of all shards of `x`, over the mesh axes that it varies over, except `but`."""
    return x.size * math.prod(lax.axis_size(name) for name in varying_axes(x) - set(but))


def is_tracked(axis_name: str | tuple[str, ...]) -> bool:
    """Whether types track an axis, or several: true inside `shard_map`, false under `jax.vmap`.

    Raises:
      ValueError: If the axis is not bound here, or `shard_map` was told not to check types.
    """
    return all([_is_tracked(name) for name in names_of(axis_name)])


def _is_tracked(axis_name):
    try:
        index = lax.axis_index(axis_name)
    except NameError as error:
        if own := jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"the axis {axis_name!r} is unknown here, where the axes are {tuple(sorted(own))}; "
                "give the transformation and its step the same name."
            ) from error
        raise ValueError(
            f"the axis {axis_name!r} is unknown here; run this inside jax.shard_map over a mesh "
            f"with an axis {axis_name!r}, or under jax.vmap(..., axis_name={axis_name!r}). Flax's "
            "nnx.Optimizer and TrainState call tx.init outside of both; give them "
            f"jaxcomp.flax.on_mesh(tx, mesh, {axis_name!r}), and train by jaxcomp.flax.train_step."
        ) from error
    if axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
        return False
    if not varies_over(index, axis_name):
        raise ValueError(
            f"JAX does not check types over the axis {axis_name!r} here, so that nothing proves "
            "that the replicas apply equal updates. In jax.shard_map leave check_vma at True; "
            "jax.pmap never checks them: write jax.shard_map in its place."
        )
    return True


def num_replicas(axis_name: str | tuple[str, ...]) -> int:
    """The size of the axis, or the product of several; raises the errors of `is_tracked`."""
    is_tracked(axis_name)
    return lax.axis_size(axis_name)


def to_varying(tree: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Casts every leaf to a type that varies over an axis, or several; values do not change."""
    if not is_tracked(axis_name):
        return tree
    return jax.tree.map(lambda x: vary_over(x, names_of(axis_name)), tree)


def zeros_of(like: Any) -> jax.Array:
    """Zeros with the shape, dtype and varying axes of an array or a shape."""
    return vary_like(jnp.zeros(like.shape, like.dtype), like)


def tied(*trees: Any) -> tuple[Any, ...]:
    """The trees behind an optimization barrier: none is used before all are computed."""
    leaves, treedef = jax.tree.flatten(trees)
    # Before JAX 0.12 every output of a barrier varies like the union: other values bypass it.
    keeps_types = jax.__version_info__ >= (0, 12)
    all_axes = frozenset().union(*map(varying_axes, leaves))
    through = [i for i, x in enumerate(leaves) if keeps_types or varying_axes(x) == all_axes]
    known = lax.optimization_barrier([leaves[i] for i in through])
    for i, x in zip(through, known, strict=True):
        leaves[i] = x
    return treedef.unflatten(leaves)


def require_varying(updates: Any, axis_name: str, params: Any = None) -> None:
    """Raises a ValueError if updates were already summed over the replicas.

    With `params`, also raises the errors of `require_alike`.
    """
    if not is_tracked(axis_name):
        return
    if params is not None:
        require_alike(updates, params, axis_name)
    for path, leaf in jax.tree.leaves_with_path(updates):
        if not varies_over(leaf, axis_name):
            raise ValueError(
                f"the update {jax.tree_util.keystr(path)!r} must vary over {axis_name!r}, but its "
                "type says that it is equal on all replicas: something has summed it in float32, "
                "past any compression. Differentiate at "
                f"jaxcomp.local_params(params, state, {axis_name!r}), since jax.grad at replicated "
                "parameters sums; leave out jax.lax.pmean of gradients; write jaxcomp.loss_scale "
                "in place of Flax's DynamicScale. If another method stands "
                "before this one in the chain, leave one of them out: it has averaged already."
            )


def require_alike(updates: Any, params: Any, axis_name: str) -> None:
    """Raises a ValueError if an update differs over an axis that does not shard its parameter."""

    def check(path, update, param):
        axes = varying_axes(update) - varying_axes(param) - {axis_name}
        if axes:
            raise unlike(f"the update of {jax.tree_util.keystr(path)!r}", axes)

    jax.tree.map_with_path(check, updates, params)


def unlike(what: str, axes: Any) -> ValueError:
    """The error about a leaf of a whole parameter that differs between shards of others."""
    return ValueError(
        f"{what} differs between shards over {tuple(sorted(axes))}, over which its parameter is "
        "whole: a norm of local shards has scaled it, as that of optax.clip_by_global_norm. Write "
        "jaxcomp.clip_by_global_norm, which takes the norm of all shards."
    )


def vary_like(x: jax.Array, like: Any) -> jax.Array:
    """Casts an array to a type that varies at least over the axes of another, or of a shape."""
    return vary_over(x, varying_axes(like))


def vary_over(x: jax.Array, names: Iterable[str]) -> jax.Array:
    """Casts an array to a type that varies at least over these axes; values do not change."""
    missing = tuple(sorted(set(names) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def typed_as(shape: Any, axes: frozenset[str], types: Sequence[Any]) -> Any:
    """The type of a shape that varies over these axes, which those of `types` together have."""
    at = NamedSharding(types[0].sharding.mesh, PartitionSpec())
    if not axes:
        return shape.update(sharding=at)
    wide = [each.manual_axis_type for each in types if axes <= varying_axes(each)]
    return shape.update(sharding=at, manual_axis_type=min(wide, key=lambda it: len(it.varying)))


def is_message(eqn: Any) -> bool:
    """Whether an operation of a traced program is a collective."""
    return eqn.primitive.name.startswith(_COLLECTIVES)


def is_mapped(x: jax.Array) -> bool:
    """Whether `jax.vmap` maps over `x`: it then calls a custom rule."""
    seen = []
    note = jax.custom_batching.custom_vmap(lambda x: x)

    @note.def_vmap
    def rule(axis_size, in_batched, x):
        seen.append(axis_size)
        return x, in_batched[0]

    note(x)
    return bool(seen)


def names_of(axis_name: Any) -> tuple[str, ...]:
    """The name of an axis, or of several, as a tuple; a ValueError for anything else."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    is_some = isinstance(names, tuple | list) and all(isinstance(name, str) for name in names)
    if not is_some:
        raise ValueError(
            f"got {axis_name!r:.60} where the name of the replicas' mesh axis belongs; write "
            "'replica', as in jax.make_mesh((4,), ('replica',)). Are two arguments swapped?"
        )
    return tuple(names)
