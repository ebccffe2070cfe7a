"""Methods beside, around and inside optax's own transformations, on parameters of any kind."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas.resize import reset_residuals
from tests.helpers import replicas
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows

W = np.ones((4, 4), np.float32)


def quantized_adam():
    return optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"), optax.adam(1e-2))


def loss_fn(params, batch):
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(params) if x.size]
    return sum(jnp.mean((x - jnp.mean(batch)) ** 2) for x in leaves)


def train(tx, params, *, steps=4, bad=None, mesh=None, loss_fn=loss_fn):
    """Parameters, state and what was skipped, after steps of which one may see a NaN."""
    mesh = mesh or mesh_of(2)
    batches = np.zeros((steps, mesh.size * 2, 3), np.float32)
    if bad is not None:
        batches[bad, 0, 0] = np.nan
    params, state, seen = replicas.trained(loss_fn, tx, mesh, params, batches)
    return jax.tree.map(one_value, params), state, [bool(m["skipped"]) for m in seen]


def test_a_method_that_skips_by_itself_leaves_the_guard_to_the_one_beside_it():
    groups = {"own": jaxcomp.zero_one_adam(1e-2, "replica"), "mean": quantized_adam()}
    tx = optax.partition(groups, {"a": "own", "b": "mean"})
    params, _, skipped = train(tx, {"a": W, "b": W}, bad=1)
    assert skipped == [False, True, False, False]
    assert all(np.all(np.isfinite(x)) and np.all(x < 1) for x in params.values())


def test_one_bad_microbatch_costs_one_step_of_its_replica():
    method = jaxcomp.slamb(1e-2, "replica", sync_every=1)
    tx = optax.MultiSteps(method, 2).gradient_transformation()
    params, state, _ = train(tx, {"a": W}, steps=12, bad=2)
    assert np.asarray(state.inner_opt_state.skipped).tolist() == [1, 0]
    assert np.all(np.isfinite(params["a"]))


def test_what_remembers_gradients_before_a_method_forgets_a_bad_one():
    method = jaxcomp.slamb(1e-2, "replica", sync_every=1)
    params, state, _ = train(optax.chain(optax.ema(0.9), method), {"a": W}, bad=1)
    assert np.asarray(state[1].skipped).tolist() == [1, 0]
    assert np.all(np.isfinite(state[0].ema["a"])) and np.all(np.isfinite(params["a"]))


def test_cocktail_sgd_takes_optimizers_that_decide_by_their_gradient():
    inner = optax.apply_if_finite(optax.adam(1e-2), 3)
    for dtype in ("float32", "bfloat16"):
        tx = jaxcomp.cocktail_sgd(inner, "replica", compressor=jaxcomp.identity())
        params, _, _ = train(tx, {"a": W.astype(dtype)})
        assert params["a"].dtype == dtype and np.all(np.float32(params["a"]) < 1)


def train_narrow(tx, steps, replicas=2, accumulate=4):
    """Parameters and states of steps in bfloat16, and batches `[replicas, accumulate, 32, 32]`."""
    mesh = mesh_of(replicas)
    linear = lambda params, batch: jnp.sum(params["a"].astype(jnp.float32) * jnp.mean(batch, 0))
    init, step = jaxcomp.train_step(linear, tx, mesh, "replica", accumulate=accumulate)
    params = everywhere(mesh, {"a": jnp.zeros((32, 32), jnp.bfloat16)})
    states, batches = [init(params)], []
    for number in range(steps):
        # bfloat16 holds each of these gradients, but not always the mean of several.
        batch = np.random.default_rng(number).integers(-256, 257, (replicas * accumulate, 32, 32))
        batches.append(batch.reshape(replicas, accumulate, 32, 32).astype(np.float32))
        params, state, _ = step(params, jax.tree.map(jnp.copy, states[-1]), rows(mesh, batch))
        states.append(state)
    return np.asarray(params["a"]), states, batches


@pytest.mark.filterwarnings("ignore:parameters are")
def test_microbatches_are_averaged_in_float32_and_the_result_is_rounded_once():
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    params, _, [batch] = train_narrow(optax.chain(mean, optax.sgd(1.0)), 1)
    wanted = -batch.mean(axis=(0, 1))
    np.testing.assert_array_equal(params, wanted.astype(jnp.bfloat16))
    twice = -batch.mean(axis=1).astype(jnp.bfloat16).astype(np.float32).mean(axis=0)
    assert np.any(params != twice.astype(jnp.bfloat16))


@pytest.mark.filterwarnings("ignore:parameters are")
def test_what_is_not_sent_of_microbatches_is_kept_in_float32():
    mean = jaxcomp.compressed_mean(jaxcomp.top_k(1 / 16), "replica")
    _, [_, state], [batch] = train_narrow(optax.chain(mean, optax.sgd(1.0)), 1)
    own, residual = batch.mean(axis=1), np.asarray(state[0].residual["a"])
    kept = own[residual == own]
    assert kept.size == own.size * 15 / 16
    assert np.any(kept != kept.astype(jnp.bfloat16))


QUANTIZED = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica")
NARROW = {
    "wide moments": optax.chain(QUANTIZED, optax.adam(1e-2, mu_dtype=jnp.float32)),
    "if finite": optax.chain(QUANTIZED, optax.apply_if_finite(optax.adam(1e-2), 3)),
    "clipped": optax.chain(QUANTIZED, jaxcomp.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "in front": optax.chain(optax.trace(0.9), quantized_adam()),
    "steps": optax.MultiSteps(quantized_adam(), 2).gradient_transformation(),
    "partition": optax.partition({"mean": quantized_adam()}, {"a": "mean"}),
}


@pytest.mark.parametrize("method", NARROW)
@pytest.mark.filterwarnings("ignore:parameters are")
def test_wide_gradients_of_narrow_parameters_change_no_type_of_a_state(method):
    """Of what is around or behind methods; of each method: tests/methods/test_every_method.py."""
    init, step = jaxcomp.train_step(loss_fn, NARROW[method], mesh_of(2), "replica", accumulate=4)
    params = {"a": jnp.zeros((32, 32), jnp.bfloat16)}
    state = jax.eval_shape(init, params)
    after = jax.eval_shape(step, params, state, np.zeros((8, 32), np.float32))
    types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert types(after[:2]) == types((params, state))


def test_squares_of_float16_gradients_do_not_vanish():
    """Adam divides by the root of their mean: without it a step is a momentum over eps."""

    def small_gradients(params, batch):
        return 1e-4 * jnp.sum(params["a"].astype(jnp.float32)) * (1 + jnp.mean(batch))

    tx = jaxcomp.cocktail_sgd(optax.adam(1e-3), "replica", compressor=jaxcomp.identity())
    params, _, _ = train(tx, {"a": W.astype(np.float16)}, loss_fn=small_gradients)
    np.testing.assert_allclose(np.float32(params["a"]), 1 - 3e-3, atol=5e-4)


def test_a_number_that_each_shard_would_find_by_itself_is_refused():
    tx = optax.chain(
        jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica"),
        optax.apply_if_finite(optax.adam(1e-2), 3),
    )
    mesh, params = mesh_of(2, 2), {"a": W}
    with pytest.raises(ValueError, match="notfinite_count.*differs between shards over .'fsdp',"):
        jaxcomp.state_specs(
            jaxcomp.per_replica(tx, "replica"), params, mesh, "replica", {"a": P("fsdp")}
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    """Parameters whose attribute is called as a state's field is."""

    residual: Any
    up: Any


