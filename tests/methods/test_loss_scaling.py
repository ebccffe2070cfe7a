"""Gradients of float16 in its range: one scale for all replicas, which a bad step halves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas import protocol
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows, state_of

TINY = 1e-9  # a gradient that float16 has no number for; times 2**15 it has


def loss_fn(params, batch):
    """Its gradient is TINY times the batch's mean, and it is computed in float16."""
    hidden = (params["a"] * jnp.float16(1e-4)) * jnp.mean(batch).astype(jnp.float16)
    return jnp.sum(hidden.astype(jnp.float32)) * TINY / 1e-4


def mean_sgd(rate=1e6):
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    return jaxcomp.master_weights(optax.chain(mean, optax.sgd(rate)))


def scaled(tx, **options):
    return jaxcomp.loss_scale(tx, "replica", **options)


def train(tx, batches, dtype=jnp.float16, simulated=False, accumulate=1):
    """Parameters, states after each step and the losses; batches `[4, n]`."""
    if simulated:
        init, step = jaxcomp.simulated_train_step(loss_fn, tx, 2, "replica", accumulate=accumulate)
        params, place = {"a": jnp.ones(4, dtype)}, jnp.asarray
    else:
        mesh = mesh_of(2)
        init, step = jaxcomp.train_step(loss_fn, tx, mesh, "replica", accumulate=accumulate)
        params = everywhere(mesh, {"a": jnp.ones(4, dtype)})
        place = lambda batch: rows(mesh, batch)
    states, losses = [init(params)], []
    for batch in batches:
        old = jax.tree.map(jnp.copy, states[-1])
        params, state, metrics = step(params, old, place(np.float32(batch)))
        states.append(state)
        losses.append(np.asarray(metrics["loss"]))
    return params, states, losses


GOOD = np.ones((4, 2))
BAD = np.array([[1.0, 1.0]] * 3 + [[np.inf, 1.0]])


@pytest.mark.parametrize("form", ["mesh", "simulated", "accumulate"])
def test_small_gradients_arrive_and_losses_are_reported_unscaled(form):
    how = {"simulated": form == "simulated", "accumulate": 2 if form == "accumulate" else 1}
    params, states, losses = train(scaled(mean_sgd()), [GOOD] * 4, **how)
    moved = np.float32(params["a"]) + np.asarray(state_of(states[-1], "remainder")["a"])
    np.testing.assert_allclose(moved, 1 - 4 * 1e6 * TINY, rtol=1e-4)
    np.testing.assert_allclose(losses[0], 4 * TINY, rtol=1e-2)
    lost, _, _ = train(mean_sgd(), [GOOD] * 4, **how)
    assert np.all(np.float32(lost["a"]) == 1)


METHODS = {
    "compressed_mean": mean_sgd(),
    "zero_one_adam": jaxcomp.zero_one_adam(1e-2, "replica", eps=1e-20),
    "cocktail_sgd": jaxcomp.cocktail_sgd(optax.adam(1e-2, eps=1e-20), "replica"),
}


@pytest.mark.filterwarnings("ignore:parameters are")
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_gradient_of_one_replica_halves_the_scale_of_all_and_changes_nothing_else(method):
    tx = scaled(METHODS[method], initial=2.0**12, growth_steps=2)
    _, states, _ = train(tx, [GOOD, BAD, BAD, GOOD, GOOD])
    scales = [float(one_value(state.loss_scale)) for state in states]
    assert scales == [2.0**12, 2.0**12, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    assert [int(one_value(state.overflows)) for state in states] == [0, 0, 1, 2, 2, 2]
    first, kept, later = (states[i].inner for i in (1, 3, 4))
    same = jax.tree.map(lambda x, y: np.array_equal(x, y), first, kept)
    assert all(jax.tree.leaves(same))
    assert not all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), kept, later)))


@pytest.mark.parametrize("options", [{"param_specs": P("fsdp")}, {"fast_axis": "fsdp"}])
def test_all_devices_of_all_replicas_agree(options):
    mesh = mesh_of(2, 2)
    init, step = jaxcomp.train_step(loss_fn, scaled(mean_sgd()), mesh, "replica", **options)
    params = everywhere(mesh, {"a": jnp.ones(4, jnp.float16)})
    state = init(params)
    for batch in (GOOD, BAD):
        params, state, _ = step(params, state, rows(mesh, np.float32(batch)))
    assert one_value(state.loss_scale) == 2.0**14 and one_value(state.overflows) == 1
    moved = np.float32(params["a"]) + np.asarray(state_of(state, "remainder")["a"])
    np.testing.assert_allclose(moved, 1 - 1e6 * TINY, rtol=1e-4)


def test_the_scale_stays_in_its_bounds():
    _, states, _ = train(scaled(mean_sgd(), initial=1.5), [BAD, BAD])
    assert [float(state.loss_scale) for state in states] == [1.5, 1.0, 1.0]
    _, states, _ = train(scaled(mean_sgd(0.0), initial=2.0**23, growth_steps=1), [GOOD] * 2)
    assert [float(state.loss_scale) for state in states] == [2.0**23, 2.0**24, 2.0**24]


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="2 loss scales.*write jaxcomp.loss_scale once"):
        train(scaled(scaled(mean_sgd())), [GOOD])
    alone = scaled(optax.sgd(1.0)).init({"a": jnp.ones(4)})
    assert protocol.exchanging(alone) == "loss_scale"  # by which qsdp_train_step refuses it
    mesh = mesh_of(2)
    tx = scaled(METHODS["cocktail_sgd"])
    init, step = jaxcomp.overlapped_train_step(loss_fn, tx, mesh, "replica")
    params = everywhere(mesh, {"a": jnp.ones(4)})
    with pytest.raises(ValueError, match="overlapped_train_step.*write jaxcomp.train_step"):
        step(params, init(params), rows(mesh, np.float32(GOOD)))
