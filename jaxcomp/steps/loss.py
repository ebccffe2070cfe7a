"""Calls of a user's loss: its optional arguments and results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.replicas.types import is_mapped, is_tracked, names_of, to_varying, varying_axes


class Extra(NamedTuple):
    """Results of a loss function other than the loss."""

    aux: Any = None
    model_state: Any = None  # like the one that it was given


def called(
    loss_fn: Callable, has_aux: bool, params: Any, batch: Any, rng: Any, model_state: Any
) -> tuple[jax.Array, Extra]:
    """Calls a loss, with `rng` and `model_state` as keyword arguments unless they are None.

    It must return the loss, then `aux` with `has_aux`, then the model state if it was given one;
    otherwise raises a ValueError.
    """
    given = {"rng": rng, "model_state": model_state}
    given = {name: value for name, value in given.items() if value is not None}
    names = ("loss", *["aux"] * has_aux, *["model_state"] * ("model_state" in given))
    returned = loss_fn(params, batch, **given)
    values = returned if isinstance(returned, tuple) else (returned,)
    if len(values) != len(names):
        raise ValueError(
            f"the loss returned {len(values)} values, and must return {', '.join(names)}: aux if "
            f"the step was made with has_aux=True (it is {has_aux}), and the new model_state if "
            f"the step was called with one ({'it was' if model_state is not None else 'not so'})."
        )
    results = dict(zip(names, values, strict=True))
    if model_state is not None:
        _require_same_shapes(results["model_state"], model_state)
    aux = jax.tree.map(jnp.asarray, results.get("aux"))
    return results["loss"], Extra(aux, results.get("model_state"))


def _require_same_shapes(new, old):
    form = lambda tree: jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)
    if form(new) != form(old):
        raise ValueError(
            f"the loss returned a model_state of {form(new)}, and must return one of the same "
            f"tree, shapes and dtypes as it was given: {form(old)}."
        )


def replica_key(rng: Any, axis_name: str | tuple[str, ...]) -> Any:
    """A key of this replica's own, from a common key, or a tree of keys."""
    return folded(rng, lax.axis_index(names_of(axis_name)))


def folded(rng: Any, index: Any) -> Any:
    """A key, or a tree of keys, each folded with a number; None for None."""
    return jax.tree.map(lambda key: jax.random.fold_in(key, index), rng)


def own_floats(model_state: Any, axis_name: str | tuple[str, ...]) -> Any:
    """A model state whose floating leaves vary, since each replica changes its own.

    Raises a ValueError for other leaves that vary: counts and keys have no mean.
    """

    def own(path, x):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return to_varying(x, axis_name)
        if is_tracked(axis_name) and not varying_axes(x).isdisjoint(names_of(axis_name)):
            raise ValueError(
                f"the model_state's leaf {jax.tree_util.keystr(path)!r} of dtype {x.dtype} differs "
                "between replicas, and only floats have a mean; compute it of what is equal on "
                "all replicas, as a count of steps, or return it as aux."
            )
        return x

    return jax.tree_util.tree_map_with_path(own, model_state)


def require_local(loss: jax.Array, *axes: str) -> None:
    """Raises a ValueError if a loss is equal on all replicas, as its gradients would be too small.

    Under `jax.vmap`, which has no types, that is a loss without a replica axis.
    """
    if varying_axes(loss).issuperset(axes) if is_tracked(axes) else is_mapped(loss):
        return
    raise ValueError(
        f"the loss is equal on all replicas over {axes}: it was averaged over them, as by "
        "jax.lax.pmean, or depends on neither parameters nor batch; its gradients would be "
        "divided by the number of replicas. Return the mean loss of the local batch: the step "
        "averages gradients, and metrics['loss'] has the loss of every replica."
    )
