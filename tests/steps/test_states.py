"""States that a step gets from a file: in NumPy, or of another number of replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomp
from tests.helpers.replicas import mesh_of, simulated

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


LOW_RANK = functools.partial(jaxcomp.dion, 1e-2, "replica")
SGD_ALONE = optax.sgd(0.1, momentum=0.9)
SGD = optax.chain(EXACT, SGD_ALONE)


@pytest.mark.parametrize("make", [jaxcomp.train_step, simulated(2)])
def test_a_state_of_other_shapes_is_refused(make):
    """Dion would go on with the rank of its state, and a number is broadcast to a parameter."""
    _, (params, state) = made(LOW_RANK(rank=2), mesh_of(2))
    state = jax.device_get(state)
    _, step = make(loss, LOW_RANK(rank=4), mesh_of(2), "replica")
    with pytest.raises(ValueError, match=r"float32\[16, 2\] at .*right.*needs float32\[16, 4\]"):
        step(params, state, BATCH)
    init, step = make(loss, SGD, mesh_of(2), "replica")
    params, one = {"w": jnp.ones((16, 16))}, {"w": jnp.ones((1, 1))}
    with pytest.raises(ValueError, match="trace.*of other parameters.*Write the arguments of"):
        step(params, init(one), BATCH)


def test_a_state_of_fewer_bits_is_refused():
    """What a residual in bfloat16 rounds off is never sent; wider ones lose nothing."""
    step, (params, state) = made(SGD, mesh_of(2))
    params, state = jax.device_get((params, state))
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, state)
    with pytest.raises(ValueError, match="bfloat16.*needs float32.*rounded when it was saved"):
        step(params, narrow, BATCH)
    step(params, jax.tree.map(lambda x: np.asarray(x, np.float64) if x.ndim else x, state), BATCH)


def test_so_is_one_of_shards():
    """One column would be broadcast to all of them."""
    step, (shards, _) = shards_of(mesh_of(2))
    momentum = jaxcomp.qsdp_train_step(loss, SGD_ALONE, mesh_of(2), jaxcomp.qsdp("replica"))
    with pytest.raises(ValueError, match="another transformation.*that this step does not know"):
        step(shards, momentum.init(shards), BATCH)
    other = jax.tree.map(lambda x: x[:, :1] if x.ndim > 1 else x, momentum.init(shards))
    with pytest.raises(ValueError, match=r"float32\[2, 1\] at .*needs float32\[2, 128\]"):
        momentum.step(shards, other, BATCH)
    coded = jaxcomp.qsdp("replica", exact=ANYTHING)
    shards = coded.shard({"w": jnp.ones((16, 16))}, mesh_of(2))
    state = jaxcomp.qsdp_train_step(loss, SGD_ALONE, mesh_of(2), coded).init(shards)
    with pytest.raises(ValueError, match="the same names, and their nodes are of other types or c"):
        momentum.step(shards_of(mesh_of(2))[1][0], state, BATCH)


@pytest.mark.parametrize("options", [{"param_specs": jax.P("fsdp")}, {"fast_axis": "fsdp"}])
def test_shapes_are_those_of_whole_arrays(options):
    """Of shards, of shares of a fast axis that are filled up, and of buckets of each device."""
    init, step = jaxcomp.train_step(loss, METHODS["drift"], mesh_of(2, 2), "replica", **options)
    params = {"w": jnp.ones((16, 5))}
    state = jax.eval_shape(init, params)
    jax.eval_shape(step, params, state, BATCH)
    bad = optax.tree.set(state, drift={"w": jax.ShapeDtypeStruct((2, 16, 3), jnp.float32)})
    with pytest.raises(ValueError, match=r"float32\[2, 16, 3\] at .*drift.*needs float32\[2, 16, "):
        jax.eval_shape(step, params, bad, BATCH)
