"""States of replicas: a row for each replica where they differ, and parameters plus drift."""

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from jaxcomp.replicas.elementwise import innermost
from jaxcomp.replicas.protocol import drifts as drifts_of
from jaxcomp.replicas.protocol import (
    has_feedback,
    is_masked,
    leaves_out_alone,
    require_no_state,
    require_two_bytes,
    warn_of_rounding,
    with_extra_args,
)
from jaxcomp.replicas.types import (
    is_message,
    is_tracked,
    names_of,
    to_varying,
    varies_over,
    vary_like,
    vary_over,
    varying_axes,
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
    return add_drifts(params, drifts_of(state), axis_name)


def add_drifts(params, drifts, axis_name):
    """`params`, cast to varying, plus the rows of each of `drifts`; see `local_params`."""
    require_no_state(params)

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
    except ValueError:
        own = jax.tree.leaves(drift, is_leaf=is_masked)
        if len(own) != jax.tree.structure(params).num_leaves:
            raise
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
    tx = with_extra_args(tx, "per_replica or train_step")
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
        state = _first_state(tx, params)
        warn_of_rounding(params, state)
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
        state = _spared(state, old) if leaves_out_alone(state) else state
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


def _first_state(tx, params):
    """`tx.init(params)`; a ValueError if no run can have this state, or `params` is a state."""
    require_no_state(params)
    require_two_bytes(params)
    if not isinstance(params, optax.LookaheadParams):
        state = tx.init(params)
        if not any(_nodes(optax.LookaheadState, state)):
            _require_last(state)
            _require_not_averaged(state)
            return state
    raise ValueError(
        "optax.lookahead has two sets of parameters, and replicas have one, the consensus; leave "
        "it out. jaxcomp.local_steps moves slow parameters after every few fast steps."
    )


def _require_last(state):
    """A ValueError if something stands behind a drift in a chain, or an `optax.named_chain`."""
    named = [[*node.values()] for node in _nodes(OrderedDict, state, exactly=True)]
    for chain in (*named, *_nodes(tuple, state, exactly=True)):
        # What is masked has leaves of its own: groups of leaves, each with its method, in a chain.
        whole = [k for k, each in enumerate(chain) if not isinstance(each, optax.MaskedState)]
        if whole and drifts_of(chain[: whole[-1]]):
            raise ValueError(
                "something stands behind a method whose replicas drift, in an optax.chain: it "
                "would change the consensus, and not what each replica has gone away from it. Put "
                "it into the inner optimizer, jaxcomp.cocktail_sgd(optax.chain(...), axis_name), "
                "or leave it out: such methods have the learning rate and the weight decay of "
                "their own. What changes gradients, such as clipping, stands before the method."
            )
        for each in chain:
            _require_last(each)


def _require_not_averaged(state):
    """A ValueError if a drift is inside `optax.contrib.schedule_free`."""
    averages = _nodes(optax.contrib.ScheduleFreeState, state)
    if any(drifts_of(average.base_optimizer_state) for average in averages):
        raise ValueError(
            "optax.contrib.schedule_free is around a method whose replicas drift: it would average "
            "the consensus, and not what each replica has gone away from it. Write "
            "optax.chain(jaxcomp.compressed_mean(...), optax.contrib.schedule_free_adamw(...)), "
            "or leave it out."
        )


def _explain(error, state, params):
    """Raises a ValueError that says what to write, if an update's error is a known one."""
    if "unexpected keyword argument" in str(error):
        raise ValueError(
            f"{error}. Steps give all optimizers the loss and the axis, and this one, like "
            "optax.contrib.sam, takes no argument that it does not know; write "
            "optax.GradientTransformation(sam.init, lambda *args: sam.update(*args)) for it."
        ) from error
    if "missing" in str(error) and "keyword-only argument" in str(error):
        raise ValueError(
            f"{error}. Of further arguments init passes `value` alone: give the others a default, "
            "and pass them by step(..., extra_args={...}). A line search of optax takes the loss "
            "of all replicas at other parameters, which no step has: write optax.lbfgs(0.1, "
            "linesearch=None), or leave optax.scale_by_backtracking_linesearch out."
        ) from error
    if any(_nodes(optax.contrib.ReduceLROnPlateauState, state)) and "in_cooldown" in str(error):
        raise ValueError(
            "optax.contrib.reduce_on_plateau is inside a method whose replicas train alone: each "
            "has an optimizer's state of its own, and JAX refuses its branches there. Write a "
            "schedule as the learning rate, or in jaxcomp.local_steps put it behind the outer "
            "optimizer: outer=optax.chain(optax.sgd(0.7, momentum=0.9, nesterov=True), "
            "optax.contrib.reduce_on_plateau())."
        ) from error
    shards = frozenset().union(*map(varying_axes, jax.tree.leaves(params)))
    if shards and "must have equal output types" in str(error):
        raise ValueError(
            f"the optimizer has branches that treat shards over {tuple(sorted(shards))} as whole "
            "parameters, as optax.contrib.galore does; write one that works entry by entry, as "
            "optax.adamw, or a mesh whose devices hold all parameters."
        ) from error
    for kind, name in _CHOOSING.items():
        inside = [node.inner_state for node in _nodes(kind, state)]
        if any(map(has_feedback, jax.tree.leaves(inside, is_leaf=has_feedback))):
            raise ValueError(
                f"optax.{name} is around a method that exchanges, which it cannot leave out of a "
                "step: what it passes on instead is each replica's own. Leave it out, since "
                "jaxcomp.train_step skips what is not finite; or write "
                f"optax.chain(jaxcomp.compressed_mean(...), optax.{name}(optax.adamw(...), ...))."
            ) from error


# What takes a step of another transformation or leaves it, by the state that it keeps.
_CHOOSING = {
    optax.ApplyIfFiniteState: "apply_if_finite",
    optax.transforms.ConditionallyMaskState: "transforms.conditionally_mask",
    optax.transforms.ConditionallyTransformState: "transforms.conditionally_transform",
}


def _nodes(kind, state, exactly=False):
    is_one = lambda node: type(node) is kind if exactly else isinstance(node, kind)
    return filter(is_one, jax.tree.leaves(state, is_leaf=is_one))


def _settled(tx, params, state, axis_name):
    """The first state, whose leaves vary over the axes that they vary over after updates."""
    grads = to_varying(jax.tree.map(jnp.zeros_like, params), axis_name)
    update_of = functools.partial(tx.update, value=jnp.zeros([]))

    def after(state):
        new = lambda state: update_of(grads, state, params)[1]
        program, shapes = jax.make_jaxpr(new, return_shape=True)(state)
        _require_sent_by_all(program.jaxpr, axis_name)
        return shapes

    try:
        return _as_after_updates(state, after)
    except (TypeError, ValueError) as error:
        _explain(error, state, params)
        if not any(_nodes(optax.MultiStepsState, state)):
            raise
    # MultiSteps also traces the mean inside it with its accumulator, which is zeros at first.
    varied = lambda node: node._replace(acc_grads=to_varying(node.acc_grads, axis_name))
    return _as_after_updates(_in_multi_steps(varied, state), after)


def _require_sent_by_all(jaxpr, axis_name):
    """Raises a ValueError for a message where some replicas may go and others not."""
    for eqn in jaxpr.eqns:
        parts = [*core.jaxprs_in_params(eqn.params)]
        deciding = {"cond": eqn.invars[:1], "while": parts[0].outvars if parts else ()}
        chosen = deciding.get(eqn.primitive.name, ())
        is_chosen_alone = any(varies_over(x.aval, axis_name) for x in chosen)
        if is_chosen_alone and any(map(is_message, innermost(eqn))):
            raise ValueError(
                "the transformation exchanges in a branch that each replica takes or leaves by its "
                "own gradient: the others would wait for it forever. Leave should_skip_update_fn "
                "out of optax.MultiSteps, since jaxcomp.train_step skips what is not finite; or "
                "write optax.chain(jaxcomp.compressed_mean(...), optax.MultiSteps(...)), which "
                "decides by the mean."
            )
        for part in parts:
            _require_sent_by_all(part, axis_name)


def _as_after_updates(state, after):
    """Casts leaves to varying that are equal zeros in `init` and vary after an update."""
    while True:
        new_state = jax.tree.map(vary_like, state, after(state))
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
