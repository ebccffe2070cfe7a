"""Predicts what a run will send: how often each part, and the sum of bytes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas.protocol import rounds as rounds_of
from train.config.run import AXIS_NAME


def rounds(tx: optax.GradientTransformation, steps: int, params: Any = None) -> dict[str, int]:
    """Counts how often a run will send each part, by running its steps on a few numbers.

    Gradients are zero here. That decides anything that depends on them, such as the end of a
    warm-up that a method finds itself.

    Args:
      tx: The run's `train.config.update`.
      steps: Steps of the run.
      params: The tree that it sees; by default a small leaf of each of `jaxcomp.leaf_kinds`. That
        is enough for methods whose parts do not depend on the tree. Fragments do.

    Returns:
      The count of each part, and under "all" the number of steps that send anything; {} for a
      method that sends everything in every step.
    """
    return {part: int(sent.sum()) for part, sent in parts_of_steps(tx, steps, params).items()}


def kinds_of_steps(
    tx: optax.GradientTransformation, steps: int, params: Any = None
) -> dict[int | None, float]:
    """Groups steps by the parts that they send, as `rounds` counts them.

    Args:
      tx: As for `rounds`.
      steps: Steps of the run.
      params: As for `rounds`.

    Returns:
      The share of steps of each kind, by the number of its first step; {None: 1} for a method that
      sends everything in every step.
    """
    sent = parts_of_steps(tx, steps, params)
    if not sent:
        return {None: 1.0}
    table = np.stack(list(sent.values()), axis=1)
    _, firsts, counts = np.unique(table, axis=0, return_index=True, return_counts=True)
    return {int(first): int(n) / steps for first, n in zip(firsts, counts, strict=True)}


def parts_of_steps(
    tx: optax.GradientTransformation, steps: int, params: Any = None
) -> dict[str, np.ndarray]:
    """i32[steps] for each part: 1 if the step sends it, as `rounds` counts."""
    params = _one_of_each_kind() if params is None else params
    mesh = Mesh(np.array(jax.local_devices()[:1]), (AXIS_NAME,))
    tx = jaxcomp.per_replica(tx, AXIS_NAME)

    def run(params):
        first = tx.init(params)
        if not rounds_of(first):
            return {}
        grads = jaxcomp.local_params(params, (), AXIS_NAME)

        def step(state, _):
            new = tx.update(grads, state, params)[1]
            return new, jax.tree.map(jnp.subtract, rounds_of(new), rounds_of(state))

        return lax.scan(step, first, length=steps)[1]

    sent = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P()))(params)
    return {part: np.asarray(steps) for part, steps in sent.items()}


def _one_of_each_kind():
    matrix = jnp.zeros((2, 2))
    return {"kernel": matrix, "embedding": matrix, "head": matrix, "bias": jnp.zeros(2)}


def total_bytes(sent: Mapping[str, float], counts: Mapping[str, int], steps: int) -> float:
    """Sums what one replica sends.

    Args:
      sent: Bytes of each part; the part "" is sent in every step.
      counts: How often each part is sent.
      steps: Number of steps.

    Returns:
      The bytes.
    """
    return sum(size * (counts.get(part, 0) if part else steps) for part, size in sent.items())
