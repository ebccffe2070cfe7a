"""What goes around another transformation gets one, and no argument of another place."""

from typing import Any

import optax


def with_extra_args(tx: Any, of: str) -> optax.GradientTransformationExtraArgs:
    """A transformation that takes extra arguments; a ValueError, of `of`, for what is none."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ValueError(
            f"{of} got {tx!r:.60} where an optax transformation belongs, as optax.adamw(1e-3); "
            "are two arguments swapped?"
        )
    return optax.with_extra_args_support(tx)
