"""Fields of optimizer states by their names, which the user's parameters may have as well."""

from typing import Any

import optax


def fields(state: Any, name: str) -> list[Any]:
    """The values of all fields of this name, of the NamedTuples in a state.

    Keys of dicts are names of parameters: a parameter `drift` is no method's drift.
    """
    return [value for _, value in optax.tree_utils.tree_get_all_with_path(state, name, _is_named)]


def field(state: Any, name: str) -> Any:
    """The value of the only such field; None if there is none. A KeyError if there are several."""
    return optax.tree_utils.tree_get(state, name, filtering=_is_named)


def is_field(key_path, name: str) -> bool:
    """Whether JAX's path of a leaf goes through a field of this name, as `residual`."""
    # Keys of dicts have no attribute `name`.
    return any(getattr(key, "name", None) == name for key in key_path)


def has_feedback(x: Any) -> bool:
    """Whether a node is the state of a method with error feedback: a NamedTuple with its fields.

    Not a leaf whose path has such a name: attributes of parameters are in paths, too.
    """
    names = getattr(x, "_fields", ()) if isinstance(x, tuple) else ()
    return "residual" in names or "owner_residual" in names


def _is_named(path, value) -> bool:
    del value
    return bool(path) and isinstance(path[-1], optax.tree_utils.NamedTupleKey)
