"""Replicas and JAX's types: what varies over the slow axis, and where its rows are kept.

The only file that knows JAX's manual-axis types. Inside `jax.shard_map` a value's type says
over which mesh axes it varies. A state leaf that varies over the replicas is a global array
with a leading axis `[num_replicas, ...]`; `per_replica` adds and removes that axis.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.fields import fields, is_field


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes along which JAX's type of an array, or a shape, says that it may differ."""
    kind = getattr(x, "manual_axis_type", None)
    return (kind if kind is not None else jax.typeof(x).manual_axis_type).varying


def varies_over(x: jax.Array, axis_name: str | tuple[str, ...]) -> bool:
    """Whether JAX's type of `x` says that it may differ along a mesh axis, or one of several."""
    return not varying_axes(x).isdisjoint(_names(axis_name))


def largest(x: jax.Array, *but: str) -> jax.Array:
    """The maximum of `x` over all mesh axes that it varies over, `but` these: equal over them."""
    axes = tuple(sorted(varying_axes(x) - set(but)))
    return lax.pmax(x, axes) if axes else x


def sums_over_shards(xs: list[jax.Array], *but: str) -> list[jax.Array]:
    """Sums each of `xs` over all mesh axes that it varies over, `but` these.

    Those that vary over the same axes travel together.
    """
    axes = [tuple(sorted(varying_axes(x) - set(but))) for x in xs]
    sums = list(xs)
    for names in dict.fromkeys(own for own in axes if own):
        alike = [i for i, own in enumerate(axes) if own == names]
        for i, total in zip(alike, lax.psum([xs[i] for i in alike], names), strict=True):
            sums[i] = total
    return sums


def size_over_shards(x: jax.Array, *but: str) -> int:
    """Elements of all shards of `x`, over the mesh axes that it varies over, `but` these."""
    return x.size * math.prod(lax.axis_size(name) for name in varying_axes(x) - set(but))


def is_tracked(axis_name: str | tuple[str, ...]) -> bool:
    """Whether types track an axis, or several: yes inside `shard_map`, no under `jax.vmap`.

    Raises:
      ValueError: If the axis is not bound here, or `shard_map` was told not to check types.
    """
    return all([_is_tracked(name) for name in _names(axis_name)])


def _is_tracked(axis_name):
    try:
        index = lax.axis_index(axis_name)
    except NameError as error:
        raise ValueError(
            f"the axis {axis_name!r} is unknown here; run this inside jax.shard_map over a mesh "
            f"with an axis {axis_name!r}, or under jax.vmap(..., axis_name={axis_name!r}). Flax's "
            "nnx.Optimizer and TrainState call tx.init outside of both; instead write init, step = "
            f"jaxcomp.train_step(loss_fn, tx, mesh, {axis_name!r}), for nnx with the parameters of "
            "nnx.split as params."
        ) from error
    if axis_name not in jax.sharding.get_abstract_mesh().manual_axes:
        return False
    if not varies_over(index, axis_name):
        raise ValueError(
            "shard_map was called with check_vma=False, so that nothing proves that the replicas "
            "apply equal updates; leave check_vma at True."
        )
    return True


def num_replicas(axis_name: str | tuple[str, ...]) -> int:
    """The size of the axis, or the product of several; a ValueError as that of `is_tracked`."""
    is_tracked(axis_name)
    return lax.axis_size(axis_name)


