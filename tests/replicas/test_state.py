"""States: what varies is kept as rows, fields are found, and drifts make local parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers.replicas import PARAMS, everywhere, mesh_of, on, rows, transform


def test_wrapping_twice_is_wrapping_once():
    mesh, batch = mesh_of(2), rows(mesh_of(2), np.ones((2, 6), np.float32))
    tx = jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica")
    loss_fn = lambda params, batch: jnp.sum((batch @ params["kernel"] - 1.0) ** 2)
    found = []
    for method in (tx, jaxcomp.per_replica(tx, "replica")):
        init, step = jaxcomp.train_step(loss_fn, method, mesh, "replica")
        params = everywhere(mesh, PARAMS)
        found.append(step(params, init(params), batch)[1])
    jax.tree.map(np.testing.assert_array_equal, *found)
    init, step = jaxcomp.train_step(
        loss_fn, optax.chain(jaxcomp.per_replica(tx, "replica")), mesh, "replica"
    )
    params = everywhere(mesh, PARAMS)
    with pytest.raises(ValueError, match=r"drift of shape \(1, 6\) .* nothing around it"):
        step(params, init(params), batch)


def test_a_drift_without_rows_is_refused():
    mesh, params = mesh_of(2), everywhere(mesh_of(2), PARAMS)
    # Cut over the replicas along an axis of its own, as out_specs for what is not wrapped say.
    state = Drifting({"bias": np.zeros(12, "f"), "kernel": np.zeros((12, 8), "f")}, np.float32(0))
    local = lambda params, state: jaxcomp.local_params(params, state, "replica")
    specs = (P(), Drifting(P("replica"), P()))
    with pytest.raises(ValueError, match=r"drift of shape \(\) .* parameter of shape \(6,\)"):
        on(mesh, local, specs, P("replica"))(params, state)


@jaxcomp.MethodState.register
class Drifting(NamedTuple):
    drift: Any
    mean: Any


def drifting():
    """Keeps half of the local update as drift; a row for each replica."""

    def init(params):
        return Drifting(jax.tree.map(jnp.zeros_like, params), jnp.float32(0))

    def update(updates, state, params=None):
        drift = jax.tree.map(lambda d, u: d + u / 2, state.drift, updates)
        mean = jax.tree.map(lambda u: lax.pmean(u, "replica"), updates)
        return mean, Drifting(drift, state.mean + jnp.mean(mean["kernel"]))

    return optax.GradientTransformation(init, update)


def test_what_varies_is_found_and_kept_as_rows():
    mesh = mesh_of(4)
    init, update = transform(drifting(), mesh, PARAMS)
    params = everywhere(mesh, PARAMS)
    state = init(params)
    assert state.drift["kernel"].shape == (4, 6, 8) and state.mean.shape == ()
    assert state.drift["kernel"].sharding.spec == P("replica")
    x = np.arange(4, dtype=np.float32)
    grads = {"bias": np.ones((4, 6), np.float32) * x[:, None]}
    grads["kernel"] = np.ones((4, 6, 8), np.float32) * x[:, None, None]
    for _ in range(2):
        _, state = update(rows(mesh, grads), state, params)
    np.testing.assert_array_equal(state.drift["kernel"], grads["kernel"])
    assert float(state.mean) == 2 * 1.5


def test_the_update_is_traced_once_for_parameters_of_the_same_types():
    traced = []

    def update(updates, state, params=None):
        traced.append(updates["w"].shape)
        return inner.update(updates, state, params)

    inner = drifting()
    kernel = lambda size: everywhere(mesh_of(2), {"w": np.ones(size, "f")} | PARAMS)
    tx = jaxcomp.per_replica(optax.GradientTransformation(inner.init, update), "replica")
    init, _ = jaxcomp.train_step(lambda p, x: 0.0, tx, mesh_of(2), "replica")
    first = init(kernel(3))
    once = len(traced)
    again = jaxcomp.train_step(lambda p, x: 0.0, tx, mesh_of(2), "replica").init(kernel(3))
    assert len(traced) == once == 2  # it finds what varies, and that nothing more does
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert jax.tree.map(lambda x: x.sharding, first) == jax.tree.map(lambda x: x.sharding, again)
    init(kernel(4))
    assert traced[2:] == [(4,)] * 2


def test_local_params_are_the_consensus_plus_this_replicas_drift():
    mesh = mesh_of(4)
    params = {"w": jnp.full((2, 3), 10.0), "half": jnp.ones(2, "bfloat16")}
    drift = {"w": np.arange(4, dtype=np.float32)[:, None, None] * np.ones((2, 3), np.float32)}
    drift["half"] = np.full((4, 2), 0.5, np.float32)
    state = (optax.EmptyState(), Drifting(rows(mesh, drift), jnp.float32(0)))

    def local(params, state):
        assert state[1].drift["w"].shape == (1, 2, 3)
        return jax.tree.map(lambda x: x[None], jaxcomp.local_params(params, state, "replica"))

    specs = (optax.EmptyState(), Drifting(P("replica"), P()))
    got = on(mesh, local, (P(), specs), P("replica"))(everywhere(mesh, params), state)
    np.testing.assert_array_equal(got["w"], 10 + drift["w"])
    assert got["half"].dtype == jnp.bfloat16 and np.all(np.float32(got["half"]) == 1.5)


def test_drifts_of_several_methods_are_all_added():
    mesh = mesh_of(2)
    drift = {"w": np.array([[1.0], [2.0]], np.float32)}
    state = {"a": Drifting(rows(mesh, drift), 0), "b": Drifting(rows(mesh, drift), 0)}
    local = lambda p, s: jaxcomp.local_params(p, s, "replica")
    specs = Drifting(P("replica"), P())
    local = on(mesh, local, (P(), {"a": specs, "b": specs}), P("replica"))
    np.testing.assert_array_equal(local({"w": jnp.full(1, 10.0)}, state)["w"], [12.0, 14.0])


def test_branches_that_are_hidden_from_a_method_move_no_drift_to_other_leaves():
    mesh, hidden = mesh_of(2), optax.MaskedNode()
    params = {"a": {"x": jnp.zeros(1), "y": jnp.zeros(1)}, "b": jnp.zeros(1), "empty": {}}
    drift = {"a": hidden, "b": rows(mesh, np.ones((2, 1), np.float32)), "empty": hidden}
    state = Drifting(drift, jnp.float32(0))
    local = lambda p, s: jaxcomp.local_params(p, s, "replica")
    local = on(mesh, local, (P(), Drifting(P("replica"), P())), P("replica"))(params, state)
    mean = jaxcomp.mean_params(params, state, mesh, "replica")
    for found in (local, mean):
        sums = [float(x.sum()) for x in (found["a"]["x"], found["a"]["y"])]
        assert sums == [0.0, 0.0] and np.all(np.asarray(found["b"]) == 1)


def test_a_drift_of_another_model_is_told():
    """As with two models, of which each has an optimizer."""
    mesh = mesh_of(2)
    state = Drifting({"w": rows(mesh, np.ones((2, 1), np.float32))}, 0)
    models = ({"w": jnp.zeros(1)}, {"w": jnp.zeros(1)})
    with pytest.raises(ValueError, match="a drift of 1 parameters, and there are 2.*its own state"):
        jaxcomp.mean_params(models, (state, state), mesh, "replica")
