"""Checks of arguments: an error says what was got, what is needed, and what to write instead."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import optax


def require(holds: bool, call: str, needs: str, write: str, **got: Any) -> None:
    """Raises a ValueError for arguments of a call that are out of their range.

    Args:
      holds: Whether they are in it.
      call: The function that got them.
      needs: The range, in words.
      write: What to write instead.
      **got: The arguments.
    """
    if not holds:
        values = ", ".join(f"{argument}={value!r}" for argument, value in got.items())
        raise ValueError(f"{call} got {values}; needs {needs}; write {write}.")


def require_choice(call: str, argument: str, got: Any, *choices: str) -> None:
    """Raises a ValueError for an argument that is not among the two or more choices."""
    if got not in choices:
        *most, last = map(repr, choices)
        raise ValueError(f"{call} got {argument}={got!r}; write {', '.join(most)} or {last}.")


def require_integer(
    call: str, argument: str, got: Any, write: str, *, most: int = 0, none: str = ""
) -> None:
    """Raises a ValueError unless the argument is an integer from 1 on, or from 1 to `most`.

    It may be None, too, if `none` says what that stands for.
    """
    if none and got is None:
        return
    needs = f"an integer from 1 to {most}" if most else "a positive integer"
    needs += f", or None for {none}" if none else ""
    holds = is_count(got) and not (most and got > most)
    require(holds, call, needs, write, **{argument: got})


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer, of Python or of NumPy, of at least `least`."""
    return isinstance(value, numbers.Integral) and int(value) >= least


def is_power_of_two(value: Any) -> bool:
    """Whether a value is one of the integers 1, 2, 4, 8 and so on."""
    return is_count(value) and not value & (value - 1)


def require_static(name: str, first: str = "learning_rate", /, **got: Any) -> None:
    """Raises a ValueError for arguments that are arrays but must be known at construction.

    `first` is the method's first argument, with the learning rate, as the error says to write it.
    """
    arrays = [argument for argument, value in got.items() if isinstance(value, jax.Array)]
    if arrays:
        raise ValueError(
            f"{name} got arrays for {', '.join(arrays)}; needs Python numbers, and only the "
            "learning rate may be an array. optax.inject_hyperparams makes arrays of all: write "
            f"optax.inject_hyperparams(lambda learning_rate: jaxcomp.{name}({first}, ...))"
            "(learning_rate=1e-3)."
        )


def schedule_of(name: str, learning_rate: Any) -> optax.Schedule:
    """The learning rate as a schedule; a ValueError for text, NaN and infinities."""
    if callable(learning_rate):
        return learning_rate
    finite = is_finite(learning_rate)
    require(finite, name, "a finite number or a schedule", "1e-3", learning_rate=learning_rate)
    return optax.constant_schedule(learning_rate)


def require_decay(name: str, weight_decay: Any) -> None:
    """Raises a ValueError for a weight decay that is text, NaN or infinite."""
    wanted, write = "a finite number", "weight_decay=0.1"
    require(is_finite(weight_decay), name, wanted, write, weight_decay=weight_decay)


def is_finite(value: Any) -> bool:
    """Whether a value is a finite number, or an array, whose entries are not known yet."""
    if isinstance(value, numbers.Real):
        return math.isfinite(value)
    return not isinstance(value, str | None)


def require_kept(*args: Any) -> None:
    """Raises a ValueError for arrays that a step has donated: on several CPU devices XLA crashes.

    Args:
      *args: Trees, first the parameters, then the state.
    """
    if not any(x.is_deleted() for x in filter(is_array, jax.tree.leaves(args))):
        return
    for (place, *path), x in jax.tree_util.tree_leaves_with_path(args):
        if is_array(x) and x.is_deleted():
            # `shards` take the place of parameters.
            what = ("the parameters", "the state", "the arguments")[min(place.idx, 2)]
            raise ValueError(
                f"{what}: there is an array of shape {x.shape} at "
                f"{jax.tree_util.keystr(path)!r} that is gone, since an earlier step has taken its "
                "memory. Go on with what that step returned: write params, state, metrics = "
                "step(params, state, batch). To start again from the same parameters, copy them "
                "before the first step: jax.tree.map(jnp.copy, params)."
            )


def instead_of(dtype: Any) -> str:
    """What to write for a parameter of a dtype that is not floating: the end of an error."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (
            "hold its real and its imaginary part as two parameters, and write "
            "jax.lax.complex(real, imaginary) in the loss."
        )
    return "keep such leaves out of the parameters, in a closure of the loss."


def is_array(x: Any) -> bool:
    """Whether a leaf is an array with memory: not a shape, and not traced."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
