"""The protocol of states: a type, and the fields that tell the library what a method keeps.

The code around a method (steps, `per_replica`, `resize`, reports, a training program) reads these
fields of a `MethodState`, all of them optional:

- `drift`: like the parameters, float32 or wider, this replica's own. Its parameters minus the
  consensus. Gradients are taken at `params + drift`; `resize` keeps the mean.
- `residual`: like the parameters, float32 or wider, this replica's own; None for leaves that lose
  nothing. What error feedback has not sent yet. `compact` keeps it in fewer bits.
- `owner_residual`: `f32[numel / R]` for each bucket, or a piece of each parameter, for the chunk
  that this replica owns; None if there are no owners. What the owner has not passed on yet.
- `owned`: a tree of pieces of parameters, for example an optimizer's moments. `resize`
  redistributes `owner_residual` and `owned` over the new owners.
- `skipped`: i32[], this replica's own. How many steps this replica skipped on its own, because its
  gradient was not finite. With this field, the step is never skipped as a whole.
- `rounds`: {part: i32[]}, equal on all replicas. How often each part was sent; "all" counts the
  steps that send anything. Part names are those of the messages' scopes `jaxcomp.PART`.
- `loss_scale`: f32[], equal on all replicas. Steps multiply the loss by it, and divide the loss
  that they report; the method divides the gradients.

Most states also have `count`, i32[], the steps so far. As a field of a NamedTuple it hides
`tuple.count`: mypy needs a `type: ignore` there.

What a method does besides is said by where its state is registered: `ExchangesAhead`,
`KeepsRounding`, `EvaluatesConsensus`, which are kinds of `MethodState`.

Only registered classes count: a field `drift` in another library's state, or a parameter of that
name, is not a drift.
"""

import abc
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyEntry

Path = tuple[KeyEntry, ...]


class MethodState(abc.ABC):  # noqa: B024, only a base to register with
    """The type of states whose fields the library knows by the protocol above.

    A NamedTuple cannot have another base class, so a method's state is registered instead::

        @jaxcomp.MethodState.register
        class MyState(NamedTuple):
            drift: Any

    Any pytree class whose children have names may be registered, for example a dataclass.
    """


class ExchangesAhead(MethodState):
    """States of methods whose `update` takes `ahead`; see `jaxcomp.overlapped_train_step`."""


class KeepsRounding(MethodState):
    """States that keep what narrow parameters, such as bfloat16, round off an update."""


class EvaluatesConsensus(MethodState):
    """States whose drift is not yet part of the model: an outer step decides what becomes of it.

    Evaluation during a run adds other drifts, see `jaxcomp.eval_step`.
    """


FIELDS = frozenset(
    {"drift", "residual", "owner_residual", "owned", "skipped", "rounds", "loss_scale"}
)


def drifts(state: Any) -> list[Any]:
    """The drifts in a state, one for each method with one."""
    return [drift for drift in fields(state, "drift").values() if not is_masked(drift)]


def evaluated_drifts(state: Any) -> list[Any]:
    """The drifts that evaluation during a run adds to the consensus."""
    return [
        child
        for method in _methods(state).values()
        if not isinstance(method, EvaluatesConsensus)
        for key, child in _children(method)
        if _name(key) == "drift" and not is_masked(child)
    ]


def residuals(state: Any) -> list[Any]:
    """The residuals in a state, one for each method with error feedback."""
    return list(fields(state, "residual").values())


def skipped(state: Any) -> list[jax.Array]:
    """The counts of steps that this replica skipped, one for each method that counts them."""
    return list(fields(state, "skipped").values())


def rounds(state: Any) -> dict[str, jax.Array]:
    """How often each part was sent; {} for a method that sends everything in every step.

    Raises:
      ValueError: If several methods count what they send.
    """
    counts = list(fields(state, "rounds").values())
    if len(counts) > 1:
        raise ValueError(
            f"the state has {len(counts)} methods that count what they send, and a report sums "
            "one; write one of them in the chain."
        )
    return counts[0] if counts else {}


def loss_scale(state: Any) -> jax.Array | None:
    """The factor of the loss; None for a state without a loss scale.

    Raises:
      ValueError: If there are several loss scales.
    """
    scales = list(fields(state, "loss_scale").values())
    if len(scales) > 1:
        raise ValueError(
            f"the state has {len(scales)} loss scales, and there is one loss; write "
            "jaxcomp.loss_scale once, around the whole chain."
        )
    return scales[0] if scales else None


def leaves_out_alone(state: Any) -> bool:
    """Whether all methods in a state handle gradients that are not finite themselves."""
    return bool(skipped(state)) and all(
        hasattr(method, "skipped") for method in _methods(state).values() if has_feedback(method)
    )


