"""A network of Flax linen in a `TrainState` with BatchNorm's statistics, as one writes it."""

import runpy
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training import train_state

import jaxcomp
import jaxcomp.flax
from jaxcomp.replicas.compact import encode
from tests.helpers.replicas import mesh_of, one_value
from tests.helpers.user_methods import PATIENCE, USER_METHODS
from tests.users.elastic import batch_of

REPLICAS = 2


class Network(nn.Module):
    rate: float = 0.1

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(32)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(x))
        return nn.Dense(2)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


def loss_fn(params, batch, *, rng, model_state):
    variables = {"params": params, "batch_stats": model_state}
    y, changed = Network().apply(variables, batch["x"], mutable=["batch_stats"], rngs=rng)
    return jnp.mean((y - batch["y"]) ** 2), changed["batch_stats"]


def start(tx):
    variables = Network().init(jax.random.key(0), jnp.ones((1, 8)), train=False)
    return TrainState.create(
        apply_fn=Network().apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
    )


RNG = {"dropout": jax.random.key(3)}


def trained(state, steps, first=0):
    step = jaxcomp.flax.train_state_step(loss_fn, model_state="batch_stats")
    for i in range(first, first + steps):
        state, metrics = step(state, batch_of(i), rng=RNG)
    return state, metrics


