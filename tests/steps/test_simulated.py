"""Many replicas on one device: what a mesh of devices computes, in the same state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import schedules
from tests.helpers import layered, replicas
from tests.helpers.layered import pair_loss as loss_fn
from tests.helpers.replicas import mesh_of

REPLICAS, STEPS, BAD = 4, 6, 4


make_params = functools.partial(layered.make_pair, 64)
make_batch = functools.partial(layered.make_batch, size=8 * REPLICAS)


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
    """Parameters, state and the metrics of each step, on the host; one gradient is not finite."""
    batches = [make_batch(step) for step in range(STEPS)]
    batches[BAD]["x"][0] = np.inf
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
    alone = method in ("local steps", "zero_one_adam")  # a replica stands still by itself
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a["loss"].shape == (REPLICAS,)
        assert a["skipped"] == b["skipped"] == (step == BAD and not alone)
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    start = make_params()["up"]
    assert np.abs(found[0]["up"] - start).max() > 1e-3


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
