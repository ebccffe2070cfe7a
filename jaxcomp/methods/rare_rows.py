"""Rows of embeddings that step as far as in dense training, inside methods of local optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.compressors.policies import path_of
from jaxcomp.exchange import averaging
from jaxcomp.methods.inner import Synchronization
from jaxcomp.replicas.kinds import kind_of
from jaxcomp.replicas.layers import common_value
from jaxcomp.replicas.types import num_replicas, vary_like
from jaxcomp.replicas.wrapping import with_extra_args


class RareRowsState(NamedTuple):
    """State of `rare_rows`."""

    inner: Any  # state of the optimizer
    # f32[rows] of an embedding: the other replicas' mean second moment at the last exchange, -1
    # before the first; None for other leaves.
    others: Any


def rare_rows(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    rows: Callable[[str, Any], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales the local steps of embedding rows to what dense Adam does.

    Adam divides by the root of its second moment, so a token that one of R replicas saw takes a
    whole step there and none elsewhere: the mean is 1/R of dense Adam's step. Dense Adam divides by
    the second moment of the mean gradient. With v_i the mean of replica i's over a row, that is
    sum_i v_i / R^2 if the replicas' gradients are independent, as those of rare tokens are. So
    replica i multiplies its step in the row by

        sqrt(v_i / (sum_j v_j / R^2)) = R sqrt(v_i / sum_j v_j),

    R if it alone saw the token, sqrt(R) if all did alike. Then the mean of the steps is linear in
    the momenta, as in dense Adam. Write it around Adam inside `cocktail_sgd` or `local_steps`;
    what these conserve they still do, since they take any inner update.

    An exchange of the method also sends one float32 for each row: the other replicas' v_j are those
    of the last exchange. Until the first one a row counts as seen by all alike. In the dense steps
    of a warm-up nothing is scaled; after it v_i is that of mean gradients, and rows step up to
    sqrt(R) too far until Adam has forgotten them.

    Args:
      inner: Adam, AdamW or a chain with one: an optimizer whose state has a second moment `nu`.
      axis_name: Mesh axis of the replicas.
      rows: `(path, leaf) -> bool`, which leaves have rows that are scaled, over their last axis.
        Default: the embeddings of `jaxcomp.leaf_kinds`.

    Returns:
      A `GradientTransformationExtraArgs`. It keeps one float32 for each row.

    Raises:
      ValueError: At trace time, if no such method is around it, or if the inner optimizer has no
        second moment of a leaf with rows.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> adam = jaxcomp.rare_rows(optax.adamw(1e-3), "replica")
      >>> tx = jaxcomp.cocktail_sgd(adam, "replica")
    """
    inner = with_extra_args(inner, "rare_rows")
    rows = _is_embedding if rows is None else rows

    def init_fn(params):
        full = lambda x: vary_like(jnp.full(x.shape[:-1], -1.0, jnp.float32), x)
        unknown = lambda scaled, x: full(x) if scaled else None
        others = jax.tree.map(unknown, _chosen(rows, params), params)
        return RareRowsState(inner=inner.init(params), others=others)

    def update_fn(updates, state, params=None, *, sync=None, **extra_args):
        if params is None or sync is None:
            raise ValueError(
                "rare_rows needs the parameters, and a method around it that tells when replicas "
                "exchange; write cocktail_sgd(rare_rows(optax.adamw(1e-3), 'replica'), 'replica'), "
                "or local_steps."
            )
        step, new = inner.update(updates, state.inner, params, sync=sync, **extra_args)
        moments = _second_moments(new, _chosen(rows, params))
        others = _shared(moments, state.others, sync, axis_name)
        scaled = lambda v, o, u: u if v is None else _scaled(u, v, o, sync.alike, axis_name)
        step = jax.tree.map(scaled, moments, others, step, is_leaf=lambda x: x is None)
        return step, RareRowsState(inner=new, others=others)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_embedding(path, leaf):
    return kind_of(path, leaf) == "embedding"


def _chosen(rows, params):
    """A tree like the parameters: whether a leaf's rows are scaled."""
    choose = lambda key_path, leaf: leaf.ndim > 1 and common_value(rows, key_path, leaf)
    return jax.tree_util.tree_map_with_path(choose, params)


def _second_moments(state, chosen):
    """f32[rows] of each chosen leaf, the mean second moment over a row; None for the others."""
    keyed, treedef = jax.tree_util.tree_flatten_with_path(chosen)
    trees = [
        treedef.flatten_up_to(nu) for _, nu in optax.tree_utils.tree_get_all_with_path(state, "nu")
    ]

    def row_moments(number, key_path, is_chosen):
        if not is_chosen:
            return None
        # optax.partition hides leaves from an optimizer behind nodes without an array.
        found = [tree[number] for tree in trees if hasattr(tree[number], "shape")]
        if len(found) != 1:
            raise ValueError(
                f"rare_rows found {len(found)} second moments `nu` of the leaf "
                f"{path_of(key_path)!r} in the inner optimizer's state, and needs one; write it "
                "around optax.adam or optax.adamw, also in optax.partition."
            )
        return jnp.mean(found[0].astype(jnp.float32), axis=-1)

    return treedef.unflatten([row_moments(i, *pair) for i, pair in enumerate(keyed)])


def _shared(moments, others, sync: Synchronization, axis_name):
    """The others' mean second moments after this step; the exchange is part of the method's."""
    replicas = num_replicas(axis_name)

    def shared():
        # A replica whose gradient is not finite would spoil the rows of all.
        own = jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, 0.0), moments)
        with averaging.named(sync.part):
            total = lax.psum(own, axis_name)
        # Rounding must not make a sum of nothing look like one that is not known yet.
        rest = lambda t, v: jnp.maximum(t - v, 0.0) / max(1, replicas - 1)
        return jax.tree.map(rest, total, own)

    return shared() if sync.due is True else lax.cond(sync.due, shared, lambda: others)


def _scaled(step, own, others, alike, axis_name):
    replicas = num_replicas(axis_name)
    total = own + (replicas - 1) * jnp.where(others < 0, own, others)
    factor = replicas * jnp.sqrt(own / jnp.where(total > 0, total, 1.0))
    return step * jnp.where(alike, 1.0, factor)[..., None].astype(step.dtype)
