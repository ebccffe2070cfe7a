"""Muon for matrices of blocks, with Adam for embeddings, heads and vectors: an inner optimizer."""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
import optax

from jaxcomp._checks import require, require_decay, schedule_of
from jaxcomp.methods import low_rank
from jaxcomp.replicas.kinds import by_kind
from jaxcomp.replicas.layers import in_batches, is_stack, layer_by_layer


def muon(
    learning_rate: float | optax.Schedule,
    *,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    rms: float | None = 0.2,
    others: optax.GradientTransformation | None = None,
) -> optax.GradientTransformation:
    """Muon for the matrices of blocks, Adam for the other leaves, so that one rate serves both.

    `jaxcomp.leaf_kinds` tells which leaves are matrices: no table of tokens is made orthogonal. It
    exchanges nothing: put it behind `compressed_mean`, or inside `local_steps`.

    Args:
      learning_rate: Learning rate of all leaves, or a schedule `count -> rate`.
      momentum: Decay of Muon's momentum, in [0, 1).
      weight_decay: Weight decay of the matrices, decoupled; multiplied by the learning rate.
      rms: Root mean square of a matrix's step at a rate of 1; Adam's is about 0.2. None: steps of
        norm `sqrt(max(1, n / m))` for a matrix [m, n], as in `optax.contrib.muon`.
      others: Optimizer of the other leaves, with a rate of its own; default:
        `optax.adam(learning_rate)`. Its `b2` of 0.999 remembers rare tokens; 0.95, which recipes of
        large models name, is for batches of millions of tokens; see docs/scale.md.

    Returns:
      A `jaxcomp.by_kind` of `optax.contrib.muon` and `others`. More than two axes are cut where m
      + n is least, as in `dion`: `[width, heads, size]` of attention is one matrix. Stacked layers
      would be one, too: wrap the optimizer in `jaxcomp.per_layer`, which makes them a batch.
      Matrices must be whole on each device, as norms of shards would differ.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> mean = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica")
      >>> tx = optax.chain(mean, jaxcomp.muon(4e-3, weight_decay=0.1))
      >>> tx = jaxcomp.local_steps(jaxcomp.muon(4e-3), "replica", every=16)

    References:
      K. Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon>`_, 2024; J. Liu et al.,
      `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_, 2025, equation 4.
    """
    # optax.inject_hyperparams makes an array of it.
    holds = not isinstance(momentum, numbers.Real) or 0 <= momentum < 1
    require(holds, "muon", "[0, 1)", "momentum=0.95", momentum=momentum)
    require_decay("muon", weight_decay)
    rate = schedule_of("muon", learning_rate)
    matrices = optax.contrib.muon(
        rate,
        beta=momentum,
        weight_decay=weight_decay,
        consistent_rms=rms,
        muon_weight_dimension_numbers=_sides,
    )
    others = optax.adam(rate) if others is None else layer_by_layer(others)
    return in_batches(by_kind(others, matrix=matrices))


def _sides(params):
    """Which axes of each matrix are its rows, and which its columns."""

    def dimensions(key_path, leaf):
        # What is neither, the layers of a stack, is a batch.
        axes = range(is_stack(key_path), jnp.ndim(leaf))
        first = low_rank.cut(leaf.shape[axes.start :])
        return optax.contrib.MuonDimensionNumbers(tuple(axes[:first]), tuple(axes[first:]))

    return jax.tree.map_with_path(dimensions, params)
