"""Second moments of the mean gradient, from momenta that are averaged now and then: no bytes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Learned(NamedTuple):
    """Trees of float leaves of the parameters' shapes, equal on all replicas."""

    variance: Any  # of the mean gradient
    known: Any  # the mean momentum at each entry's last exchange


def learned(state: Learned, momentum: Any, on: Any, stale: Any, b1: float, b2: float) -> Learned:
    """Learns the variance of the mean gradient at the entries that were just exchanged.

    If c steps have passed since an entry's last exchange, and m was its mean momentum then, the new
    mean momentum is b1^c m + (1 - b1) sum_k b1^k g_k over the mean gradients g_k of these steps.
    The square of that sum is in expectation sum_k b1^2k times the mean of g_k^2, if the gradients
    of the steps are independent. A gradient that stays the same counts up to 9 times as much, with
    b1 = 0.9 and c = 10; with c = 1 the gradient is known. What a code of the momenta loses counts
    as a gradient, too. No paper has this.

    Args:
      state: Before the exchange.
      momentum: Momenta after the exchange, of the parameters' shapes.
      on: Where they were exchanged, bool of the leaves' shapes; None: everywhere.
      stale: u16 of the leaves' shapes, steps without an exchange before this one; None: none.
      b1: Decay of the momentum, in [0, 1).
      b2: Decay of the variance, in [0, 1).

    Returns:
      The new state; entries that were not exchanged keep theirs.
    """

    def variance(v, known, m, on, stale):
        steps = 1 if on is None else stale.astype(m.dtype) + 1
        kept = _power(b1, steps)
        square = (m - kept * known) ** 2 * (1 + b1) / ((1 - b1) * (1 - kept**2))
        new = v + (1 - _power(b2, steps)) * (square - v)
        return new if on is None else jnp.where(on, new, v)

    last = lambda known, m, on: m if on is None else jnp.where(on, m, known)
    return Learned(
        jax.tree.map(variance, state.variance, state.known, momentum, on, stale),
        jax.tree.map(last, state.known, momentum, on),
    )


def root(variance: Any, stale: Any, steps: jax.Array, b2: float, eps: float) -> Any:
    """The divisor of the momentum, without bias; infinite where nothing was exchanged yet.

    Args:
      variance: Of `learned`.
      stale: u16 of the leaves' shapes, steps since each entry's last exchange; None: none.
      steps: i32[], steps so far.
      b2: Decay of the variance, in [0, 1).
      eps: Added to the square root.

    Returns:
      A tree like `variance`.
    """

    def divisor(v, stale):
        known = (steps if stale is None else steps - stale.astype(jnp.int32)).astype(v.dtype)
        unbiased = v / (1 - _power(b2, jnp.maximum(known, 1)))
        return jnp.where(known > 0, jnp.sqrt(unbiased) + eps, jnp.inf)

    return jax.tree.map(divisor, variance, stale)


def _power(b, n):
    if isinstance(n, int):
        return b**n
    return jnp.exp(math.log(max(b, 1e-30)) * n)  # XLA:CPU has no vector instruction for powers
