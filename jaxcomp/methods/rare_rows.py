"""Rows of embeddings that step as far as in dense training, inside methods of local optimizers."""

from __future__ import annotations

import functools
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
from jaxcomp.replicas.protocol import with_extra_args
from jaxcomp.replicas.types import num_replicas, vary_like


class RareRowsState(NamedTuple):
    """State of `rare_rows`."""

    inner: Any  # state of the optimizer
    # f32[rows] of an embedding, None for other leaves. If every step has an exchange: the second
    # moment of the mean gradient; else the other replicas' mean second moment at the last exchange,
    # -1 before the first.
    shared: Any


def rare_rows(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    rows: Callable[[str, Any], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Scales the local steps of embedding rows to what dense Adam does.

    Adam divides by the root of its second moment, so a token that one of R replicas saw takes a
    whole step there and none elsewhere: the mean is 1/R of dense Adam's step. Dense Adam divides by
    the second moment of the mean gradient. With v_i the mean of replica i's second moment over a
    row, and v that of the mean gradient, replica i multiplies its step in the row by sqrt(v_i / v):
    R if it alone saw the token, 1 if all had the same gradient. Then the mean of the steps is
    linear in the momenta, as in dense Adam. Write it around Adam inside `cocktail_sgd` or
    `local_steps`; what these conserve they still do, since they take any inner update.

    An exchange of the method also sends one float32 for each row:

    - If every step has an exchange: <g_i, r>, with r random signs that are equal on all replicas
      and new in each step. The square of its mean over the replicas is in expectation the square of
      the mean gradient, however alike the replicas' gradients are. Adam's decay averages it.
    - Else v_i, and v is sum_j v_j / R^2: that is right if gradients are independent, as those of
      rare tokens are. The other replicas' v_j are those of the last exchange. Until the first one a
      row counts as seen by all alike. (One random number for many steps would be too noisy.)

    In the dense steps of a warm-up nothing is scaled. After it rows step up to sqrt(R) too far in
    the second case, until Adam has forgotten the mean gradients.

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
        unknown = lambda is_chosen, x: full(x) if is_chosen else None
        shared = jax.tree.map(unknown, _chosen(rows, params), params)
        return RareRowsState(inner=inner.init(params), shared=shared)

    def update_fn(updates, state, params=None, *, sync=None, **extra_args):
        if params is None or sync is None:
            raise ValueError(
                "rare_rows needs the parameters, and a method around it that tells when replicas "
                "exchange; write cocktail_sgd(rare_rows(optax.adamw(1e-3), 'replica'), 'replica'), "
                "or local_steps."
            )
        chosen = _chosen(rows, params)
        after = lambda grads, state: inner.update(grads, state, params, sync=sync, **extra_args)
        step, new = after(updates, state.inner)
        moments = _row_moments(new, chosen)
        if sync.always:
            # What Adam keeps of moments of one at a zero gradient is its decay, also in rows that
            # this replica has not seen and others have.
            _, forgot = after(
                jax.tree.map(jnp.zeros_like, updates), _with_unit_moments(state.inner)
            )
            old, decay = (_row_moments(s, chosen) for s in (state.inner, forgot))
            kept = jax.tree.map(jnp.multiply, decay, old)
            sketches = _sketches(updates, chosen, kept, moments, sync.step)
            shared = _mean_moments(state.shared, sketches, decay, moments, sync, axis_name)
            factor = functools.partial(_factor, axis_name)
        else:
            shared = _shared(moments, state.shared, sync, axis_name)
            factor = functools.partial(_independent_factor, axis_name)

        def scaled(v, known, u):
            if v is None:
                return u
            # Weight decay acts on rows that were never seen, too.
            scale = jnp.where(sync.alike | (v == 0), 1.0, factor(v, known))
            return u * scale[..., None].astype(u.dtype)

        step = jax.tree.map(scaled, moments, shared, step, is_leaf=lambda x: x is None)
        return step, RareRowsState(inner=new, shared=shared)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_embedding(path, leaf):
    return kind_of(path, leaf) == "embedding"


def _chosen(rows, params):
    """A tree like the parameters: whether a leaf's rows are scaled."""
    choose = lambda key_path, leaf: leaf.ndim > 1 and common_value(rows, key_path, leaf)
    return jax.tree.map_with_path(choose, params)


def _row_moments(state, chosen):
    """f32[rows] of each chosen leaf, the mean second moment over a row; None for the others."""
    keyed, treedef = jax.tree.flatten_with_path(chosen)
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


def _with_unit_moments(state):
    """The optimizer's state with ones as second moments."""
    is_moment = lambda path: jax.tree_util.GetAttrKey("nu") in path
    one = lambda path, x: jnp.ones_like(x) if is_moment(path) else x
    return jax.tree.map_with_path(one, state)


def _sketches(grads, chosen, kept, moments, number):
    """f32[rows] of each chosen leaf, whose square is in expectation what a gradient adds to v."""
    key = jax.random.fold_in(jax.random.key(0), number)

    def sketch(is_chosen, g, kept, v):
        if not is_chosen:
            return None
        g = g.astype(jnp.float32)
        signs = jax.random.rademacher(key, (1,) * (g.ndim - 1) + g.shape[-1:], jnp.float32)
        # What Adam gained tells how it weighs the gradient, which an optimizer before it may scale.
        weight = _ratio(jnp.maximum(v - kept, 0.0), jnp.sum(g * g, axis=-1))
        return jnp.sqrt(weight) * jnp.sum(g * signs, axis=-1)

    return jax.tree.map(sketch, chosen, grads, kept, moments)


def _mean_moments(known, sketches, decay, moments, sync: Synchronization, axis_name):
    """The second moments of the mean gradient after this step."""

    def averaged():
        with averaging.named(sync.part):
            means = lax.pmean(_finite(sketches), axis_name)
        after = lambda known, s, b: b * jnp.maximum(known, 0.0) + s * s
        return jax.tree.map(after, known, means, decay)

    if sync.due is True:
        return averaged()
    return lax.cond(sync.due, averaged, lambda: moments)  # of the mean gradient in a warm-up


def _shared(moments, others, sync: Synchronization, axis_name):
    """The others' mean second moments after this step; the exchange is part of the method's."""
    replicas = num_replicas(axis_name)

    def shared():
        own = _finite(moments)
        with averaging.named(sync.part):
            total = lax.psum(own, axis_name)
        # Rounding must not make a sum of nothing look like one that is not known yet.
        rest = lambda t, v: jnp.maximum(t - v, 0.0) / max(1, replicas - 1)
        return jax.tree.map(rest, total, own)

    return shared() if sync.due is True else lax.cond(sync.due, shared, lambda: others)


def _finite(rows):
    """A replica whose gradient is not finite would spoil the rows of all."""
    return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), rows)


def _ratio(x, y):
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1.0), 0.0)


def _factor(axis_name, v, mean):
    replicas = num_replicas(axis_name)
    if replicas == 1:
        return jnp.ones_like(v)
    return jnp.sqrt(_ratio(v, jnp.maximum(mean, v / replicas**2)))  # no other replica saw the row


def _independent_factor(axis_name, v, others):
    replicas = num_replicas(axis_name)
    return replicas * jnp.sqrt(_ratio(v, v + (replicas - 1) * jnp.where(others < 0, v, others)))
