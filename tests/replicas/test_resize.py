"""States for another number of replicas: nothing that is owed is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers.replicas import (
    PARAMS,
    everywhere,
    lossy_mean,
    mesh_of,
    rows,
    state_of,
    transform,
)


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


def test_what_owners_hold_fits_no_other_order_of_leaves():
    params = {f"layer_{i}": np.zeros((8, 6), np.float32) for i in range(3)}

    def shapes(num_replicas, **order):
        code = jaxcomp.two_shot(jaxcomp.quantize(4, block=8), **order)
        tx = jaxcomp.compressed_mean(code, "replica", exact=lambda path, leaf: False)
        return jax.eval_shape(transform(tx, mesh_of(num_replicas), params)[0], params)

    old = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes(4))
    moved = jaxcomp.resize(old, shapes(2))
    [(owned,)] = state_of(moved, "owner_residual").values()
    assert np.sum(owned) == sum(p.size for p in params.values())
    with pytest.raises(ValueError, match=r"cannot resize a state of structure.*last_layers_first"):
        jaxcomp.resize(old, shapes(4, order=None))


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


@pytest.mark.parametrize("on_devices", [False, True])
def test_counts_become_their_mean_rounded_up_and_flags_are_copied(on_devices):
    # The first replica has skipped all steps, and the moments are of the second.
    old = {
        "count": np.array([0, 5], np.int32),
        "flag": np.array([True, False]),
        "large": np.array([2**31 - 1, 2**31 - 1], np.int32),
        "w": np.array([[1], [4]], np.float32),
    }
    like = {name: np.zeros((3, *x.shape[1:]), x.dtype) for name, x in old.items()}
    got = jaxcomp.resize(rows(mesh_of(2), old) if on_devices else old, like)
    assert got["count"].tolist() == [3, 3, 3] and got["flag"].all()
    assert got["large"].tolist() == [2**31 - 1] * 3
    assert got["w"].tolist() == [[2.5]] * 3


def test_rows_of_keys_are_copied():
    keys = jax.random.split(jax.random.key(0), 2)
    shape = jax.ShapeDtypeStruct((3,), keys.dtype)
    placed = jax.device_put(keys, NamedSharding(mesh_of(2), P("replica")))
    for old in (keys, placed):
        got = jaxcomp.resize({"rng_key": old}, {"rng_key": shape})["rng_key"]
        assert got.shape == (3,) and (got == keys[0]).all()


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
