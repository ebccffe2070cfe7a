"""Narrow parameters with float32 masters: they train as float32 ones, and round nothing off."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers import replicas
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows, state_of

RATE = 2e-4
SHAPES = {"kernel": (4, 8), "bias": (8,)}


def mean_adam(rate=RATE):
    return optax.chain(
        jaxcomp.compressed_mean(jaxcomp.quantize(4, block=8), "replica"), optax.adamw(rate)
    )


METHODS = {
    "compressed_mean": mean_adam(),
    "one_bit_adam": jaxcomp.one_bit_adam(RATE, "replica", freeze_step=2),
    "one_bit_lamb": jaxcomp.one_bit_lamb(RATE, "replica", freeze_step=2, weight_decay=0.1),
    "zero_one_adam": jaxcomp.zero_one_adam(
        RATE, "replica", sync_at=jaxcomp.schedules.every(2, 100, after=1)
    ),
}
KEEPING = {
    "cocktail_sgd": jaxcomp.cocktail_sgd(optax.adam(RATE), "replica"),
    "slamb": jaxcomp.slamb(RATE, "replica", sync_every=1),
    "sharded_optimizer": jaxcomp.sharded_optimizer(optax.adam(RATE), "replica"),
}


def linear(params, batch):
    """Its gradients, whole numbers, are the same at any parameters."""
    slopes = jnp.mean(batch, 0).astype(jnp.float32)
    return sum(jnp.sum(x.astype(jnp.float32) @ slopes) for x in jax.tree.leaves(params))


def train(tx, dtype, steps=6, mesh=None, shapes=SHAPES, **options):
    """Parameters, masters and state of steps from ones."""
    mesh = mesh or mesh_of(2)
    params = {k: jnp.ones(shape, dtype) for k, shape in shapes.items()}
    draw = lambda number: np.random.default_rng(number).integers(1, 9, (mesh.size, 8))
    batches = [draw(number).astype(np.float32) for number in range(steps)]
    params, state, _ = replicas.trained(linear, tx, mesh, params, batches, **options)
    rest = state_of(state, "remainder") if "MasterWeights" in str(type(state)) else None
    masters = jax.tree.map(np.float32, params)
    if rest is not None:
        masters = jax.tree.map(lambda p, r: p if r is None else p + np.asarray(r), masters, rest)
    return jax.tree.map(np.asarray, params), masters, state


@pytest.mark.parametrize("method", METHODS)
def test_masters_are_the_parameters_of_a_run_in_float32(method):
    params, masters, _ = train(jaxcomp.master_weights(METHODS[method]), jnp.bfloat16)
    wanted, _, _ = train(METHODS[method], jnp.float32)
    for name in SHAPES:
        assert np.all(np.abs(wanted[name] - 1) > RATE / 2)
        # Each step rounds a sum to float32, once in either run.
        np.testing.assert_allclose(masters[name], wanted[name], atol=6 * 2.0**-23, rtol=0)
        np.testing.assert_array_equal(params[name], masters[name].astype(jnp.bfloat16))


def test_without_masters_small_updates_are_lost_and_it_is_said():
    with pytest.warns(UserWarning, match="are bfloat16.*below 1/512 of a parameter.*master_weig"):
        params, _, _ = train(mean_adam(), jnp.bfloat16, steps=8)
    assert np.all(params["kernel"] == 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept, _, _ = train(jaxcomp.master_weights(mean_adam()), jnp.bfloat16, steps=20)
        assert np.all(kept["kernel"] < 1)
        train(mean_adam(), jnp.float32, steps=1)


@pytest.mark.parametrize("method", KEEPING)
def test_methods_that_keep_what_is_rounded_off_refuse_masters(method):
    tx = jaxcomp.master_weights(KEEPING[method])
    with pytest.raises(ValueError, match="round off by itself.*leave master_weights out"):
        train(tx, jnp.bfloat16, steps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params, _, _ = train(KEEPING[method], jnp.bfloat16, steps=20)
    assert np.any(params["kernel"] < 1)  # cocktail_sgd sends few of them at a time


def test_float32_leaves_beside_narrow_ones_keep_nothing():
    mesh, params = mesh_of(2), {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3)}
    tx = jaxcomp.master_weights(mean_adam())
    init, step = jaxcomp.train_step(
        lambda p, batch: jnp.sum(p["a"].astype(jnp.float32) + p["b"]) * jnp.mean(batch),
        tx,
        mesh,
        "replica",
    )
    params = everywhere(mesh, params)
    params, state, _ = step(params, init(params), rows(mesh, np.ones((2, 1), np.float32)))
    assert state.remainder["b"] is None and state.remainder["a"].dtype == np.float32
    # Both have moved by the same step, the narrow one in its remainder.
    np.testing.assert_array_equal(
        one_value(params["a"]).astype(np.float32) + one_value(state.remainder["a"]),
        one_value(params["b"]),
    )


@pytest.mark.parametrize("options", [{"param_specs": P(None, "fsdp")}, {"fast_axis": "fsdp"}])
def test_masters_lie_as_the_parameters_do(options):
    shapes = {"kernel": (4, 8)}
    tx = jaxcomp.master_weights(mean_adam())
    _, masters, state = train(tx, jnp.bfloat16, mesh=mesh_of(2, 2), shapes=shapes, **options)
    assert state.remainder["kernel"].sharding.spec == P(None, "fsdp")
    _, wanted, _ = train(tx, jnp.bfloat16, mesh=mesh_of(4), shapes=shapes)
    assert np.all(wanted["kernel"] < 1)
    # Codes of shards round elsewhere; the steps are those of Adam on gradients of one sign.
    np.testing.assert_allclose(masters["kernel"], wanted["kernel"], atol=RATE / 2, rtol=0)


def test_masters_go_around_layers_steps_and_groups_and_to_other_numbers_of_replicas():
    groups = {"a": jaxcomp.master_weights(mean_adam()), "b": jaxcomp.master_weights(mean_adam())}
    stacked = jaxcomp.by_path(("kernel", True), (".*", False))
    steps = optax.MultiSteps(jaxcomp.master_weights(mean_adam()), 2).gradient_transformation()
    for tx in (
        jaxcomp.per_layer(jaxcomp.master_weights(mean_adam()), stacked),
        jaxcomp.master_weights(optax.MultiSteps(mean_adam(), 2).gradient_transformation()),
        optax.partition(groups, {"kernel": "a", "bias": "b"}),
        steps,
    ):
        _, _, state = train(tx, jnp.bfloat16, steps=2)
        remainders = jax.tree.leaves(optax.tree_utils.tree_get_all_with_path(state, "remainder"))
        assert any(np.any(np.asarray(x)) for x in remainders if hasattr(x, "shape"))
    init, _ = jaxcomp.train_step(linear, steps, mesh_of(4), "replica")
    like = jax.eval_shape(init, {k: jnp.ones(s, jnp.bfloat16) for k, s in SHAPES.items()})
    resized = jaxcomp.resize(jax.device_get(state), like)
    np.testing.assert_array_equal(
        state_of(resized, "remainder")["bias"], state_of(state, "remainder")["bias"]
    )


def test_parameters_are_needed():
    tx = jaxcomp.master_weights(optax.sgd(0.1))
    params = {"a": jnp.ones(2, jnp.bfloat16)}
    with pytest.raises(ValueError, match="needs the parameters; write tx.update"):
        tx.update(params, tx.init(params))
