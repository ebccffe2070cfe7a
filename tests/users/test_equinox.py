"""An Equinox module in `train_step`: its arrays train, and a whole module is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.replicas import mesh_of

TX = optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), optax.sgd(0.1))
MODEL = eqx.nn.MLP(4, 4, width_size=8, depth=1, key=jax.random.key(0))
BATCH = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss_fn(model, batch):
    return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)


def test_a_step_is_that_of_equinox_alone():
    params, static = eqx.partition(MODEL, eqx.is_inexact_array)
    split = lambda params, batch: loss_fn(eqx.combine(params, static), batch)
    init, step = jaxcomp.train_step(split, TX, mesh_of(2), "replica")
    grads = eqx.filter_grad(loss_fn)(MODEL, BATCH)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    found, _, _ = step(params, init(params), BATCH)
    close = lambda one, other: np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
    jax.tree.map(close, found, expected)


def test_a_whole_module_is_refused_with_what_to_write():
    for made in (
        jaxcomp.train_step(loss_fn, TX, mesh_of(2), "replica"),
        jaxcomp.overlapped_train_step(loss_fn, TX, mesh_of(2), "replica"),
        jaxcomp.simulated_train_step(loss_fn, TX, 2, "replica"),
    ):
        message = r"params.activation is .*eqx.partition\(model, eqx.is_i"
        with pytest.raises(ValueError, match=message):
            made.init(MODEL)


class Counted(eqx.Module):
    """A layer with state of Equinox: what it has seen, and how often."""

    layer: eqx.nn.Linear
    seen: eqx.nn.StateIndex

    def __init__(self, key):
        self.layer = eqx.nn.Linear(4, 4, key=key)
        self.seen = eqx.nn.StateIndex((jnp.zeros(4), jnp.int32(0)))

    def __call__(self, x, state):
        mean, count = state.get(self.seen)
        state = state.set(self.seen, ((mean + jnp.mean(x, axis=0)) / 2, count + 1))
        return jax.vmap(self.layer)(x), state


def test_the_state_of_layers_is_a_model_state():
    model, layers_state = eqx.nn.make_with_state(Counted)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch, *, model_state):
        y, model_state = eqx.combine(params, static)(batch, model_state)
        return jnp.mean((y - batch) ** 2), model_state

    init, step = jaxcomp.train_step(loss, TX, mesh_of(2), "replica")
    state = init(params)
    for _ in range(2):
        params, state, metrics = step(params, state, BATCH, model_state=layers_state)
        layers_state = metrics["model_state"]
    mean, count = layers_state.get(model.seen)
    np.testing.assert_allclose(mean, 0.75 * BATCH.mean(axis=0), atol=1e-6)
    assert count == 2
