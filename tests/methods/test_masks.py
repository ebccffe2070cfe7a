"""Methods inside and beside optax's own combinators: masks of decay, groups, rates, wrappers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.compressors.policies import path_of
from jaxcomp.methods.common import decays
from tests.helpers import replicas
from tests.helpers.replicas import mesh_of

EXACT = {"compressor": jaxcomp.identity()}
W = np.linspace(2, 3, 12, dtype=np.float32).reshape(3, 4)
START = {"a": W, "b": W[::-1].copy()}
DECAYING = {
    "zero_one_adam": lambda **o: jaxcomp.zero_one_adam(0.1, "replica", **EXACT, **o),
    "one_bit_adam": lambda **o: jaxcomp.one_bit_adam(0.1, "replica", freeze_step=2, **EXACT, **o),
    "one_bit_lamb": lambda **o: jaxcomp.one_bit_lamb(0.1, "replica", freeze_step=2, **EXACT, **o),
    "slamb": lambda **o: jaxcomp.slamb(0.1, "replica", sync_every=1, **o),
    "slamb, linear": lambda **o: jaxcomp.slamb(
        0.1, "replica", sync_every=1, rescaling=jaxcomp.Rescaling("linear"), **o
    ),
}


def loss_fn(params, batch):
    """Replicas have gradients of their own, and none depends on another leaf."""
    return sum(jnp.sum((x - jnp.mean(batch)) ** 2) for x in jax.tree.leaves(params))


def batches(steps=4):
    return [np.random.default_rng(i).normal(size=(2, 5)).astype(np.float32) for i in range(steps)]


def train(tx, start=START, simulated=False, steps=4):
    """Parameters after some steps of two replicas."""
    make, mesh = jaxcomp.train_step, mesh_of(2)
    if simulated:
        make, mesh = replicas.simulated(2), mesh_of(1)
    params, _, _ = replicas.trained(loss_fn, tx, mesh, start, batches(steps), make)
    return jax.tree.map(np.asarray, params)


@functools.cache
def plain(method):
    """Parameters without decay."""
    return train(DECAYING[method](weight_decay=0.0), simulated=True)


@pytest.mark.parametrize("method", DECAYING)
def test_leaves_decay_where_the_mask_says_so(method):
    make, none = DECAYING[method], plain(method)
    mask = mask_of(START) if "one_bit" in method else mask_of
    some = train(make(weight_decay=0.1, mask=mask), simulated=True)
    every = train(make(weight_decay=0.1), simulated=True)
    assert np.all(np.abs(every["a"] - none["a"]) > 1e-3)
    # Two programs of XLA round apart by a last bit.
    np.testing.assert_allclose(some["a"], every["a"], rtol=2.0**-22)
    np.testing.assert_allclose(some["b"], none["b"], rtol=2.0**-22)


def mask_of(params):
    return {name: name == "a" for name in params}


def test_a_mask_may_be_a_prefix_of_the_parameters():
    params = {"layers": {"kernel": 0, "bias": 1}, "head": 2}
    found = decays(0.5, {"layers": False, "head": True}, params)
    assert found == {"layers": {"kernel": 0.0, "bias": 0.0}, "head": 0.5}
    assert decays(0.5, None, params) == {"layers": {"kernel": 0.5, "bias": 0.5}, "head": 0.5}
    with pytest.raises(ValueError, match="head"):
        decays(0.5, {"layers": False}, params)


def test_groups_have_rates_of_their_own():
    """Rates by path are optax's groups: each leaf moves as if its group were alone."""
    make = lambda rate: jaxcomp.zero_one_adam(rate, "replica", weight_decay=0.1)
    rule = jaxcomp.by_path(("a", "slow"), (".*", "fast"))
    labels = jax.tree_util.tree_map_with_path(lambda path, x: rule(path_of(path), x), START)
    both = train(optax.partition({"slow": make(0.01), "fast": make(0.1)}, labels))
    for name, rate in (("a", 0.01), ("b", 0.1)):
        alone = train(make(rate), start={name: START[name]})
        np.testing.assert_allclose(both[name], alone[name], rtol=1e-6)


WRAPPED = {
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        learning_rate=optax.linear_schedule(0.1, 0.0, 9)
    ),
    "masked": optax.chain(optax.masked(optax.scale(0.5), {"a": True, "b": False}), optax.adam(0.1)),
    "partition": optax.partition({"x": optax.adam(0.1), "y": optax.sgd(0.1)}, {"a": "x", "b": "y"}),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "muon": optax.contrib.muon(0.1),
    "schedule_free_adamw": optax.contrib.schedule_free_adamw(0.1, warmup_steps=2),
}


