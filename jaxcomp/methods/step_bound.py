"""How far a coordinate may move in a step: as far as Adam could move it, with any gradients.

A method that learns its variance rarely, or freezes it, divides new momenta by an old root D. A
rare token's row has a small one: when the token comes, a step would be a hundred rates long. Adam
takes the new square into v at once.

After n steps Adam has m = (1 - b1) sum b1^(n-k) g_k and v = (1 - b2) sum b2^(n-k) g_k^2. With
G(r) = 1 + r + ... + r^(n-1), the inequality of Cauchy and Schwarz says for any gradients

    |m| <= (1 - b1) sqrt(G(b1^2 / b2)) sqrt(v / (1 - b2)),

with equality for g_k = (b1 / b2)^(n-k). With bias correction D = sqrt(v / (1 - b2^n)) + eps. So

    |m| <= B D,  B = (1 - b1) sqrt(G(b1^2 / b2) G(b2)),

and a step is at most B / (1 - b1^n) rates. That is one rate in the first step; in the end, with
b1 = 0.9, it is 1.0, 1.2, 2.3 and 7.3 rates for b2 = 0.9, 0.95, 0.99 and 0.999. If b2 < b1^2, it
grows without end, as Adam's own steps may. Three rules bound a step:

1. What moves, the consensus or a replica's own parameters, moves at most so far. This does not act
   on a step that Adam takes.
2. What one replica sends is at most R times as large, before a code mixes coordinates. Where one of
   R replicas has seen a token, the mean is its momentum over R, and may still be B.
3. What the first rule cuts off goes into the residual, and moves in later steps, so error feedback
   stays exact. What the second one cuts off is dropped, as Adam forgets how large a spike was.

Leaves that are sent exactly have no residual: only their mean is bounded, and the rest is dropped.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxcomp.exchange.averaging import paired
from jaxcomp.methods import moments
from jaxcomp.replicas.types import num_replicas


def largest_momentum(adam: moments.Adam, count: jax.Array, like: Any) -> jax.Array:
    """B, the largest |m| / D that Adam can have after `count` steps: f32[]."""
    n = count.astype(moments.dtype_of(like))
    squares = _sum_of_powers(adam.b2, n) if adam.deviations.bias_correction else 1 / (1 - adam.b2)
    product = _sum_of_powers(adam.b1**2 / max(adam.b2, 1e-30), n) * squares
    # Finite, since a rate may be zero.
    return jnp.minimum((1 - adam.b1) * jnp.sqrt(product), 2.0**60)


def bounded(
    adam: moments.Adam, count: jax.Array, moves: Any, units: Any, times: float = 1.0
) -> Any:
    """Moves of at most `times` B of their units; the moves as they are without a bound.

    Args:
      adam: The constants.
      count: i32[], steps with this one.
      moves: Momenta, or what else is measured in units.
      units: Tree like `moves`: D for momenta; or one array for all leaves.
      times: How often the bound.
    """
    step_bound = adam.deviations.step_bound
    if step_bound is None:
        return moves
    most = times * step_bound * largest_momentum(adam, count, moves)
    clipped = lambda x, unit: jnp.clip(x, -most * unit, most * unit)
    if isinstance(units, jax.Array):
        return jax.tree.map(lambda x: clipped(x, units), moves)
    return jax.tree.map(clipped, moves, units)


def sendable(
    adam: moments.Adam, count: jax.Array, momentum: Any, root: Any, residual: Any, axis_name: str
) -> Any:
    """A replica's momentum as it may be sent: at most R B D where there is a residual."""
    whole = bounded(adam, count, momentum, root, num_replicas(axis_name))
    return paired(lambda r, m, least: m if r is None else least, residual, momentum, whole)


def kept_back(residual: Any, whole: Any, moved: Any) -> Any:
    """The residual with what `bounded` has cut off, `whole - moved`; None stays None."""
    if moved is whole:
        return residual
    plus = lambda r, x, y: None if r is None else (r + (x - y)).astype(r.dtype)
    return paired(plus, residual, whole, moved)


def _sum_of_powers(ratio: float, n: jax.Array) -> jax.Array:
    """1 + ratio + ... + ratio^(n - 1), also where a difference of powers would be rounded off."""
    if ratio == 1:
        return n
    powers = n * math.log(ratio) if ratio else jnp.full_like(n, -jnp.inf)
    return jnp.expm1(powers) / (ratio - 1)