def exchanges_ahead(state: Any) -> bool:
    """Whether a method in a state may exchange before this step's gradient is known."""
    return any(isinstance(method, ExchangesAhead) for method in _methods(state).values())


def keeps_rounding(state: Any) -> bool:
    """Whether a method in a state keeps what narrow parameters round off."""
    return any(isinstance(method, KeepsRounding) for method in _methods(state).values())


def exchanging(state: Any) -> str | None:
    """The name of a state field that only methods with an exchange have; None without one."""
    names = ("owner_residual", "drift", "loss_scale")
    return next((name for name in names if fields(state, name)), None)


def has_feedback(x: Any) -> bool:
    """Whether a node is the state of a method with error feedback."""
    names = ("residual", "owner_residual")
    return isinstance(x, MethodState) and any(hasattr(x, name) for name in names)


def has_method(state: Any) -> bool:
    """Whether a state holds that of a method."""
    return bool(_methods(state))


def fields(state: Any, *names: str) -> dict[Path, Any]:
    """The values of all fields with these names, of the methods in a state, by path."""
    return {
        (*path, *key): child
        for path, method in _methods(state).items()
        for key, child in _children(method)
        if _name(key) in names
    }


def field_of(path: Path, fields: dict[Path, Any]) -> str | None:
    """The name of the field, among those given, that holds the leaf at this path, if any."""
    heads = (path[:depth] for depth in range(1, len(path) + 1))
    return next((_name(head) for head in heads if head in fields), None)


def require_registered(state: Any) -> None:
    """Raises a ValueError for an unregistered state whose fields have names of the protocol."""
    names = FIELDS.intersection(getattr(state, "_fields", ()))
    if names and not isinstance(state, MethodState):
        raise ValueError(
            f"the state {type(state).__name__} has the fields {sorted(names)}, which mean nothing "
            "unless its class is registered; write @jaxcomp.MethodState.register above the class."
        )


def require_no_state(params: Any) -> None:
    """Raises a ValueError if an argument that should be parameters contains a method's state."""
    if found := _methods(params):
        kind = type(next(iter(found.values()))).__name__
        raise ValueError(
            f"got a {kind} where the parameters belong; write step(params, state, batch), "
            "init(params) and local_params(params, state, axis_name)."
        )


def require_two_bytes(params: Any) -> None:
    """Raises a ValueError for parameters of 8 bits, such as float8, which JAX promotes to none."""
    for path, x in jax.tree.leaves_with_path(params):
        if is_narrow(x) and x.dtype.itemsize < 2:
            raise ValueError(
                f"the parameter {jax.tree_util.keystr(path)!r} has dtype {x.dtype.name}, which JAX "
                "mixes with no other; keep it in bfloat16 and write x.astype(jnp."
                f"{x.dtype.name}) in the loss. If it is frozen, keep it in a closure of the loss."
            )


def with_extra_args(tx: Any, wrapper: str) -> optax.GradientTransformationExtraArgs:
    """`tx` with extra arguments; a ValueError that names `wrapper` if it is no transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(
            f"{wrapper} got {tx!r:.60} where an optax transformation belongs, like "
            "optax.adamw(1e-3); are two arguments swapped?"
        )
    return optax.with_extra_args_support(tx)


def widened(x: jax.Array) -> jax.Array:
    """An array in float32; unchanged if it is wider or not floating."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if is_narrow(x) else x


def is_narrow(x: Any) -> bool:
    """Whether an array is floating and narrower than float32."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def warn_of_rounding(params: Any, state: Any) -> None:
    """Warns, once in a program, if narrow parameters would lose small updates."""
    narrow = {x.dtype.name: x.dtype for x in jax.tree.leaves(params) if is_narrow(x)}
    if not narrow or keeps_rounding(state):
        return
    name, dtype = next(iter(narrow.items()))
    share = int(4 / jnp.finfo(dtype).eps)
    warnings.warn(
        f"parameters are {name}, and nothing keeps what is rounded off: an update below 1/{share} "
        "of a parameter leaves it as it is, and training stalls. Write "
        "jaxcomp.master_weights(optax.chain(...)) around the whole chain.",
        stacklevel=2,
    )


def is_masked(x: Any) -> bool:
    """Whether a node stands for leaves hidden from a method, as in `optax.partition`."""
    return isinstance(x, optax.MaskedNode)


def _methods(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """The states of methods in a tree, by path, including states inside other states."""
    found = {}
    is_method = lambda node: isinstance(node, MethodState)
    for key, node in jax.tree.leaves_with_path(tree, is_leaf=is_method):
        if is_method(node):
            here = (*path, *key)
            found[here] = node
            for name, child in _children(node):
                found |= _methods(child, (*here, *name))
    return found


def _children(node: Any) -> list[tuple[Path, Any]]:
    return jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node)


def _name(key: Path) -> str | None:
    return getattr(key[-1], "name", None)