def error(state):
    """Of batches that nobody trained on, by the running averages."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    batch = batch_of(1000)
    y = jax.jit(lambda v, x: state.apply_fn(v, x, train=False))(variables, batch["x"])
    return float(np.mean((np.asarray(y) - batch["y"]) ** 2))


def dense(steps):
    """The same on one device, as a user of TrainState writes it."""

    @jax.jit
    def step(state, batch, rng):
        rng = {"dropout": jax.random.fold_in(rng["dropout"], state.step)}
        loss = lambda params: loss_fn(params, batch, rng=rng, model_state=state.batch_stats)
        grads, batch_stats = jax.grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=batch_stats)

    state = start(optax.adam(1e-2))
    for i in range(steps):
        state = step(state, batch_of(i), RNG)
    return state


# Other kinds of state on this optimizer: test_nnx.py.
@pytest.mark.parametrize("method", ["mean", "sparse_loco"])
def test_it_fits_as_dense_training_does_and_resumes(method):
    mesh = jax.make_mesh((REPLICAS,), ("replica",))
    state = start(jaxcomp.flax.on_mesh(USER_METHODS[method](1e-2), mesh, "replica"))
    untrained, first = error(state), 60 * PATIENCE.get(method, 1) - 10
    state, _ = trained(state, first)
    saved = jax.tree.map(jnp.copy, state)
    state, metrics = trained(state, 10, first=first)
    assert state.step == first + 10 and not metrics["skipped"]
    assert error(state) < 1.5 * error(dense(60)) < 0.3 * untrained
    again, _ = trained(saved, 10, first=first)  # the same keys: nothing but the state counts
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(again.params), strict=True):
        np.testing.assert_array_equal(one_value(x), one_value(y))


def linear_state():
    mesh = jax.make_mesh((REPLICAS,), ("replica",))
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    tx = jaxcomp.flax.on_mesh(optax.chain(mean, optax.sgd(1.0)), mesh, "replica")
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=tx, batch_stats=None)


def linear_loss(params, batch, **given):
    return jnp.mean(batch @ params["w"])


def test_its_shapes_may_be_asked_for_and_its_step_be_traced():
    shapes = jax.eval_shape(linear_state)
    assert shapes.params["w"].shape == (3,) and shapes.step.shape == ()
    step = jax.jit(jaxcomp.flax.train_state_step(linear_loss).__call__)
    state, _ = step(linear_state(), np.ones((REPLICAS, 3), np.float32))
    np.testing.assert_array_equal(state.params["w"], np.zeros(3))


def test_the_field_of_the_model_state_may_be_empty():
    step = jaxcomp.flax.train_state_step(linear_loss, model_state="batch_stats")
    state, _ = step(linear_state(), np.ones((REPLICAS, 3), np.float32))
    assert state.step == 1 and state.batch_stats is None


class AveragedState(train_state.TrainState):
    average: Any


def test_another_field_may_begin_as_the_parameters():
    start, mesh = {"w": jnp.ones(3)}, jax.make_mesh((REPLICAS,), ("replica",))
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    tx = jaxcomp.flax.on_mesh(optax.chain(mean, optax.sgd(1.0)), mesh, "replica")
    state = AveragedState.create(apply_fn=None, params=start, tx=tx, average=start)
    state, _ = jaxcomp.flax.train_state_step(linear_loss)(state, np.ones((REPLICAS, 3), np.float32))
    average = optax.incremental_update(state.params, state.average, 0.25)
    np.testing.assert_array_equal(average["w"], np.full(3, 0.75))


def test_a_number_in_the_place_of_a_key_is_told():
    step = jaxcomp.flax.train_state_step(linear_loss)
    with pytest.raises(ValueError, match=r"got rng=3, which is no key; write rng=jax.random.key"):
        step(linear_state(), np.ones((REPLICAS, 3), np.float32), rng=3)


def test_flax_serializes_what_is_kept_in_few_bits_and_in_shards():
    start = np.random.default_rng(0).normal(size=(REPLICAS, 8)).astype(np.float32)
    shards = jaxcomp.qsdp("replica").shard({"w": start}, mesh_of(REPLICAS))
    for node in (encode(jnp.asarray(start), 8), encode(jnp.asarray(start), 16), shards):
        back = serialization.from_bytes(
            jax.tree.map(jnp.zeros_like, node), serialization.to_bytes(node)
        )
        assert jax.tree.structure(back) == jax.tree.structure(node)
        jax.tree.map(np.testing.assert_array_equal, back, node)


def test_without_flax_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(ModuleNotFoundError, match="jaxcomp.flax needs Flax.* pip install flax"):
        runpy.run_path(jaxcomp.flax.__file__)


def test_a_package_that_flax_lacks_is_named_itself(monkeypatch, tmp_path):
    (tmp_path / "flax.py").write_text("import msgpack_is_missing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flax")
    with pytest.raises(ModuleNotFoundError, match="No module named 'msgpack_is_missing'"):
        runpy.run_path(jaxcomp.flax.__file__)


def test_what_is_bound_to_a_mesh_is_refused_elsewhere_with_what_to_write():
    mesh = mesh_of(REPLICAS)
    tx = jaxcomp.flax.on_mesh(jaxcomp.cocktail_sgd(optax.adam(1e-2), "replica"), mesh, "replica")
    params = {"w": jnp.ones(4)}
    message = r"on_mesh has bound .*state_shapes the one that on_mesh got.* keep tx"
    with pytest.raises(ValueError, match=message):
        jaxcomp.state_shapes(tx, params, 4, mesh, "replica")
    with pytest.raises(ValueError, match=message):
        jaxcomp.train_step(lambda params, batch: 0.0, tx, mesh, "replica").init(params)


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 2, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.linear(x)


class CountingState(train_state.TrainState):
    calls: Any


def test_its_parameters_may_be_the_state_of_an_nnx_model():
    """As in Flax's example of nnx with a TrainState."""
    graphdef, params, calls = nnx.split(Counting(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, model_state):
        model = nnx.merge(graphdef, params, model_state, copy=True)
        loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        return loss, nnx.state(model, nnx.filterlib.Not(nnx.Param))

    mean = optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), optax.sgd(0.1))
    tx = jaxcomp.flax.on_mesh(mean, jax.make_mesh((REPLICAS,), ("replica",)), "replica")
    state = CountingState.create(apply_fn=None, params=params, tx=tx, calls=calls)
    alone = CountingState.create(apply_fn=None, params=params, tx=optax.sgd(0.1), calls=calls)
    form = jax.tree.structure((state.params, state.calls))
    step = jaxcomp.flax.train_state_step(loss_fn, model_state="calls")
    for number in range(3):
        batch = batch_of(number)
        grads, counted = jax.grad(loss_fn, has_aux=True)(alone.params, batch, alone.calls)
        alone = alone.apply_gradients(grads=grads, calls=counted)
        state, _ = step(state, batch)
    assert jax.tree.structure((state.params, state.calls)) == form
    assert nnx.merge(graphdef, state.params, state.calls).calls[...] == 3
    for got, want in zip(*map(jax.tree.leaves, (state.params, alone.params)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
