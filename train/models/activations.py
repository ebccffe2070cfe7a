"""The nonlinear functions of perceptrons, by the names that a config has for them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


@jax.custom_jvp
def gelu_exact(x: jax.Array) -> jax.Array:
    """x times the normal distribution's share below x: GELU without an approximation.

    Its derivative is written out, as that of `jax.lax.erf` in JAX 0.12 cannot be taken inside
    `jax.shard_map`: it mixes values that differ between replicas with constants that do not.
    """
    return x * _share_below(x)


@gelu_exact.defjvp
def _gelu_exact_jvp(primals, tangents):
    (x,), (tangent,) = primals, tangents
    below = _share_below(x)
    density = jnp.exp(-0.5 * jnp.square(x)) / math.sqrt(2 * math.pi)
    return x * below, (below + x * density) * tangent


def _share_below(x):
    return 0.5 * (1 + lax.erf(x / math.sqrt(2)))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": nnx.gelu,  # by tanh, as GPT-2 has it
    "gelu_exact": gelu_exact,
    "relu": nnx.relu,
    "silu": nnx.silu,
}
