"""What a run will send, before it starts: how often each part comes, and the sum of bytes."""

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
    """Counts how often a run will send each part, by taking its steps on few numbers.

    What a method decides by its gradients, as the end of a warm-up that it finds by itself, is
    decided by gradients of zero here.

    Args:
      tx: The run's `train.config.update`.
      steps: Steps of the run.
      params: The tree that it sees; by default one number, which is enough for methods whose parts
        are the same for each tree. Fragments are not.

    Returns:
      The counts by part, and by "all" those of steps that send anything; {} for a method that
      sends everything in every step.
    """
    return {part: int(sent.sum()) for part, sent in parts_of_steps(tx, steps, params).items()}


def kinds_of_steps(
    tx: optax.GradientTransformation, steps: int, params: Any = None
) -> dict[int | None, float]:
    """Tells steps that send different parts apart, as `rounds` counts them.

    Args:
      tx: As for `rounds`.
      steps: Steps of the run.
      params: As for `rounds`.

    Returns:
      By the number of the first step of each kind, the share of steps that are like it; {None: 1}
      for a method that sends everything in every step.
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
    """i32[steps] by part: 1 where a step sends it; as `rounds` counts them."""
    params = {"number": jnp.zeros(1)} if params is None else params
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


def total_bytes(sent: Mapping[str, float], counts: Mapping[str, int], steps: int) -> float:
    """Sums what one replica sends.

    Args:
      sent: Bytes of each part; that of "" is sent in every step.
      counts: How often each part is sent.
      steps: How many steps there are.

    Returns:
      The bytes.
    """
    return sum(size * (counts.get(part, 0) if part else steps) for part, size in sent.items())
