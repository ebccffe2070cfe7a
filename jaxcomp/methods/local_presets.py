"""Published settings of `local_steps`, under their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from jaxcomp._checks import is_finite, require, require_static
from jaxcomp.compressors.base import Compressor, identity
from jaxcomp.compressors.bin_means import bin_means
from jaxcomp.compressors.compose import compose
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.quantize import quantize
from jaxcomp.compressors.sparse import top_k
from jaxcomp.exchange import wire
from jaxcomp.exchange.wire import Transport
from jaxcomp.methods.local_steps import local_steps
from jaxcomp.methods.mean_momentum import mean_momentum
from jaxcomp.methods.muon import muon
from jaxcomp.methods.rare_rows import rare_rows
from jaxcomp.schedules import Schedule

_EXACT, _FOUR_BITS, _TWO_BITS = identity(), quantize(4), bin_means(2, block=1024)


def diloco(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    every: int | Schedule = 500,
    outer_rate: float | optax.Schedule = 0.7,
    outer_momentum: float = 0.9,
    code: Compressor | Policy | Transport | None = _EXACT,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: local steps, then an outer step of Nesterov momentum with their mean.

    Args:
      inner: Optimizer of each replica: AdamW in the paper.
      axis_name: Mesh axis of the replicas.
      every: Inner steps per outer step, or a schedule that gives the steps.
      outer_rate: Learning rate of the outer optimizer; a schedule counts outer steps.
      outer_momentum: Its momentum.
      code: Code of the differences, see `local_steps`.
      **options: Other arguments of `local_steps`.

    Returns:
      The `local_steps`.

    References:
      A. Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023, algorithm 1. OpenDiLoCo and torchft have the same
      constants; MaxText has 0.3 and 0.9, every 36 steps.
    """
    outer = _outer("diloco", every, outer_rate, outer_momentum)
    return local_steps(inner, axis_name, every=every, code=code, outer=outer, **options)


def streaming_diloco(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    every: int = 100,
    fragments: int | Callable[[str, Any], int] = 8,
    delay: int = 1,
    keep: float = 0.5,
    outer_rate: float | optax.Schedule = 0.4,
    outer_momentum: float = 0.9,
    code: Compressor | Policy | Transport = _FOUR_BITS,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo with fragments that are sent in turn at 4 bits, and merged some steps late.

    The largest message is smaller by the number of fragments, and may take `delay` steps to arrive.

    Args:
      inner: Optimizer of each replica: AdamW in the paper.
      axis_name: Mesh axis of the replicas.
      every: Steps between the outer steps of one fragment.
      fragments: As for `local_steps`. In the paper a fragment holds layers at a stride. For stacked
        layers use `jaxcomp.per_layer`, and number them by their paths.
      delay: Steps until a fragment is merged; 1 in the paper, and at most 5.
      keep: Share of its own difference that a replica keeps at the merge; the paper compares 0 and
        0.5.
      outer_rate: Learning rate of the outer optimizer; a schedule counts outer steps.
      outer_momentum: Its momentum.
      code: Code of the differences, see `local_steps`.
      **options: Others of `local_steps`.

    Returns:
      The `local_steps`.

    References:
      A. Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025, algorithm 2. Deviations: the 4 bits are a uniform
      grid up to a block's largest value, in both directions (paper: three bits of exponent, only
      before the sum); fragments have equal sizes unless a policy says otherwise. MaxText has
      keep=0.
    """
    outer = _outer("streaming_diloco", every, outer_rate, outer_momentum)
    options |= {"fragments": fragments, "delay": delay, "keep": keep}
    return local_steps(inner, axis_name, every=every, code=code, outer=outer, **options)


def sparse_loco(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    every: int | Schedule = 15,
    density: float = 1 / 32,
    error_decay: float = 0.95,
    outer_rate: float | optax.Schedule = 1.0,
    mean: wire.Exchange = wire.gathered,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Local steps that send sparse differences at 2 bits, with error feedback, no outer momentum.

    The largest of each 4,096 neighbours are sent, values in 2 bits and positions in 7, or in 8 at
    density 1/64. So in an outer step a replica sends 0.281 bits per parameter to each other
    replica, or 0.156 at density 1/64, which is 205 times fewer than float32.

    Args:
      inner: Optimizer of each replica: in the paper AdamW after clipping to norm 1.
      axis_name: Mesh axis of the replicas.
      every: Inner steps per outer step, or a schedule that gives the steps.
      density: Share of the entries that is sent, in (0, 1].
      error_decay: Decay of the residual at each outer step.
      outer_rate: Learning rate of the outer SGD; a schedule counts outer steps.
      mean: `jaxcomp.gathered`, or `jaxcomp.from_senders`.
      **options: Others of `local_steps`.

    Returns:
      The `local_steps`.

    References:
      A. Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_, 2025, algorithm 1. Deviations: blocks are neighbours in
      a bucket, not tiles of 64 x 64; bins are symmetric, and per bucket, not per tensor. The
      authors' code (templar) differs from the paper: it divides by the number of replicas that sent
      an entry (`mean=jaxcomp.from_senders`) and clips each replica's difference to the median norm.
      In production it sends 64 of 4,096 entries every 30 steps.
    """
    first = "optax.adam(learning_rate)"
    require_static("sparse_loco", first, every=every, density=density, error_decay=error_decay)
    code = mean(compose(top_k(density, block=4096), bin_means(2)))
    options["error_decay"] = error_decay
    outer = _outer("sparse_loco", every, outer_rate)
    return local_steps(inner, axis_name, every=every, code=code, outer=outer, **options)


