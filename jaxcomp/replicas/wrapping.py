"""Checks of wrappers: they get an optax transformation, and parameters that are wide enough."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomp.replicas.protocol import keeps_rounding


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
    """Warns, once per call site, if narrow parameters would lose small updates."""
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
