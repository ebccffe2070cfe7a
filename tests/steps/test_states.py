"""States that a step gets from a file: in NumPy, or of another number of replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers.replicas import mesh_of

BATCH = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
EXACT = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
EXPLICIT = jax.make_mesh((2,), ("replica",), axis_types=(AxisType.Explicit,))
ANYTHING = lambda path, leaf: False  # nothing is sent exactly: each leaf has a residual
MEAN = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica", exact=ANYTHING)
METHODS = {
    "mean": optax.chain(MEAN, optax.sgd(0.1)),
    "drift": jaxcomp.cocktail_sgd(
        optax.sgd(0.1), "replica", compressor=jaxcomp.quantize(4), delayed=False
    ),
}


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def made(tx, mesh, make=jaxcomp.train_step):
    """The step, and parameters and a state after one."""
    init, step = make(loss, tx, mesh, "replica")
    params = {"w": jnp.ones((16, 16))}
    return step, step(params, init(params), BATCH)[:2]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", METHODS)
def test_a_state_in_numpy_goes_on_a_mesh_of_explicit_axes(name):
    step, arrays = made(METHODS[name], EXPLICIT)
    saved = jax.device_get(arrays)
    found = []
    for params, state in (saved, arrays):
        measured = jaxcomp.eval_step(loss, EXPLICIT, "replica")(params, state, BATCH)
        # Without a drift these are the parameters, which the step takes.
        means = jax.tree.map(np.array, jaxcomp.mean_params(params, state, EXPLICIT, "replica"))
        found.append(jax.device_get((measured, means, step(params, state, BATCH)[:2])))
    jax.tree.map(np.testing.assert_array_equal, *found)


def shards_of(mesh):
    """The step of shards, and what it starts from."""
    fsdp = jaxcomp.qsdp("replica")
    sharded_loss = lambda shards, batch: loss(fsdp.gather(shards), batch)
    init, step = jaxcomp.qsdp_train_step(sharded_loss, optax.sgd(0.1), mesh, fsdp)
    shards = fsdp.shard({"w": jnp.ones((16, 16))}, mesh)
    return step, (shards, init(shards))


LATE = jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica")
IN_OTHERS = {
    "overlapped": (functools.partial(made, LATE, make=jaxcomp.overlapped_train_step), False),
    "in another program": (functools.partial(made, METHODS["drift"]), True),
    "shards in another program": (shards_of, True),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", IN_OTHERS)
def test_a_state_in_numpy_goes_on_in_other_steps(name):
    make, jitted = IN_OTHERS[name]
    step, arrays = make(mesh=EXPLICIT)
    whole = lambda params, state: step(params, state, BATCH)[0]
    whole = jax.jit(whole) if jitted else whole
    jax.tree.map(np.testing.assert_array_equal, whole(*jax.device_get(arrays)), whole(*arrays))


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.trace(0.9), EXACT, optax.sgd(0.1)),
        optax.MultiSteps(optax.chain(EXACT, optax.sgd(0.1)), 2),
        METHODS["drift"],
    ],
)
def test_a_state_of_more_replicas_is_refused(tx):
    """Without rows of buckets nothing fails: half of the rows would be lost, without a word."""
    tx = tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx
    _, arrays = made(tx, mesh_of(4))
    init, step = jaxcomp.train_step(loss, tx, mesh_of(2), "replica")
    params, state = jax.device_get(arrays)
    with pytest.raises(ValueError, match="4 replicas' rows at .* has 2 .* jaxcomp.resize"):
        step(params, state, BATCH)
    step(params, jaxcomp.resize(state, jax.eval_shape(init, params)), BATCH)


@pytest.mark.parametrize("rate", [0.0, jnp.float32(0)])
def test_one_rate_for_optimizers_of_replicas_is_refused(rate):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx = jaxcomp.cocktail_sgd(inner, "replica", compressor=jaxcomp.identity(), delayed=False)
    step, (params, state) = made(tx, mesh_of(2))
    one = optax.tree.set(state, learning_rate=rate)
    with pytest.raises(ValueError, match=r"learning_rate.* one number.* write jnp.full\(2, "):
        step(params, one, BATCH)
    before = np.asarray(params["w"])
    each = optax.tree.set(state, learning_rate=jnp.full(2, rate))
    np.testing.assert_array_equal(step(params, each, BATCH)[0]["w"], before)


def test_parameters_may_be_numbers_of_python():
    init, step = jaxcomp.train_step(
        lambda params, batch: jnp.mean(batch) * params["scale"],
        optax.chain(EXACT, optax.sgd(0.5)),
        mesh_of(2),
        "replica",
    )
    params = {"scale": 1.5}
    params, state, _ = step(params, init(params), np.ones(2, np.float32))
    params, _, _ = step(params, state, np.ones(2, np.float32))
    assert params["scale"] == 0.5


def test_a_state_of_another_transformation_is_refused():
    _, (params, state) = made(optax.chain(MEAN, optax.sgd(0.1)), mesh_of(2))
    tx = optax.chain(MEAN, optax.sgd(0.1, momentum=0.9))
    _, step = jaxcomp.train_step(loss, tx, mesh_of(2), "replica")
    with pytest.raises(ValueError, match="the state is of another transformation"):
        step(params, state, BATCH)
