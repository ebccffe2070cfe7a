"""States of replicas: a row for each replica where they differ, and parameters plus drift."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.replicas import protocol
from jaxcomp.replicas.protocol import is_masked
from jaxcomp.replicas.types import (
    is_tracked,
    names_of,
    to_varying,
    varies_over,
    vary_like,
    vary_over,
    varying_axes,
)
from jaxcomp.replicas.wrapping import (
    explain,
    first_state,
    nodes,
    require_same_form,
    require_sent_by_all,
)


def local_params(params: Any, state: Any, axis_name: str) -> Any:
    """The parameters at which a replica takes its gradient: the consensus plus its drift.

    They always vary over `axis_name`, so that `jax.grad` stays local by type and JAX cannot add a
    dense all-reduce of gradients.

    Args:
      params: The consensus parameters, equal on all replicas.
      state: The state of a transformation wrapped by `per_replica`. If it contains a
        `jaxcomp.MethodState` with a `drift` (methods whose replicas differ between exchanges), that
        is added.
      axis_name: The mesh axis of the replicas.

    Returns:
      A tree like `params`.
    """
    return add_drifts(params, protocol.drifts(state), axis_name)


def add_drifts(params, drifts, axis_name):
    """`params`, cast to varying, plus the rows of each of `drifts`; see `local_params`."""
    protocol.require_no_state(params)

    def add(drift, param):
        if is_masked(drift):
            return param
        if drift.shape != param.shape:
            raise ValueError(
                f"a drift of shape {drift.shape} belongs to a parameter of shape {param.shape}: "
                "the state lacks a row per replica, or the parameters are not those of the method. "
                "Write jaxcomp.per_replica around the whole transformation, once, and nothing "
                "around it; leave out optax.flatten, which makes one vector of all leaves, since "
                "they are sent in few messages anyway."
            )
        return (param + drift).astype(param.dtype)

    local, treedef = jax.tree.flatten(to_varying(params, axis_name))
    for drift in unstack(drifts, axis_name):
        local = [add(*pair) for pair in zip(by_leaf(drift, params), local, strict=True)]
    return treedef.unflatten(local)


def by_leaf(drift: Any, params: Any) -> list[Any]:
    """The drift of each parameter, or a `MaskedNode`, which may stand for a whole branch."""
    repeat = lambda x, branch: [x] * jax.tree.structure(branch).num_leaves
    try:
        each = jax.tree.map(repeat, drift, params, is_leaf=is_masked)
    except ValueError as error:
        own = jax.tree.leaves(drift, is_leaf=is_masked)
        if len(own) != jax.tree.structure(params).num_leaves:
            raise ValueError(
                f"the state has a drift of {len(own)} parameters, and there are "
                f"{jax.tree.structure(params).num_leaves}: it is that of another model. With two "
                "models, and an optimizer for each, write local_params, mean_params and eval_step "
                "for each model and its own state."
            ) from error
        return own  # wrapped, as in the state of nnx.Optimizer
    return jax.tree.leaves(each, is_leaf=is_masked)


def stack(tree: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Gives leaves that vary over the replicas a leading axis of one; inside `shard_map` only."""
    if not is_tracked(axis_name):
        return tree
    return jax.tree.map(lambda x: x[None] if varies_over(x, axis_name) else x, tree)