@pytest.mark.parametrize("optimizer", WRAPPED)
def test_optimizers_behind_the_mean_do_what_they_do_with_mean_gradients(optimizer):
    """The reference is plain optax on one device, which gets the mean of the gradients."""
    optimizer = WRAPPED[optimizer]
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    found = train(optax.chain(mean, optimizer))
    params = jax.tree.map(jnp.asarray, START)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        grads = [jax.grad(loss_fn)(params, row) for row in batch]
        mean = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
        updates, state = optimizer.update(mean, state, params)
        return optax.apply_updates(params, updates), state

    for batch in batches():
        params, state = step(params, state, batch)
    for name in START:
        assert np.any(params[name] != START[name])
        np.testing.assert_allclose(found[name], params[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["one_bit_adam", "zero_one_adam", "slamb"])
def test_methods_work_inside_of_optax(method):
    make = DECAYING[method]
    inside = optax.chain(
        optax.masked(make(), {"a": True, "b": False}),
        optax.masked(make(), {"a": False, "b": True}),
    )
    found = train(inside, simulated=True)
    for name in START:
        np.testing.assert_allclose(found[name], plain(method)[name], rtol=1e-5)


def test_a_learning_rate_is_injected_by_a_function_of_it_alone():
    make = lambda learning_rate: jaxcomp.zero_one_adam(learning_rate, "replica")
    schedule = optax.linear_schedule(0.1, 0.0, 9)
    found = train(optax.inject_hyperparams(make)(learning_rate=schedule))
    np.testing.assert_allclose(found["a"], train(make(schedule))["a"], rtol=1e-5)
    for name in DECAYING.keys() - {"slamb, linear"}:
        tx = optax.inject_hyperparams(getattr(jaxcomp, name))(1e-3, "replica")
        with pytest.raises(ValueError, match=f"{name} got arrays for b1, b2.*write optax.inject_"):
            train(tx)
    for make, static in ((jaxcomp.demo, "mean"), (functools.partial(jaxcomp.dion, rank=2), ())):
        with pytest.raises(ValueError, match="got arrays for .*write optax.inject_"):
            train(optax.inject_hyperparams(make, static_args=static)(1e-3, "replica"))
    inner = optax.adam(1e-3)
    for make in (functools.partial(jaxcomp.local_steps, every=2), jaxcomp.diloco):
        with pytest.raises(
            ValueError, match=r"got arrays for every.*\(optax.adam\(learning_rate\)"
        ):
            train(optax.inject_hyperparams(make)(inner, "replica"))
    for make in (jaxcomp.cocktail_sgd, jaxcomp.loss_scale):
        with pytest.raises(ValueError, match=r"got arrays for .*optax.adam\(learning_rate\)"):
            train(optax.inject_hyperparams(make)(inner, "replica"))
    with pytest.raises(ValueError, match="compact got arrays for bits.*write optax.inject_"):
        train(optax.inject_hyperparams(jaxcomp.compact)(inner))
    with pytest.raises(ValueError, match="Give optax.inject_hyperparams a function of the"):
        train(optax.inject_hyperparams(jaxcomp.sparse_loco)(inner, "replica"))
    sparse = optax.inject_hyperparams(jaxcomp.sparse_loco, static_args="mean")(inner, "replica")
    with pytest.raises(ValueError, match="sparse_loco got arrays for every, density, error_decay"):
        train(sparse)
    with pytest.raises(ValueError, match=r"muloco got arrays for every.*muloco\(learning_rate, "):
        train(optax.inject_hyperparams(jaxcomp.muloco)(1e-3, "replica"))


def test_what_a_mask_hides_from_the_mean_is_refused():
    hidden = optax.masked(jaxcomp.zero_one_adam(0.1, "replica"), {"a": True, "b": False})
    with pytest.raises(ValueError, match="'b'.*still varies over 'replica'.*For this leaf write"):
        train(hidden)


def test_decisions_by_a_replicas_own_gradient_are_refused():
    """Around a method, whether all is finite would be asked of each replica by itself."""
    tx = optax.apply_if_finite(jaxcomp.one_bit_adam(0.1, "replica", freeze_step=2), 3)
    with pytest.raises(ValueError, match="apply_if_finite is around a method.*Leave it out"):
        train(tx)