def to_varying(tree: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Casts every leaf to a type that varies over an axis, or several; the values stay."""
    if not is_tracked(axis_name):
        return tree
    return jax.tree.map(lambda x: _vary(x, _names(axis_name)), tree)


def zeros_of(like: Any) -> jax.Array:
    """Zeros of the shape, dtype and varying axes of an array, or of a shape."""
    return _vary_like(jnp.zeros(like.shape, like.dtype), like)


def require_varying(updates: Any, axis_name: str, params: Any = None) -> None:
    """Raises a ValueError if updates were summed over the replicas before they got here.

    Also if they differ between shards as `require_alike` says, where parameters are given.
    """
    if not is_tracked(axis_name):
        return
    if params is not None:
        require_alike(updates, params, axis_name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if not varies_over(leaf, axis_name):
            raise ValueError(
                f"the update {jax.tree_util.keystr(path)!r} must vary over {axis_name!r}, but its "
                "type says that it is equal on all replicas: jax.grad at replicated parameters "
                "has summed it in float32, past any compression. Differentiate at "
                f"jaxcomp.local_params(params, state, {axis_name!r})."
            )


def require_alike(updates: Any, params: Any, axis_name: str) -> None:
    """Raises a ValueError if an update differs between shards over which its parameter is whole."""

    def check(path, update, param):
        axes = varying_axes(update) - varying_axes(param) - {axis_name}
        if axes:
            raise unlike(f"the update of {jax.tree_util.keystr(path)!r}", axes)

    jax.tree_util.tree_map_with_path(check, updates, params)


def unlike(what: str, axes: Any) -> ValueError:
    """The error about what belongs to a whole parameter and differs between shards of others."""
    return ValueError(
        f"{what} differs between shards over {tuple(sorted(axes))}, over which its parameter is "
        "whole: a norm of local shards has scaled it, as that of optax.clip_by_global_norm. Write "
        "jaxcomp.clip_by_global_norm, which takes the norm of all shards."
    )


def local_params(params: Any, state: Any, axis_name: str) -> Any:
    """What a replica differentiates the loss at: the consensus plus this replica's drift.

    It always varies over `axis_name`, so that `jax.grad` at it stays local by type and no
    dense all-reduce of gradients can slip in.

    Args:
      params: The consensus parameters, equal on all replicas.
      state: The state of a transformation wrapped by `per_replica`. If it has a field named
        `drift` (methods whose replicas differ between exchanges), that is added.
      axis_name: The mesh axis of the replicas.

    Returns:
      A tree like `params`.
    """
    return add_drifts(params, fields(state, "drift"), axis_name)


def add_drifts(params, drifts, axis_name):
    """`params`, varying, plus the rows of each of `drifts`: see `local_params`."""
    # What a method does not see, as in optax.partition, has a MaskedNode in place of a drift.
    is_masked = lambda d: isinstance(d, optax.MaskedNode)

    def add(drift, param):
        if is_masked(drift):
            return param
        if drift.shape != param.shape:
            raise ValueError(
                f"a drift of shape {drift.shape} belongs to a parameter of shape {param.shape}: "
                "the state has not one row a replica. Write jaxcomp.per_replica around the whole "
                "transformation, once, and nothing around it."
            )
        return (param + drift).astype(param.dtype)

    local = to_varying(params, axis_name)
    for drift in unstack(drifts, axis_name):
        local = jax.tree.map(add, drift, local, is_leaf=is_masked)
    return local


def stack(tree, axis_name):
    if not is_tracked(axis_name):
        return tree
    return jax.tree.map(lambda x: x[None] if varies_over(x, axis_name) else x, tree)


def unstack(tree, axis_name):
    if not is_tracked(axis_name):
        return tree
    return jax.tree.map(lambda x: x[0] if varies_over(x, axis_name) else x, tree)


def per_replica(
    tx: optax.GradientTransformation, axis_name: str | tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """Keeps state leaves that differ between replicas as rows of `[num_replicas, ...]` arrays.

    Goes around the whole optimizer, outermost, `optax.MultiSteps` included. Which leaves
    vary is found by tracing `init` and `update` once, so that a transformation of others
    that stores local gradients (as an accumulator does) needs no change. The trace passes `value`,
    a loss that is equal on all replicas, to what asks for it.

    Args:
      tx: Any transformation that is run inside `shard_map` over `axis_name`.
      axis_name: The mesh axis of the replicas, or several.

    Returns:
      The same transformation; inside `shard_map` its varying state leaves have a leading axis
      of one, for `state_specs` to shard. Under `jax.vmap` nothing changes.

    Raises:
      ValueError: If `tx` is wrapped over another axis already; at trace time, if the axis is
        unknown or its types are not checked.
    """
    wrapped = replica_axes(tx)
    if wrapped == _names(axis_name):
        return tx
    if wrapped:
        raise ValueError(
            f"per_replica got a transformation that it has wrapped over {wrapped} already, and "
            f"the axis {axis_name!r}; wrap it once, over all axes of the replicas."
        )
    tx = optax.with_extra_args_support(tx)

    def init(params):
        state = tx.init(params)
        if not is_tracked(axis_name):
            return state
        grads = to_varying(jax.tree.map(jnp.zeros_like, params), axis_name)
        update_of = functools.partial(tx.update, value=jnp.zeros([]))
        after = lambda state: jax.eval_shape(lambda s: update_of(grads, s, params)[1], state)
        try:
            return stack(_as_after_updates(state, after), axis_name)
        except (TypeError, ValueError):
            if not fields(state, "acc_grads"):
                raise
        # MultiSteps around a mean traces that at its accumulator, still zeros, too.
        state = jax.tree_util.tree_map_with_path(
            lambda path, x: to_varying(x, axis_name) if is_field(path, "acc_grads") else x, state
        )
        return stack(_as_after_updates(state, after), axis_name)

    def update(updates, state, params=None, **extra_args):
        state = unstack(state, axis_name)
        updates, state = tx.update(updates, state, params, **extra_args)
        return updates, stack(_emptied(state), axis_name)

    init.replica_axes = _names(axis_name)
    return optax.GradientTransformationExtraArgs(init, update)


def replica_axes(tx: optax.GradientTransformation) -> tuple[str, ...]:
    """The axes over which `per_replica` has wrapped this, outermost; () if it has not."""
    return getattr(tx.init, "replica_axes", ())


def _as_after_updates(state, after):
    """Lets vary what starts as zeros that are equal everywhere and varies after some update."""
    while True:
        new_state = jax.tree.map(_vary_like, state, after(state))
        if jax.tree.map(varying_axes, new_state) == jax.tree.map(varying_axes, state):
            return state
        state = new_state


def _emptied(state):
    """The state with zeros where `optax.MultiSteps` multiplies a sum by 0: there NaN would stay."""
    is_multi = lambda node: isinstance(node, optax.MultiStepsState)

    def empty(node):
        if not is_multi(node):
            return node
        clear = lambda total: jnp.where(node.mini_step == 0, jnp.zeros_like(total), total)
        return node._replace(acc_grads=jax.tree.map(clear, node.acc_grads))

    return jax.tree.map(empty, state, is_leaf=is_multi)


def _vary_like(x, like):
    return _vary(x, varying_axes(like))


def _vary(x, names):
    missing = tuple(sorted(set(names) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _names(axis_name):
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