def test_moments_of_a_parameter_named_residual_are_no_residual():
    tx = jaxcomp.compact(jaxcomp.one_bit_adam(1e-2, "replica", freeze_step=2))
    _, state, _ = train(tx, Block(np.ones((64, 64), np.float32), W), steps=3)
    assert np.any(np.asarray(state.residual.residual.data))
    assert state.variance.residual.dtype == np.float32
    assert state.residual.residual.data.dtype == np.int8
    reset = reset_residuals(state)
    assert np.all(np.asarray(reset.variance.residual) > 0)
    assert not np.any(np.asarray(reset.residual.residual.data))


def test_steps_accumulate_behind_a_mean_as_around_it():
    mean, sgd = jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), optax.sgd(0.1)
    behind = optax.chain(mean, optax.MultiSteps(sgd, 2).gradient_transformation())
    around = optax.MultiSteps(optax.chain(mean, sgd), 2).gradient_transformation()
    kept = [train(tx, {"a": W}, steps=5)[0]["a"] for tx in (behind, around)]
    np.testing.assert_allclose(*kept, rtol=1e-6)
    # Two updates, each by 0.1 of the gradient 2 a / 16.
    np.testing.assert_allclose(kept[0], (1 - 0.1 * 2 / 16) ** 2, rtol=1e-6)


def test_compact_wants_something_to_keep():
    code = jaxcomp.compressed_mean(jaxcomp.quantize(4), "replica", error_feedback=False)
    init, _ = jaxcomp.train_step(loss_fn, jaxcomp.compact(code), mesh_of(2), "replica")
    with pytest.raises(ValueError, match="no residual to keep"):
        jax.eval_shape(init, {"a": np.ones((40, 40), np.float32)})
