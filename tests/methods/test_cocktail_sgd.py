"""CocktailSGD: when replicas meet, what is sent meanwhile, and its warm-up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers import replicas
from tests.helpers.replicas import Run, one_value, transform

SHAPES = {"bias": (7,), "kernel": (33, 40)}
RATE = 0.125

COCKTAIL = jaxcomp.cocktail(0.5, 0.5)
NOISE = jaxcomp.quantize(2, rounding="stochastic")


def make(inner=None, **options):
    return jaxcomp.cocktail_sgd(inner or optax.sgd(RATE), "replica", **options)


random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def started(tx):
    return Run(tx, random_tree(0))


def test_the_inner_optimizer_sees_the_parameters_of_its_own_replica():
    run = started(make(optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0)), sync_every=9))
    run.step(random_tree(1, 4))
    before = run.local()
    run.step(jax.tree.map(np.zeros_like, random_tree(1, 4)))
    np.testing.assert_allclose(run.local(), 0.5 * before, rtol=0, atol=1e-6)


def test_with_identity_it_is_averaging_one_step_late():
    # Quarters and integers: every sum is exact.
    run = started(make(optax.sgd(0.25), compressor=jaxcomp.identity()))
    run.params = jax.tree.map(jnp.round, run.params)
    for step in range(5):
        grads = jax.tree.map(np.round, random_tree(step, 4))
        local = run.local()
        mean = local.mean(axis=0)
        run.step(grads)
        np.testing.assert_array_equal(run.params["kernel"], mean)
        np.testing.assert_array_equal(run.local(), mean - 0.25 * grads["kernel"])


@pytest.mark.parametrize("every", [1, 2])
def test_without_delay_replicas_meet_after_the_step_that_ends_an_interval(every):
    run = started(
        make(optax.sgd(0.25), compressor=jaxcomp.identity(), delayed=False, sync_every=every)
    )
    run.params = jax.tree.map(jnp.round, run.params)
    for step in range(4):
        grads = jax.tree.map(np.round, random_tree(step, 4))
        moved = run.local() - 0.25 * grads["kernel"]
        run.step(grads)
        meets = step % every == every - 1
        wanted = np.broadcast_to(moved.mean(axis=0), moved.shape) if meets else moved
        np.testing.assert_array_equal(run.local(), wanted)


def test_what_is_sent_does_not_depend_on_the_gradient_of_the_step():
    tx = make(compressor=COCKTAIL)
    first, second = started(tx), started(tx)
    for run in (first, second):
        run.step(random_tree(1, 4))
        run.step(random_tree(2, 4))
    updates = first.step(random_tree(3, 4)), second.step(random_tree(4, 4))
    assert any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates[0]))
    for one, other in zip(*map(jax.tree.leaves, updates), strict=True):
        assert one_value(one).tobytes() == one_value(other).tobytes()


def test_what_a_warm_up_rounds_off_is_the_same_everywhere():
    run = started(make(optax.adam(RATE), warmup_steps=3))
    for step in range(3):
        run.step(random_tree(step, 4))
        drift = np.asarray(run.state.drift["kernel"])
        # What 8 bits round off of a step of at most RATE.
        assert np.all(drift == drift[:1]) and np.abs(drift).max() < RATE / 250
    run.step(random_tree(3, 4))
    assert np.abs(np.asarray(run.state.drift["kernel"])).max() > 1e-2


@pytest.mark.parametrize("delayed", [True, False])
def test_warm_up_does_not_compute_the_coded_exchange(delayed):
    nan = lambda payload, shared: jnp.full(payload.numel, jnp.nan)
    code = dataclasses.replace(NOISE, decode=nan)
    run = started(make(compressor=code, warmup_steps=2, delayed=delayed))
    for step in range(3):
        run.step(random_tree(step, 4))
        assert np.all(np.isfinite(run.params["kernel"]) == (step < 2))


def test_a_method_without_warm_up_goes_on_from_its_end():
    tx = make(compressor=COCKTAIL, warmup_steps=2)
    whole, parts = started(tx), started(tx)
    for step in range(4):
        if step == 2:
            _, parts.update = transform(make(compressor=COCKTAIL), parts.mesh, parts.params)
        for run in (whole, parts):
            run.step(random_tree(step, 4))
    for name in SHAPES:
        np.testing.assert_allclose(whole.local(name), parts.local(name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sync_every", [1, 2, 10])
def test_every_entry_is_sent_within_the_promised_exchanges(sync_every):
    code = jaxcomp.random_k(0.1)
    run = started(make(optax.sgd(1.0), compressor=code, sync_every=sync_every))
    run.step(jax.tree.map(np.ones_like, random_tree(0, 4)))
    start = np.asarray(run.params["kernel"])
    zero = jax.tree.map(np.zeros_like, random_tree(0, 4))
    for _ in range(10 * sync_every):
        run.step(zero)
    np.testing.assert_allclose(np.asarray(run.params["kernel"]) - start, -1.0, rtol=0, atol=1e-6)


def test_a_gradient_that_is_not_finite_in_warm_up_is_left_out_by_all():
    run = started(make(optax.adam(RATE), warmup_steps=2))
    start = np.asarray(run.params["kernel"])
    bad = random_tree(1, 4)
    bad["bias"][3, 0] = np.inf
    run.step(bad)
    assert np.asarray(run.state.skipped).tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(np.asarray(run.params["kernel"]), start)
