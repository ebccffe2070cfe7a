"""Calls of a user's loss: its optional arguments and results, and the model state it changes.

A model state, such as BatchNorm statistics, is equal on all replicas.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.replicas.finite import finite, unless
from jaxcomp.replicas.protocol import widened
from jaxcomp.replicas.types import is_tracked, names_of, to_varying, varying_axes


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
    form = _form(model_state)  # now: Equinox forbids to look at a state that was changed
    returned = loss_fn(params, batch, **given)
    values = returned if isinstance(returned, tuple) else (returned,)
    if len(values) != len(names):
        raise ValueError(
            f"the loss returned {len(values)} values, and must return {', '.join(names)}: aux if "
            f"the step was made with has_aux=True (it is {has_aux}), and the new model_state if "
            f"the step was called with one ({'it was' if model_state is not None else 'not so'})."
        )
    results = dict(zip(names, values, strict=True))
    extra = Extra(*(jax.tree.map(jnp.asarray, results.get(name)) for name in Extra._fields))
    if model_state is not None and (new := _form(extra.model_state)) != form:
        raise ValueError(
            f"the loss returned a model_state of {_tree(new)}, and must return one of the same "
            f"tree, shapes and dtypes as it was given: {_tree(form)}."
        )
    return results["loss"], extra


def _form(tree):
    """The leaves' dtypes and shapes, and the tree's structure; nodes may have no `==`."""
    leaves, treedef = jax.tree.flatten(tree)
    return [f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in leaves], treedef


def _tree(form):
    leaves, treedef = form
    return treedef.unflatten(leaves)


def folded(rng: Any, index: Any) -> Any:
    """A key, or a tree of keys, each folded with a number; None for None.

    A key may be an array of them: scanned layers have one each.
    """

    def fold(key):
        fold_in = jax.random.fold_in
        axes = jnp.ndim(key) - (not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key))
        if axes < 0:
            raise ValueError(f"got rng={key!r:.60}, which is no key; write rng=jax.random.key(0).")
        for _ in range(axes):
            fold_in = jax.vmap(fold_in, (0, None))
        return fold_in(key, index)

    return jax.tree.map(fold, rng)


def is_float(x: Any) -> bool:
    """Whether a leaf of a model state is each replica's own; the others are equal on all."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def own_floats(model_state: Any, axis_name: str | tuple[str, ...]) -> Any:
    """A model state whose floating leaves vary, since each replica changes its own.

    Raises a ValueError for other leaves that vary: counts and keys have no mean.
    """

    def own(path, x):
        if is_float(x):
            return to_varying(x, axis_name)
        if is_tracked(axis_name) and not varying_axes(x).isdisjoint(names_of(axis_name)):
            raise ValueError(
                f"the model_state's leaf {jax.tree_util.keystr(path)!r} of dtype {x.dtype} differs "
                "between replicas, and only floats have a mean; compute it of what is equal on "
                "all replicas, as a count of steps, or return it as aux."
            )
        return x

    return jax.tree.map_with_path(own, model_state)


def require_local(loss: jax.Array, *axes: str) -> None:
    """Raises a ValueError if a loss is equal on all replicas, as its gradients would be too small.

    Under `jax.vmap` any loss will do: it does not divide the gradient of a mean over the replicas.
    """
    if not is_tracked(axes) or varying_axes(loss).issuperset(axes):
        return
    raise ValueError(
        f"the loss is equal on all replicas over {axes}: it was averaged over them, as by "
        "jax.lax.pmean, or depends on neither parameters nor batch; its gradients would be "
        "divided by the number of replicas. Return the mean loss of the local batch: the step "
        "averages gradients, and metrics['loss'] has the loss of every replica."
    )


def averaged(old: Any, rows: Any, skipped: jax.Array, axis_name: str | tuple[str, ...]) -> Any:
    """The mean of the replicas' states, in one float32 message; inside `shard_map` or `vmap`.

    A replica whose row is not finite contributes its `old` state. A skipped step keeps that.
    """
    leaves, treedef = jax.tree.flatten(rows)
    before = treedef.flatten_up_to(old)
    floats = [i for i, x in enumerate(leaves) if is_float(x)]
    if floats:
        own = [leaves[i].reshape(before[i].shape) for i in floats]
        kept = unless(~finite(own), own, [before[i] for i in floats])
        flat = jnp.concatenate([widened(x.reshape(-1)) for x in kept])
        with jax.named_scope("jaxcomp.model_state"):
            flat = lax.pmean(flat, names_of(axis_name))
        ends = [sum(x.size for x in kept[: n + 1]) for n in range(len(kept) - 1)]
        for i, mean in zip(floats, jnp.split(flat, ends), strict=True):
            leaves[i] = mean.reshape(before[i].shape).astype(before[i].dtype)
    return unless(skipped, treedef.unflatten(leaves), old)
