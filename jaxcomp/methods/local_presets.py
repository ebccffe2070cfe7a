"""Published settings of `local_steps`, by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from jaxcomp.compressors.base import Compressor, identity
from jaxcomp.compressors.bin_means import bin_means
from jaxcomp.compressors.compose import compose
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.quantize import quantize
from jaxcomp.compressors.sparse import top_k
from jaxcomp.exchange import wire
from jaxcomp.methods.local_steps import local_steps
from jaxcomp.schedules import Schedule


def diloco(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    every: int | Schedule = 500,
    outer_rate: float | optax.Schedule = 0.7,
    outer_momentum: float = 0.9,
    code: Compressor | Policy | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Local steps, then a step of Nesterov's momentum by their mean: `local_steps` as in DiLoCo.

    Args:
      inner: Optimizer of each replica: AdamW in the paper.
      axis_name: Mesh axis of the replicas.
      every: Steps from one meeting to the next, or a schedule that says in which steps.
      outer_rate: Learning rate of the outer optimizer; a schedule counts meetings.
      outer_momentum: Its momentum.
      code: Code of the differences; default: `identity()`.
      **options: Others of `local_steps`.

    Returns:
      The `local_steps`.

    References:
      A. Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023, algorithm 1. What others do differently:
      OpenDiLoCo and torchft have these constants; MaxText 0.3 and 0.9, every 36 steps.
    """
    outer = optax.sgd(outer_rate, outer_momentum, nesterov=True)
    code = identity() if code is None else code
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
    code: Compressor | Policy | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo by fragments, one after the other, each merged some steps late, at 4 bits.

    The largest message is smaller by the number of fragments, and has `delay` steps to travel.

    Args:
      inner: Optimizer of each replica: AdamW in the paper.
      axis_name: Mesh axis of the replicas.
      every: Steps from one meeting of a fragment to its next.
      fragments: As of `local_steps`. The paper has one for every third layer, by strides: with
        stacked layers go through `jaxcomp.per_layer`, and number them by their paths.
      delay: Steps until a fragment is merged; the paper's is 1, and at most 5.
      keep: Share of its own difference that a replica keeps then; the paper compares 0 and 0.5.
      outer_rate: Learning rate of the outer optimizer; a schedule counts meetings.
      outer_momentum: Its momentum.
      code: Code of the differences; default: `quantize(4)`.
      **options: Others of `local_steps`.

    Returns:
      The `local_steps`.

    References:
      A. Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025, algorithm 2. Deviations: 4 bits are equal steps
      of a block's largest value, both ways (there: three bits of exponent, before the sum alone);
      fragments are of equal sizes unless a policy says otherwise. MaxText has keep=0.
    """
    outer = optax.sgd(outer_rate, outer_momentum, nesterov=True)
    code = quantize(4) if code is None else code
    streams: dict[str, Any] = {"fragments": fragments, "delay": delay, "keep": keep}
    return local_steps(inner, axis_name, every=every, code=code, outer=outer, **streams, **options)


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
    """Local steps whose differences travel sparse, in 2 bits, with feedback and no outer momentum.

    Of each 4,096 neighbours the largest travel: their positions in 12 bits, their values in 2. A
    replica sends `4096 density * 14 / 4096` bits per parameter and meeting to each other one: 0.44
    by default, 0.219 at 1/64, which are 146 times fewer than float32.

    Args:
      inner: Optimizer of each replica: AdamW behind a clipping to norm 1 in the paper.
      axis_name: Mesh axis of the replicas.
      every: Steps from one meeting to the next, or a schedule that says in which steps.
      density: Share of the entries that travel, in (0, 1].
      error_decay: Factor of what was not sent, at each meeting.
      outer_rate: Learning rate of the outer SGD; a schedule counts meetings.
      mean: `jaxcomp.gathered`, or `jaxcomp.from_senders`.
      **options: Others of `local_steps`.

    Returns:
      The `local_steps`.

    References:
      A. Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_, 2025, algorithm 1. Deviations: blocks are neighbours
      in a bucket, not tiles of 64 x 64; bins are symmetric, and those of a bucket, not a tensor's.
      What the authors' code (templar) does differently from the paper: it divides by the replicas
      that sent an entry (`mean=jaxcomp.from_senders`) and clips each replica's difference to the
      median norm; in production it sends 64 of 4,096 every 30 steps.
    """
    code = compose(top_k(density, block=4096), bin_means(2))
    outer = optax.sgd(outer_rate)
    feedback: dict[str, Any] = {"error_decay": error_decay, "mean": mean}
    return local_steps(inner, axis_name, every=every, code=code, outer=outer, **feedback, **options)


def muloco(
    learning_rate: float | optax.Schedule,
    axis_name: str,
    *,
    every: int | Schedule = 30,
    code: Compressor | Policy | None = None,
    error_decay: float | None = 0.9,
    outer_rate: float | optax.Schedule = 0.8,
    outer_momentum: float = 0.9,
    weight_decay: float = 0.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo with Muon inside, whose differences of models need few bits: 2 by default.

    Args:
      learning_rate: Rate of `optax.contrib.muon`, and of its Adam for what is no matrix.
      axis_name: Mesh axis of the replicas.
      every: Steps from one meeting to the next, or a schedule that says in which steps.
      code: Code of the differences; default: `bin_means(2, block=1024)`.
      error_decay: Factor of what was not sent; None for no error feedback.
      outer_rate: Learning rate of the outer optimizer; a schedule counts meetings.
      outer_momentum: Its momentum.
      weight_decay: Decay of Muon.
      **options: Others of `local_steps`.

    Returns:
      The `local_steps`. Matrices must be whole on each device: of shards Muon's norms differ.

    References:
      B. Therien et al., `MuLoCo: Muon is a practical inner optimizer for DiLoCo
      <https://arxiv.org/abs/2505.23725>`_, 2025. Deviations: all leaves are coded (norms,
      embeddings and the head are exact in the paper's sweeps: give a policy as `code`), and both
      ways. In the authors' code the learning rate enters twice with error feedback; here once.
    """
    inner = optax.contrib.muon(learning_rate, weight_decay=weight_decay)
    code = bin_means(2, block=1024) if code is None else code
    outer = optax.sgd(outer_rate, outer_momentum, nesterov=True)
    options["error_decay"] = error_decay
    return local_steps(inner, axis_name, every=every, code=code, outer=outer, **options)
