"""What may stand around a method, inside it and behind it: errors that say what to write."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from jaxcomp._checks import instead_of
from jaxcomp.replicas.elementwise import innermost
from jaxcomp.replicas.protocol import (
    drifts,
    has_feedback,
    has_method,
    require_no_state,
    require_two_bytes,
)
from jaxcomp.replicas.types import is_message, varies_over, varying_axes


def first_state(tx, params):
    """`tx.init(params)`; a ValueError if no run can have this state, or `params` is a state."""
    require_no_state(params)
    require_two_bytes(params)
    if not jax.tree.leaves(params):
        raise ValueError(
            f"init got a {type(params).__name__} without arrays where the parameters belong. "
            "optax.tree_utils.tree_map_params calls init so: write jaxcomp.state_specs or "
            "jaxcomp.state_shapes for where a state lies, and optax.tree_utils.tree_get and "
            "tree_set for its fields."
        )
    if not isinstance(params, optax.LookaheadParams):
        state = tx.init(params)
        if not any(nodes(optax.LookaheadState, state)):
            _require_last(state)
            _require_outside(state)
            _require_not_split(state, params)
            return state
    raise ValueError(
        "optax.lookahead has two sets of parameters, and replicas have one, the consensus; leave "
        "it out. jaxcomp.local_steps moves slow parameters after every few fast steps."
    )


def _require_last(state):
    """A ValueError if something stands behind a drift in a chain, or an `optax.named_chain`."""
    named = [[*node.values()] for node in nodes(OrderedDict, state, exactly=True)]
    for chain in (*named, *nodes(tuple, state, exactly=True)):
        # What is masked has leaves of its own if it is a method: groups of leaves, in a chain.
        is_group = lambda each: isinstance(each, optax.MaskedState) and has_method(each)
        whole = [k for k, each in enumerate(chain) if not is_group(each)]
        if whole and drifts(chain[: whole[-1]]):
            raise ValueError(
                "something stands behind a method whose replicas drift, in an optax.chain: it "
                "would change the consensus, and not what each replica has gone away from it. Put "
                "it into the inner optimizer, jaxcomp.cocktail_sgd(optax.chain(...), axis_name), "
                "or leave it out: such methods have the learning rate and the weight decay of "
                "their own. What changes gradients, such as clipping, stands before the method. "
                "Groups of leaves, such as frozen ones, are those of optax.partition."
            )
        for each in chain:
            _require_last(each)


# What may not be around a method: its state, what is not inside of it, and why.
_AROUND = (
    (
        optax.contrib.ScheduleFreeState,
        drifts,
        "optax.contrib.schedule_free is around a method whose replicas drift: it would average "
        "the consensus, and not what each replica has gone away from it. Write "
        "optax.chain(jaxcomp.compressed_mean(...), optax.contrib.schedule_free_adamw(...)), "
        "or leave it out.",
    ),
    (
        optax.contrib.MechanicState,
        has_method,
        "optax.contrib.mechanize is around a method that exchanges: it would find its factor "
        "by each replica's own gradient, and each replica another. Write "
        "optax.chain(jaxcomp.compressed_mean(...), optax.contrib.mechanize(optax.adamw(...))).",
    ),
)


def _require_outside(state):
    """A ValueError if a method is inside of what `_AROUND` lists."""
    for kind, is_inside, words in _AROUND:
        if any(is_inside(node.base_optimizer_state) for node in nodes(kind, state)):
            raise ValueError(words)


def _require_not_split(state, params):
    """A ValueError if `optax.contrib.split_real_and_imaginary` splits what drifts."""
    halves = nodes(optax.contrib.SplitRealAndImaginaryState, state)
    kinds = [x.dtype for x in jax.tree.leaves(params) if jnp.iscomplexobj(x)]
    if kinds and any(drifts(node.inner_state) for node in halves):
        raise ValueError(
            "optax.contrib.split_real_and_imaginary is around a method whose replicas drift, and "
            "gradients are taken where their parameters are, which are not split. For each complex "
            f"parameter, {instead_of(kinds[0])}"
        )


def require_same_form(new, old):
    """Raises a ValueError for an update that returns a state with other leaves than it got."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        has, had = (
            {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
            for tree in (new, old)
        )
        raise ValueError(
            f"the update returns a state with the leaves {sorted(has - had)[:2]}, which init does "
            f"not make, and without {sorted(had - has)[:2]}, which it does; a step needs the same "
            "ones before and after. In place of optax.monitor, whose state is empty at first, "
            "write optax.snapshot."
        )


def require_sent_by_all(jaxpr, axis_name):
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
            require_sent_by_all(part, axis_name)


def explain(error, state, params):
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
    if "obj_fn must be provided" in str(error):
        raise ValueError(
            f"{error} optax.contrib.sophia and optax.contrib.hutchinson estimate a Hessian from "
            "the loss as a function, and of functions a step passes none to an update; write "
            "another optimizer, such as optax.adamw."
        ) from error
    if any(nodes(optax.contrib.ReduceLROnPlateauState, state)) and "in_cooldown" in str(error):
        raise ValueError(
            "optax.contrib.reduce_on_plateau is inside a method whose replicas train alone: each "
            "has an optimizer's state of its own, and JAX refuses its branches there. Write a "
            "schedule as the learning rate, or in jaxcomp.local_steps put it behind the outer "
            "optimizer: outer=optax.chain(optax.sgd(0.7, momentum=0.9, nesterov=True), "
            "optax.contrib.reduce_on_plateau())."
        ) from error
    shards = frozenset().union(*map(varying_axes, jax.tree.leaves(params)))
    has_products = any(nodes(optax.ScaleByLBFGSState, state))
    if shards and (has_products or "must have equal output types" in str(error)):
        raise ValueError(
            f"the optimizer treats shards over {tuple(sorted(shards))} as whole parameters, as "
            "optax.contrib.galore and optax.lbfgs do, or optax.clip_by_global_norm inside "
            "optax.MultiSteps; write jaxcomp.clip_by_global_norm for it, and an optimizer that "
            "works entry by entry, as optax.adamw, or a mesh whose devices hold all parameters."
        ) from error
    for kind, name in _CHOOSING.items():
        inside = [node.inner_state for node in nodes(kind, state)]
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


def nodes(kind, state, exactly=False):
    """The outermost nodes of this kind in a state; `exactly`: of no derived kind."""
    is_one = lambda node: type(node) is kind if exactly else isinstance(node, kind)
    return filter(is_one, jax.tree.leaves(state, is_leaf=is_one))
