"""Many replicas on one device: what a mesh of devices computes, in the same state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import schedules
from tests.helpers import replicas
from tests.helpers.replicas import mesh_of

REPLICAS, STEPS = 4, 6


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def make_params():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32) / 4
    return {"bias": np.zeros(64, np.float32), "down": normal(64, 16), "up": normal(16, 64)}


def make_batch(step):
    rng = np.random.default_rng(100 + step)
    return {name: rng.normal(size=(8 * REPLICAS, 16)).astype(np.float32) for name in "xy"}


def mean(compressor, optimizer):
    return optax.chain(jaxcomp.compressed_mean(compressor, "replica"), optimizer)


METHODS = {
    "dense": mean(jaxcomp.identity(), optax.sgd(0.1)),
    "4 bits": mean(jaxcomp.quantize(4, rounding="stochastic"), optax.adam(1e-2)),
    "gathered": mean(
        jaxcomp.gathered(jaxcomp.compose(jaxcomp.top_k(0.25), jaxcomp.sign())), optax.sgd(0.1)
    ),
    "local steps": jaxcomp.local_steps(
        jaxcomp.rare_rows(optax.adam(1e-2), "replica", rows=lambda path, leaf: path == "up"),
        "replica",
        every=2,
        code=jaxcomp.identity(),
        fragments=2,
        delay=1,
        keep=0.25,
    ),
    "sharded_optimizer": jaxcomp.sharded_optimizer(optax.adam(1e-2), "replica"),
    "zero_one_adam": jaxcomp.zero_one_adam(
        1e-2,
        "replica",
        sync_at=schedules.every(2, STEPS, after=1),
        variance_at=schedules.growing(1, until=1),
    ),
}


def trained(mesh, method, make):
    """Parameters, state and the metrics of each step, on the host."""
    batches = map(make_batch, range(STEPS))
    found = replicas.trained(loss_fn, METHODS[method], mesh, make_params(), batches, make)
    return jax.device_get(found)


@pytest.mark.parametrize("method", METHODS)
def test_one_device_computes_what_a_mesh_does(method):
    *wanted, want = trained(mesh_of(REPLICAS), method, jaxcomp.train_step)
    *found, got = trained(mesh_of(1), method, replicas.simulated(REPLICAS))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        # Values up to about 1; both programs round each of six steps in an order of their own.
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * max(1, np.abs(y).max()))
    for a, b in zip(got, want, strict=True):
        assert a["loss"].shape == (REPLICAS,) and not a["skipped"] and not b["skipped"]
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    start = make_params()["up"]
    assert np.abs(found[0]["up"] - start).max() > 1e-3


def test_a_gradient_that_is_not_finite_is_skipped_by_all():
    tx = mean(jaxcomp.sign(), optax.sgd(0.1))
    train_step = jaxcomp.simulated_train_step(loss_fn, tx, REPLICAS, "replica")
    params = jax.tree.map(jnp.asarray, make_params())
    batch = make_batch(0)
    batch["x"][0] = np.inf
    params, _, metrics = train_step.step(params, train_step.init(params), batch)
    assert metrics["skipped"]
    jax.tree.map(np.testing.assert_array_equal, params, make_params())


def test_replicas_that_would_go_apart_are_refused():
    train_step = jaxcomp.simulated_train_step(loss_fn, optax.sgd(0.1), REPLICAS, "replica")
    params = jax.tree.map(jnp.asarray, make_params())
    with pytest.raises(ValueError, match=r"mapped output .*out_axes is None"):
        train_step.step(params, train_step.init(params), make_batch(0))


def test_what_does_not_fit_is_refused():
    make = functools.partial(jaxcomp.simulated_train_step, loss_fn, METHODS["dense"])
    for number, accumulate in ((0, 1), (2.0, 1), (2, 0), (2, 2.0)):
        with pytest.raises(ValueError, match="write at least 1 for both"):
            make(number, "replica", accumulate=accumulate)
    init, step = make(3, "replica")
    params = jax.tree.map(jnp.asarray, make_params())
    with pytest.raises(ValueError, match="divisible by 3"):
        step(params, init(params), make_batch(0))


def test_arrays_without_entries_are_cut_and_joined():
    with_nothing = lambda params, batch: (loss_fn(params, batch), {"nothing": batch["none"]})
    batch = make_batch(0) | {"none": np.zeros((8 * REPLICAS, 0), np.float32)}
    params = make_params()
    for make, mesh in ((jaxcomp.train_step, mesh_of(2)), (replicas.simulated(2), None)):
        init, step = make(
            with_nothing, METHODS["dense"], mesh, "replica", accumulate=2, has_aux=True
        )
        metrics = jax.eval_shape(step, params, jax.eval_shape(init, params), batch)[2]
        assert metrics["aux"]["nothing"].shape == (4, 2 * REPLICAS, 0)
