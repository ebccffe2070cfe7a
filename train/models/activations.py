"""Activation functions, by their names in a config."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


@jax.custom_jvp
def gelu_exact(x: jax.Array) -> jax.Array:
    """The exact GELU: x times the normal distribution function at x.

    It has a custom derivative, because JAX 0.12 cannot differentiate `jax.lax.erf` inside
    `jax.shard_map`: it mixes values that vary over replicas with constants that do not.
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
    "gelu": nnx.gelu,  # with tanh, as in GPT-2
    "gelu_exact": gelu_exact,
    "relu": nnx.relu,
    "silu": nnx.silu,
}