def muloco(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    *,
    every: int | Schedule = 16,
    code: Compressor | Policy | Transport = _TWO_BITS,
    error_decay: float | None = 0.9,
    outer_rate: float | optax.Schedule = 0.6,
    outer_momentum: float = 0.6,
    momentum_code: Compressor | Policy | Transport | None = None,
    weight_decay: float = 0.0,
    others: optax.GradientTransformation | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo with Muon as inner optimizer, whose model differences need few bits: 2 by default.

    Args:
      learning_rate: Learning rate of `jaxcomp.muon`: Muon for the matrices of blocks, Adam for
        embeddings, heads and vectors.
      axis_name: Mesh axis of the replicas.
      every: Inner steps per outer step, or a schedule that gives the steps.
      code: Code of the differences, see `local_steps`.
      error_decay: Decay of the residual; None for no error feedback.
      outer_rate: Learning rate of the outer optimizer; a schedule counts outer steps.
      outer_momentum: Its momentum. The paper's 0.8 and 0.9, every 30 steps, move the consensus 8
        times as far as the replicas went, too far in runs of a few thousand steps.
      momentum_code: Code in which replicas average their momenta, too, as `jaxcomp.mean_momentum`
        says: `quantize(3, block=64)`. None: momenta stay local. With it take an outer rate of 1.0
        and no outer momentum.
      weight_decay: Weight decay of the matrices.
      others: Optimizer of the other leaves. Default:
        `jaxcomp.rare_rows(optax.adam(learning_rate), axis_name)`, so that rows of embeddings step
        as far as in dense training. For its `b2` see `jaxcomp.muon`.
      **options: Others of `local_steps`.

    Returns:
      The `local_steps`. Matrices must be whole on each device, as Muon's norms of shards would
      differ.

    References:
      B. Therien et al., `MuLoCo: Muon is a practical inner optimizer for DiLoCo
      <https://arxiv.org/abs/2505.23725>`_, 2025. Deviations: interval and outer rates; the rows of
      embeddings; momenta, if they are averaged; all leaves are encoded, in both directions. In the
      paper's sweeps norms, embeddings and the head are sent in float32: pass a policy as `code` for
      that. In the authors' code the learning rate enters twice with error feedback; here once.
    """
    if others is None:
        others = rare_rows(optax.adam(learning_rate), axis_name)
    inner = muon(learning_rate, weight_decay=weight_decay, others=others)
    if momentum_code is not None:
        inner = mean_momentum(inner, axis_name, code=momentum_code)
    outer = _outer("muloco", every, outer_rate, outer_momentum, "learning_rate")
    options["error_decay"] = error_decay
    return local_steps(inner, axis_name, every=every, code=code, outer=outer, **options)


def _outer(name, every, rate, momentum=None, first="optax.adam(learning_rate)"):
    """The outer optimizer; a ValueError for an interval that is an array, or no rate."""
    require_static(name, first, every=every)
    known, write = callable(rate) or is_finite(rate), "outer_rate=0.7"
    require(known, name, "a finite number or a schedule", write, outer_rate=rate)
    return optax.sgd(rate, momentum, nesterov=True)
