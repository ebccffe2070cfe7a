"""The protocol of states: by which names the library knows what a method keeps.

A method's state is a NamedTuple. Whatever is around the method (steps, `per_replica`, `resize`,
`compact`, reports, a training program) knows these fields of it, all of them optional:

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

A state's class with an attribute `exchanges_ahead` says that the method's `update` takes an extra
argument `ahead`; see `jaxcomp.overlapped_train_step`. One with an attribute `keeps_rounding` says
that the method loses nothing of an update which narrow parameters, as of bfloat16, round off.

A user's own method may have these fields too, and gets the same treatment. Names of parameters do
not count: a parameter `drift` is no method's drift.
"""

from typing import Any

import jax
import optax


def drifts(state: Any) -> list[Any]:
    """The drifts in a state, one for each method with one."""
    return fields(state, "drift")


def residuals(state: Any) -> list[Any]:
    """The residuals in a state, one for each method with error feedback."""
    return fields(state, "residual")


def skipped(state: Any) -> list[jax.Array]:
    """The counts of steps that this replica left out, one for each method that counts them."""
    return fields(state, "skipped")


def rounds(state: Any) -> dict[str, jax.Array]:
    """How often each part was sent; {} for a method that sends everything in every step.

    Raises:
      KeyError: If several methods count.
    """
    return optax.tree_utils.tree_get(state, "rounds", {}, filtering=_is_named)


def loss_scale(state: Any) -> jax.Array | None:
    """By what the loss is multiplied; None for a state that says nothing of it.

    Raises:
      ValueError: If several say something.
    """
    scales = fields(state, "loss_scale")
    if len(scales) > 1:
        raise ValueError(
            f"the state has {len(scales)} loss scales, and there is one loss; write "
            "jaxcomp.loss_scale once, around the whole chain."
        )
    return scales[0] if scales else None


def leaves_out_alone(state: Any) -> bool:
    """Whether all methods in a state deal by themselves with gradients that are not finite."""
    methods = filter(has_feedback, jax.tree.leaves(state, is_leaf=has_feedback))
    return bool(skipped(state)) and all("skipped" in method._fields for method in methods)


def exchanges_ahead(state: Any) -> bool:
    """Whether a method in a state may exchange before this step's gradient is known."""
    says = lambda node: hasattr(node, "exchanges_ahead")
    return any(map(says, jax.tree.leaves(state, is_leaf=says)))


def keeps_rounding(state: Any) -> bool:
    """Whether a method in a state keeps what narrow parameters round off."""
    says = lambda node: hasattr(node, "keeps_rounding")
    return any(map(says, jax.tree.leaves(state, is_leaf=says)))


def exchanging(state: Any) -> str | None:
    """The name of a field by which a state is that of a method that exchanges, if it has one."""
    names = ("owner_residual", "drift", "loss_scale")
    return next((name for name in names if fields(state, name)), None)


def has_feedback(x: Any) -> bool:
    """Whether a node is the state of a method with error feedback: a NamedTuple with its fields.

    Not a leaf whose path has such a name: attributes of parameters are in paths, too.
    """
    names = getattr(x, "_fields", ()) if isinstance(x, tuple) else ()
    return "residual" in names or "owner_residual" in names


def is_owned(key_path: Any) -> bool:
    """Whether a leaf, by its path, is of what owners hold."""
    return is_field(key_path, "owner_residual") or is_field(key_path, "owned")


def is_field(key_path: Any, name: str) -> bool:
    """Whether JAX's path of a leaf goes through a field of this name, as `residual`."""
    # Keys of dicts have no attribute `name`.
    return any(getattr(key, "name", None) == name for key in key_path)


def fields(state: Any, name: str) -> list[Any]:
    """The values of all fields of this name, of the NamedTuples in a state."""
    return [value for _, value in optax.tree_utils.tree_get_all_with_path(state, name, _is_named)]


def _is_named(path: Any, value: Any) -> bool:
    del value
    return bool(path) and isinstance(path[-1], optax.tree_utils.NamedTupleKey)
