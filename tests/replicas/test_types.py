"""Replicas and types: the silent all-reduce is refused, rows are kept, states are resized."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas import types
from jaxcomp.replicas.state import field, fields
from tests.helpers.replicas import everywhere, mesh_of, rows, state_of, transform

PARAMS = {"bias": np.zeros(6, np.float32), "kernel": np.zeros((6, 8), np.float32)}
REPLICATED = P()


def lossy_mean(**options):
    exact = lambda path, leaf: path == "bias"
    return jaxcomp.compressed_mean(jaxcomp.quantize(2, block=8), "replica", exact=exact, **options)


def on(mesh, function, in_specs=REPLICATED, out_specs=REPLICATED, **options):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)
    )


def test_gradients_at_replicated_parameters_are_refused_and_local_ones_are_not():
    mesh = mesh_of(2)

    def grads(at, params, x):
        return jax.grad(lambda p: jnp.sum(p["kernel"][0] * x[0]))(at(params))

    def check(at):
        def step(params, x):
            types.require_varying(grads(at, params, x), "replica")
            return x

        x = rows(mesh, np.ones((2, 8), np.float32))
        return on(mesh, step, (P(), P("replica")), P("replica"))(everywhere(mesh, PARAMS), x)

    with pytest.raises(ValueError, match=r"\['bias'\]. must vary over 'replica'.*past any comp"):
        check(lambda params: params)
    check(lambda params: jaxcomp.local_params(params, (), "replica"))


@pytest.mark.parametrize("use", ["local_params", "init", "update"])
def test_an_unknown_axis_is_refused(use):
    tx = jaxcomp.per_replica(lossy_mean(), "replica")
    state = lossy_mean
    calls = {
        "local_params": lambda p: jaxcomp.local_params(p, (), "replicas"),
        "init": lambda p: jaxcomp.per_replica(optax.sgd(1.0), "replicas").init(p),
        "update": lambda p: jaxcomp.per_replica(optax.sgd(1.0), "replicas").update(p, state, p),
    }
    with pytest.raises(ValueError, match="axis 'replicas' is unknown here; run this inside"):
        on(mesh_of(2), calls[use])(PARAMS)
    with pytest.raises(ValueError, match="axis 'replica' is unknown here"):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"no axis 'replicas'; its axes are \('replica',\)"):
        jaxcomp.state_specs(tx, PARAMS, mesh_of(2), "replicas")


def test_an_init_outside_of_shard_map_says_what_to_write_with_flax():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    message = r"nnx.Optimizer and .*train_step\(.*, 'replica'\), for nnx .* nnx.split as params"
    with pytest.raises(ValueError, match=message):
        nnx.Optimizer(model, lossy_mean(), wrt=nnx.Param)


def test_unchecked_types_are_refused():
    with pytest.raises(ValueError, match="leave check_vma at True"):
        init = lambda p: jaxcomp.per_replica(lossy_mean(), "replica").init(p)
        on(mesh_of(2), init, check_vma=False)(PARAMS)


def test_what_is_not_wrapped_outermost_is_refused():
    mesh, mean = mesh_of(2), lossy_mean()
    wrapped = jaxcomp.per_replica(mean, "replica")
    for tx in (mean, optax.chain(wrapped, optax.sgd(1.0)), jaxcomp.per_replica(mean, "fsdp")):
        with pytest.raises(ValueError, match=r"nothing around it.*Write jaxcomp.per_replica\("):
            jaxcomp.state_specs(tx, PARAMS, mesh, "replica")
    with pytest.raises(ValueError, match=r"wrapped over \('replica',\) already.*axis 'fsdp'"):
        jaxcomp.per_replica(wrapped, "fsdp")


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


def test_fields_are_those_of_methods_and_not_of_parameters():
    params = {"drift": jnp.ones(2), "layers": [{"drift": jnp.ones(3)}]}
    state = {"a": (optax.adam(1.0).init(params), Drifting(params, 0)), "b": Drifting(1, 2)}
    assert fields(state, "drift") == [params, 1] and fields(state, "rounds") == []
    assert field(state["b"], "mean") == 2 and field(state, "rounds") is None
    with pytest.raises(KeyError, match="multiple values for 'drift'"):
        field(state, "drift")


def test_drifts_of_several_methods_are_all_added():
    mesh = mesh_of(2)
    drift = {"w": np.array([[1.0], [2.0]], np.float32)}
    state = {"a": Drifting(rows(mesh, drift), 0), "b": Drifting(rows(mesh, drift), 0)}
    local = lambda p, s: jaxcomp.local_params(p, s, "replica")
    specs = Drifting(P("replica"), P())
    local = on(mesh, local, (P(), {"a": specs, "b": specs}), P("replica"))
    np.testing.assert_array_equal(local({"w": jnp.full(1, 10.0)}, state)["w"], [12.0, 14.0])


def test_a_local_momentum_before_the_mean_gets_rows_too():
    mesh = mesh_of(2)
    tx = jaxcomp.per_replica(optax.chain(optax.trace(0.5), lossy_mean()), "replica")
    specs = jaxcomp.state_specs(tx, PARAMS, mesh, "replica")
    assert specs[0].trace == {"bias": P("replica"), "kernel": P("replica")}
    tx = jaxcomp.per_replica(optax.chain(lossy_mean(), optax.trace(0.5)), "replica")
    specs = jaxcomp.state_specs(tx, PARAMS, mesh, "replica")
    assert specs[1].trace == {"bias": P(), "kernel": P()}


def test_an_accumulator_of_multi_steps_gets_rows():
    tx = optax.MultiSteps(optax.chain(lossy_mean(), optax.adam(1e-2)), 2)
    tx = jaxcomp.per_replica(tx.gradient_transformation(), "replica")
    specs = jaxcomp.state_specs(tx, PARAMS, mesh_of(2), "replica")
    assert specs.acc_grads == {"bias": P("replica"), "kernel": P("replica")}
    assert state_of(specs, "mu") == {"bias": P(), "kernel": P()}


def test_specs_follow_sharded_parameters():
    mesh = mesh_of(2, 2)
    tx = jaxcomp.per_replica(optax.chain(lossy_mean(), optax.adam(1e-2)), "replica")
    param_specs = {"bias": P(), "kernel": P(None, "fsdp")}
    mean, (adam, _) = jaxcomp.state_specs(tx, PARAMS, mesh, "replica", param_specs)
    assert mean.count == P()
    assert mean.residual == {"bias": None, "kernel": P("replica", None, "fsdp")}
    assert mean.owner_residual == (None, P("replica", ("fsdp",)))
    assert adam.mu == adam.nu == param_specs
    with pytest.raises(ValueError, match="shard a parameter over the replica axis 'replica'"):
        jaxcomp.state_specs(tx, PARAMS, mesh, "replica", P("replica"))


def test_specs_follow_the_parameter_whose_whole_path_fits():
    params = {"w": np.zeros((8, 16), np.float32), "z": {"w": np.zeros((16, 8), np.float32)}}
    param_specs = {"w": P(None, "fsdp"), "z": {"w": P("fsdp", None)}}
    tx = jaxcomp.per_replica(optax.chain(lossy_mean(), optax.adam(1e-2)), "replica")
    _, (adam, _) = jaxcomp.state_specs(tx, params, mesh_of(2, 2), "replica", param_specs)
    assert adam.mu == adam.nu == param_specs


@functools.cache
def quantized_momentum(num_replicas):
    """Jitted once for all tests: `(init, update)`."""
    tx = optax.chain(lossy_mean(bucket_numel=20), optax.trace(0.9))
    return transform(tx, mesh_of(num_replicas), PARAMS)


def trained(num_replicas, num_steps=2):
    """A state of quantized SGD after some steps: `(init, update, params, state)`."""
    mesh = mesh_of(num_replicas)
    init, update = quantized_momentum(num_replicas)
    params = everywhere(mesh, PARAMS)
    state = init(params)
    for step in range(num_steps):
        _, state = update(rows(mesh, gradients(num_replicas, step)), state, params)
    return init, update, params, state


def gradients(num_replicas, step):
    rng = np.random.default_rng(step)
    return {k: rng.normal(size=(num_replicas, *p.shape)).astype("f") for k, p in PARAMS.items()}


def mean_residual(state):
    return np.asarray(state_of(state, "residual")["kernel"], np.float64).mean(axis=0)


def owned(state, numels=(20, 20, 8)):
    parts = [np.asarray(x).reshape(-1) for x in state_of(state, "owner_residual") if x is not None]
    assert all(not np.any(x[numel:]) for x, numel in zip(parts, numels, strict=True))
    return np.concatenate([x[:numel] for x, numel in zip(parts, numels, strict=True)])


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (4, 3), (4, 5), (1, 3), (3, 1)])
def test_a_resized_state_owes_what_the_old_one_did_and_goes_on(old, new):
    _, _, _, state = trained(old)
    init, update, params, _ = trained(new, 0)
    like = jax.eval_shape(init, params)
    resized = jaxcomp.resize(state, like)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), resized) == jax.tree.map(
        lambda x: (x.shape, x.dtype), like
    )
    residual = np.asarray(state_of(resized, "residual")["kernel"])
    # One rounding in the mean of up to four rows, two in its division.
    atol = 5 * 2.0**-24 * np.abs(mean_residual(state)).max() * old
    np.testing.assert_allclose(residual[0], mean_residual(state), rtol=0, atol=atol)
    assert np.all(residual == residual[0])
    assert np.any(owned(state)) or old == 1  # what one replica decodes, it encodes exactly
    np.testing.assert_array_equal(owned(resized), owned(state))
    np.testing.assert_array_equal(state_of(resized, "trace")["kernel"], state[1].trace["kernel"])
    assert int(state_of(resized, "count")) == 2

    mesh = mesh_of(new)
    specs = jax.tree.map(lambda x: x.sharding, init(params))
    grads = gradients(new, 2)
    updates, after = update(rows(mesh, grads), jax.device_put(resized, specs), params)
    step = np.float64(updates["kernel"]) - 0.9 * np.float64(state[1].trace["kernel"])
    out = step + mean_residual(after) + owned(after).reshape(6, 8)
    owed = mean_residual(resized) + owned(resized).reshape(6, 8)
    # About R + 8 roundings of values below 8.
    np.testing.assert_allclose(
        out, owed + grads["kernel"].mean(axis=0), rtol=0, atol=(new + 8) * 2.0**-24 * 8
    )


def test_four_to_two_to_four_keeps_what_owners_hold():
    *_, state = trained(4)
    like = {n: jax.eval_shape(trained(n, 0)[0], PARAMS) for n in (2, 4)}
    back = jaxcomp.resize(jaxcomp.resize(state, like[2]), like[4])
    for old, new in zip(
        state_of(state, "owner_residual"), state_of(back, "owner_residual"), strict=True
    ):
        if old is not None:
            np.testing.assert_array_equal(old, new)


def test_owners_of_shards_are_laid_out_shard_by_shard():
    def state(num_replicas, num_shards, numel):
        # Shard s holds 100 s + 0 ... 4 and zeros up to its buckets' size.
        flat = np.zeros((num_shards, numel), np.float32)
        flat[:, :5] = 100 * np.arange(num_shards)[:, None] + np.arange(5) + 1
        chunks = flat.reshape(num_shards, num_replicas, -1).swapaxes(0, 1)
        return jaxcomp.CompressedMeanState(jnp.int32(0), None, (chunks.reshape(num_replicas, -1),))

    old, new = state(2, 2, 6), state(4, 2, 8)
    place = NamedSharding(mesh_of(4, 2), P("replica", ("fsdp",)))
    like = new._replace(owner_residual=jax.device_put(new.owner_residual, place))
    got = jaxcomp.resize(old, like)
    np.testing.assert_array_equal(got.owner_residual[0], new.owner_residual[0])
    # A bucket that no other axis shards is one piece, on the same mesh.
    old, new = state(2, 1, 6), state(4, 1, 8)
    place = NamedSharding(mesh_of(4, 2), P("replica"))
    like = new._replace(owner_residual=jax.device_put(new.owner_residual, place))
    got = jaxcomp.resize(old, like)
    np.testing.assert_array_equal(got.owner_residual[0], new.owner_residual[0])


def test_rows_of_integers_and_flags_are_copied():
    old = {"count": jnp.array([7, 7], jnp.int32), "w": jnp.array([[1.0], [4.0]])}
    like = {"count": jnp.zeros(3, jnp.int32), "w": jnp.zeros((3, 1))}
    got = jaxcomp.resize(old, like)
    assert got["count"].tolist() == [7, 7, 7]
    assert got["w"].tolist() == [[2.5]] * 3


def test_steps_that_replicas_left_out_are_added_up():
    state = lambda skipped: jaxcomp.CocktailSGDState(*[None] * 5, jnp.array(skipped, jnp.int32))
    for like in ([0, 0, 0, 0, 0], [0]):
        got = jaxcomp.resize(state([1, 0, 2]), state(like)).skipped
        assert got.tolist() == [3, *like[1:]]


def test_a_resized_state_is_placed_as_asked():
    mesh = mesh_of(4)
    place = NamedSharding(mesh, P("replica"))
    like = {"w": jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=place)}
    got = jaxcomp.resize({"w": np.ones((2, 2), np.float32)}, like)
    assert got["w"].sharding == place


def test_states_of_another_transformation_or_model_are_refused():
    *_, state = trained(2, 0)
    with pytest.raises(ValueError, match="cannot resize a state of structure.*same transformation"):
        jaxcomp.resize(state, state[0])
    with pytest.raises(ValueError, match=r"\['w'\]. has shape \(2, 3\).* into \(2, 4\).*same mod"):
        jaxcomp.resize({"w": np.zeros((2, 3))}, {"w": np.zeros((2, 4))})
    rows_of = lambda *sizes: [np.zeros(size) for size in sizes]
    with pytest.raises(ValueError, match=r"\(\(2,\), \(4,\)\), \(\(6,\), \(9,\)\).*same model"):
        jaxcomp.resize(rows_of((2, 3), 6), rows_of((4, 3), 9))
