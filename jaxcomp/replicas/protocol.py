"""The protocol of states: a type, and by which fields the library knows what a method keeps.

Whatever is around a method (steps, `per_replica`, `resize`, reports, a training program) knows
these fields of a `MethodState`, all of them optional:

- `drift`: like the parameters, float32 or wider, this replica's own. Its parameters minus the
  consensus. Steps take gradients at their sum; `resize` keeps the mean.
- `residual`: like the parameters, float32 or wider, this replica's own; None for leaves that lose
  nothing. What error feedback has not sent yet. `compact` keeps it in fewer bits.
- `owner_residual`: of each bucket `f32[numel / R]`, or of each parameter a piece, of one replica's
  own chunk; None for those without owners. What the owner has not passed on yet.
- `owned`: a tree of pieces of parameters, for example an optimizer's moments. `resize`
  lays out `owner_residual` and `owned` anew.
- `skipped`: i32[], this replica's own. How many steps it left out by itself, since its gradient
  was not finite. A state with it never makes the whole step be left out.
- `rounds`: {part: i32[]}, equal on all replicas. How often each part was sent, "all" for steps
  that send anything; parts are named as the scopes `jaxcomp.PART` of the messages.
- `loss_scale`: f32[], equal on all replicas. Steps multiply the loss by it, and divide what they
  report; the method divides the gradients.

A class with an attribute `exchanges_ahead` says that the method's `update` takes an extra
argument `ahead`; see `jaxcomp.overlapped_train_step`. One with an attribute `keeps_rounding` says
that the method loses nothing of an update which narrow parameters, as of bfloat16, round off.

Names alone do not count: a field `drift` of another library's state is no drift, nor is a
parameter of that name.
"""

import abc
from typing import Any

import jax
from jax.tree_util import KeyEntry

Path = tuple[KeyEntry, ...]


class MethodState(abc.ABC):  # noqa: B024, what counts is who is registered
    """The type of states whose fields the library knows by the protocol above.

    A NamedTuple has no other base class, so that the state of a method is registered::

        @jaxcomp.MethodState.register
        class MyState(NamedTuple):
            drift: Any

    Any pytree class may be registered whose children have names, as dataclasses too.
    """


FIELDS = frozenset(
    {"drift", "residual", "owner_residual", "owned", "skipped", "rounds", "loss_scale"}
)


def drifts(state: Any) -> list[Any]:
    """The drifts in a state, one for each method with one."""
    return list(fields(state, "drift").values())


def residuals(state: Any) -> list[Any]:
    """The residuals in a state, one for each method with error feedback."""
    return list(fields(state, "residual").values())


def skipped(state: Any) -> list[jax.Array]:
    """The counts of steps that this replica left out, one for each method that counts them."""
    return list(fields(state, "skipped").values())


def rounds(state: Any) -> dict[str, jax.Array]:
    """How often each part was sent; {} for a method that sends everything in every step.

    Raises:
      ValueError: If several methods count.
    """
    counts = list(fields(state, "rounds").values())
    if len(counts) > 1:
        raise ValueError(
            f"the state has {len(counts)} methods that count what they send, and a report sums "
            "one; write one of them in the chain."
        )
    return counts[0] if counts else {}


def loss_scale(state: Any) -> jax.Array | None:
    """By what the loss is multiplied; None for a state that says nothing of it.

    Raises:
      ValueError: If several say something.
    """
    scales = list(fields(state, "loss_scale").values())
    if len(scales) > 1:
        raise ValueError(
            f"the state has {len(scales)} loss scales, and there is one loss; write "
            "jaxcomp.loss_scale once, around the whole chain."
        )
    return scales[0] if scales else None


def leaves_out_alone(state: Any) -> bool:
    """Whether all methods in a state deal by themselves with gradients that are not finite."""
    return bool(skipped(state)) and all(
        hasattr(method, "skipped") for method in _methods(state).values() if has_feedback(method)
    )


def exchanges_ahead(state: Any) -> bool:
    """Whether a method in a state may exchange before this step's gradient is known."""
    return any(hasattr(method, "exchanges_ahead") for method in _methods(state).values())


def keeps_rounding(state: Any) -> bool:
    """Whether a method in a state keeps what narrow parameters round off."""
    return any(hasattr(method, "keeps_rounding") for method in _methods(state).values())


def exchanging(state: Any) -> str | None:
    """The name of a field by which a state is that of a method that exchanges, if it has one."""
    names = ("owner_residual", "drift", "loss_scale")
    return next((name for name in names if fields(state, name)), None)


def has_feedback(x: Any) -> bool:
    """Whether a node is the state of a method with error feedback."""
    names = ("residual", "owner_residual")
    return isinstance(x, MethodState) and any(hasattr(x, name) for name in names)


def fields(state: Any, *names: str) -> dict[Path, Any]:
    """The values of all fields of these names, of the methods in a state, by their paths."""
    return {
        (*path, *key): child
        for path, method in _methods(state).items()
        for key, child in _children(method)
        if _name(key) in names
    }


def field_of(path: Path, fields: dict[Path, Any]) -> str | None:
    """The name of that of some fields of a state which a leaf, by its path, belongs to, if any."""
    heads = (path[:depth] for depth in range(1, len(path) + 1))
    return next((_name(head) for head in heads if head in fields), None)


def require_registered(state: Any) -> None:
    """Raises a ValueError for a state whose fields have names of the protocol, by name alone."""
    names = FIELDS.intersection(getattr(state, "_fields", ()))
    if names and not isinstance(state, MethodState):
        raise ValueError(
            f"the state {type(state).__name__} has the fields {sorted(names)}, which mean nothing "
            "unless its class is registered; write @jaxcomp.MethodState.register above the class."
        )


def require_no_state(params: Any) -> None:
    """Raises a ValueError if what should be parameters has the state of a method in it."""
    if found := _methods(params):
        kind = type(next(iter(found.values()))).__name__
        raise ValueError(
            f"got a {kind} where the parameters belong; write step(params, state, batch), "
            "init(params) and local_params(params, state, axis_name)."
        )


def _methods(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """The states of methods in a tree, by their paths: those in others, as inner ones, too."""
    found = {}
    is_method = lambda node: isinstance(node, MethodState)
    for key, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_method):
        if is_method(node):
            here = (*path, *key)
            found[here] = node
            for name, child in _children(node):
                found |= _methods(child, (*here, *name))
    return found


def _children(node: Any) -> list[tuple[Path, Any]]:
    return jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)


def _name(key: Path) -> str | None:
    return getattr(key[-1], "name", None)
