"""A check for wrappers: their argument is an optax transformation."""

from typing import Any

import optax


def with_extra_args(tx: Any, of: str) -> optax.GradientTransformationExtraArgs:
    """`tx` with extra arguments; a ValueError that names `of` if it is no transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(
            f"{of} got {tx!r:.60} where an optax transformation belongs, like optax.adamw(1e-3); "
            "are two arguments swapped?"
        )
    return optax.with_extra_args_support(tx)
