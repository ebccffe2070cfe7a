"""The exact GELU: JAX's values, and its derivatives where replicas differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from train.models.activations import gelu_exact

X = np.concatenate([np.linspace(-6, 6, 64), [-30.0, 30.0, 0.0, 1e-20]]).astype("float32")


def test_it_is_that_of_jax():
    expected = jax.nn.gelu(X, approximate=False)
    np.testing.assert_allclose(gelu_exact(jnp.asarray(X)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_take_its_derivative(dtype):
    mesh = jax.make_mesh((4,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    slope = jax.grad(lambda x: gelu_exact(x).sum().astype("float32"))
    on_replicas = jax.shard_map(slope, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"))
    x = jnp.asarray(X, dtype)
    found = jax.jit(on_replicas)(x)
    assert found.dtype == dtype
    # On one device JAX can take the derivative of its own form on every version.
    expected = jax.grad(lambda x: jax.nn.gelu(x, approximate=False).sum())(x.astype("float32"))
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(found.astype("float32"), expected, rtol=tolerance, atol=tolerance)