def unstack(tree: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Undoes `stack`."""
    if not is_tracked(axis_name):
        return tree
    return jax.tree.map(lambda x: x[0] if varies_over(x, axis_name) else x, tree)


def per_replica(
    tx: optax.GradientTransformation, axis_name: str | tuple[str, ...]
) -> optax.GradientTransformationExtraArgs:
    """Keeps state leaves that differ between replicas as rows of `[num_replicas, ...]` arrays.

    Wrap the whole optimizer in it, `optax.MultiSteps` included. The first `init` for parameters of
    some types traces `update` to find out which leaves vary, so any transformation that stores
    local gradients, such as an accumulator, works unchanged. The trace passes `value`, a loss that
    is equal on all replicas, to transformations that take it.

    Args:
      tx: Any transformation that runs inside `shard_map` over `axis_name`.
      axis_name: The mesh axis of the replicas, or several.

    Returns:
      The same transformation; inside `shard_map` its varying state leaves have a leading axis
      of one, for `state_specs` to shard. Under `jax.vmap` nothing changes.

    Raises:
      ValueError: If `tx` is already wrapped over another axis. At trace time, if the axis is
        unknown or its types are not checked.

    Warns:
      UserWarning: In `init`, if parameters are narrower than float32 and nothing in `tx` keeps what
        they round off, as `jaxcomp.master_weights` does.
    """
    tx = protocol.with_extra_args(tx, "per_replica or train_step")
    wrapped = replica_axes(tx)
    if wrapped == names_of(axis_name):
        return tx
    if wrapped:
        raise ValueError(
            f"per_replica got a transformation that it has wrapped over {wrapped} already, and "
            f"the axis {axis_name!r}; wrap it once, over all axes of the replicas."
        )

    axes_of: dict[Any, list[frozenset[str]]] = {}  # of the state's leaves, by parameters' types

    def init(params):
        state = first_state(tx, params)
        protocol.warn_of_rounding(params, state)
        if not is_tracked(axis_name):
            return state
        leaves, treedef = jax.tree.flatten(params)
        wide = jnp.result_type(float)  # float64 if that is enabled: dtypes depend on it
        types = treedef, *map(jax.typeof, leaves), jax.sharding.get_abstract_mesh(), wide
        if types not in axes_of:
            axes_of[types] = _axes(_settled(tx, params, state, axis_name))
        return stack(_varying(state, axes_of[types]), axis_name)

    def update(updates, state, params=None, **extra_args):
        old = unstack(state, axis_name)
        updates, state = tx.update(updates, old, params, **extra_args)
        state = _spared(state, old) if protocol.leaves_out_alone(state) else state
        return updates, stack(_emptied(state), axis_name)

    over = OverReplicas(init, names_of(axis_name))
    return optax.GradientTransformationExtraArgs(over, update)


@dataclasses.dataclass(frozen=True, eq=False)
class OverReplicas:
    """The `init` of a transformation that `per_replica` has wrapped."""

    init: Callable[[Any], Any]
    axes: tuple[str, ...]

    def __call__(self, params: Any) -> Any:
        return self.init(params)


def replica_axes(tx: optax.GradientTransformation) -> tuple[str, ...]:
    """The axes over which `per_replica` has wrapped `tx`; () if it has not."""
    return tx.init.axes if isinstance(tx.init, OverReplicas) else ()


def _settled(tx, params, state, axis_name):
    """The first state, whose leaves vary over the axes that they vary over after updates."""
    grads = to_varying(jax.tree.map(jnp.zeros_like, params), axis_name)
    update_of = functools.partial(tx.update, value=jnp.zeros([]))

    def after(state):
        new = lambda state: update_of(grads, state, params)[1]
        program, shapes = jax.make_jaxpr(new, return_shape=True)(state)
        require_sent_by_all(program.jaxpr, axis_name)
        return shapes

    try:
        return _as_after_updates(state, after)
    except (TypeError, ValueError) as error:
        explain(error, state, params)
        if not any(nodes(optax.MultiStepsState, state)):
            raise
    # MultiSteps also traces the mean inside it with its accumulator, which is zeros at first.
    varied = lambda node: node._replace(acc_grads=to_varying(node.acc_grads, axis_name))
    return _as_after_updates(_in_multi_steps(varied, state), after)


def _as_after_updates(state, after):
    """Casts leaves to varying that are equal zeros in `init` and vary after an update."""
    while True:
        new_state = after(state)
        require_same_form(new_state, state)
        new_state = jax.tree.map(vary_like, state, new_state)
        new_state = _in_multi_steps(_chosen_alone, new_state)
        if _axes(new_state) == _axes(state):
            return state
        state = new_state


def _chosen_alone(node):
    """Casts a node of `optax.MultiSteps` to varying if each replica skips by its own gradient."""
    # Its counters then differ, although JAX says of a branch's results that they do not.
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(node.skip_state)))
    return jax.tree.map(lambda x: vary_over(x, axes), node)


def _axes(state):
    # As lists: tree nodes, such as those of `per_layer`, need not compare by their contents.
    return [*map(varying_axes, jax.tree.leaves(state))]


def _varying(state, axes):
    """The state with leaves that vary over these axes, one set for each."""
    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten(map(vary_over, leaves, axes))


def _spared(state, old):
    """The state with old values where one beside methods that skip a step alone became NaN.

    A running mean of gradients, as `optax.ema` before such a method, would keep it, and its replica
    would skip all steps from then on.
    """
    skips = lambda node: hasattr(node, "skipped")

    def spared(x, old):
        if _is_multi(x):
            return x._replace(inner_opt_state=_spared(x.inner_opt_state, old.inner_opt_state))
        if skips(x) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.where(jnp.isfinite(x) | ~jnp.isfinite(old), x, old)

    return jax.tree.map(spared, state, old, is_leaf=lambda x: skips(x) or _is_multi(x))


def _emptied(state):
    """The state with zeros where `optax.MultiSteps` multiplies a sum by 0, which would keep NaN."""

    def empty(node):
        clear = lambda total: jnp.where(node.mini_step == 0, jnp.zeros_like(total), total)
        return node._replace(acc_grads=jax.tree.map(clear, node.acc_grads))

    return _in_multi_steps(empty, state)


def _in_multi_steps(function, state):
    """The state with `function(node)` in place of each outermost node of `optax.MultiSteps`."""
    return jax.tree.map(
        lambda node: function(node) if _is_multi(node) else node, state, is_leaf=_is_multi
    )


def _is_multi(node):
    return isinstance(node, optax.MultiStepsState)
