"""A network of Flax nnx with bfloat16 parameters, at a rate at which they would stand still."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxcomp
import jaxcomp.flax
from tests.helpers.user_methods import EVERY_METHOD, KINDS, PATIENCE

REPLICAS, BATCH, RATE = 2, 32, 1e-3  # below half of bfloat16's last bit at 1.0, 2e-3
TARGET = 1 + 0.1 * np.random.default_rng(7).normal(size=(8, 4)).astype(np.float32)
HAVE_MASTERS = "cocktail_sgd", "sharded_optimizer", "sparse_loco"


class Network(nnx.Module):
    def __init__(self, dtype):
        self.out = nnx.Linear(
            8,
            4,
            use_bias=False,
            kernel_init=nnx.initializers.ones,
            param_dtype=dtype,
            rngs=nnx.Rngs(0),
        )

    def __call__(self, x):
        return self.out(x).astype(jnp.float32)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(step):
    x = np.random.default_rng(step).normal(size=(BATCH, 8)).astype(np.float32)
    return {"x": x, "y": x @ TARGET}


def trained(tx, dtype=jnp.bfloat16, steps=300):
    """The model after training, and its loss before and after."""
    mesh = jax.make_mesh((REPLICAS,), ("replica",))
    model = Network(dtype)
    optimizer = nnx.Optimizer(model, jaxcomp.flax.on_mesh(tx, mesh, "replica"), wrt=nnx.Param)
    step = jaxcomp.flax.train_step(loss_fn)
    losses = [float(step(model, optimizer, batch_of(i))["loss"].mean()) for i in range(steps)]
    return model, losses[0], np.mean(losses[-5:])


@functools.cache
def dense():
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    return trained(optax.chain(mean, optax.adam(RATE)), jnp.float32)


@pytest.mark.parametrize("method", [*KINDS, "zero_one_adam"])  # it has a drift, and masters
def test_it_learns_as_by_float32(method):
    tx = EVERY_METHOD[method](RATE)
    if method not in HAVE_MASTERS:
        tx = jaxcomp.master_weights(tx)
    model, _, loss = trained(tx, steps=300 * PATIENCE.get(method, 1))
    _, first, want = dense()
    assert loss < want + 0.05 * first < 0.1 * first
    assert model.out.kernel[...].dtype == jnp.bfloat16


def test_without_masters_it_stands_still():
    with pytest.warns(UserWarning, match="parameters are bfloat16"):
        model, _, _ = trained(EVERY_METHOD["mean"](RATE), steps=20)
    np.testing.assert_array_equal(model.out.kernel[...], 1)
