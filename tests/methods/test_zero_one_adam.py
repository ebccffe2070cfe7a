"""0/1 Adam, and what 1-bit Adam has of it: what they reduce to, and the authors' steps."""

import itertools
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import schedules
from jaxcomp.methods.moments import NONE
from jaxcomp.replicas import protocol
from tests.helpers.adam import GRADIENTS, RATE, SHAPES, random_tree, trained
from tests.helpers.replicas import one_value


def every(n):
    return lambda count: count % n == 0


def adam(rate, gradients, b1=0.9, b2=0.999, eps=1e-8, stale=False):
    """Adam on mean gradients in NumPy, without bias correction, in float64."""
    params = random_tree(0, dtype=np.float64)
    m = jax.tree.map(np.zeros_like, params)
    v = jax.tree.map(np.zeros_like, params)
    for step, grads in enumerate(gradients):
        for k in params:
            g = grads[k].mean(axis=0)
            m[k] = b1 * m[k] + (1 - b1) * g
            new = b2 * v[k] + (1 - b2) * g * g
            used = v[k] if stale and step else new
            params[k] = params[k] - rate * m[k] / (np.sqrt(used) + eps)
            v[k] = new
    return params


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("precondition", [True, False])
def test_with_identity_and_every_step_it_is_adam(precondition, fresh):
    """As the paper has it, with the variance of one step before."""
    with jax.enable_x64(True):
        tx = jaxcomp.zero_one_adam(
            RATE,
            "replica",
            compressor=jaxcomp.identity(),
            variance_at=schedules.always,
            deviations=NONE._replace(precondition=precondition, fresh_variance=fresh),
        )
        params, _ = trained(tx, GRADIENTS, dtype=np.float64)[-1]
        wanted = adam(RATE, GRADIENTS, stale=not fresh)
        for k in SHAPES:
            np.testing.assert_allclose(params[k], wanted[k], rtol=0, atol=1e-12)


def test_local_steps_are_taken_back_and_their_mean_is_kept():
    with jax.enable_x64(True):
        tx = jaxcomp.zero_one_adam(
            RATE,
            "replica",
            compressor=jaxcomp.identity(),
            sync_at=every(3),
            variance_at=schedules.until(1),
            deviations=jaxcomp.Deviations(step_bound=None, bias_correction=False),
        )
        history = trained(tx, GRADIENTS, dtype=np.float64)
    for step in (2, 3, 5, 6):
        params, state = history[step]
        before, _ = history[1 if step < 4 else 4]
        np.testing.assert_array_equal(params["kernel"], before["kernel"])
        assert np.abs(np.asarray(state.drift["kernel"])).max() > 0
    (_, apart), (params, met) = history[3], history[4]
    assert not np.any(np.asarray(met.drift["kernel"]))
    momentum = np.asarray(met.momentum["kernel"])
    assert np.all(momentum == momentum[:1])
    # The interval's rates are equal: its momentum is the mean of the momenta of its steps.
    local = 0.9 * np.asarray(apart.momentum["kernel"]) + 0.1 * GRADIENTS[3]["kernel"]
    steps = [np.asarray(history[i][1].momentum["kernel"]) for i in (2, 3)]
    np.testing.assert_allclose(
        momentum[0], np.mean([*steps, local], axis=(0, 1)), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("interval", [1, 3])
def test_without_mean_momenta_only_the_residuals_are_between_it_and_adam(interval):
    # All steps divide by one D and momenta are exact, so that a code's errors do not accumulate.
    with jax.enable_x64(True):
        tx = jaxcomp.zero_one_adam(
            RATE,
            "replica",
            compressor=jaxcomp.sign(block=64),
            sync_at=every(interval),
            variance_at=schedules.until(1),
            deviations=jaxcomp.Deviations(mean_momentum=False, step_bound=None),
        )
        params, state = trained(tx, GRADIENTS, dtype=np.float64)[-1]
        exact = jaxcomp.zero_one_adam(
            RATE,
            "replica",
            compressor=jaxcomp.identity(),
            variance_at=schedules.until(1),
            deviations=jaxcomp.Deviations(step_bound=None),
        )
        wanted, _ = trained(exact, GRADIENTS, dtype=np.float64)[-1]
    names = sorted(SHAPES)
    flat = lambda tree, axis: np.concatenate(
        [np.reshape(tree[k], (-1,) if axis else (4, -1)) for k in names], axis=-1
    )
    held = (flat(state.residual, 0) + flat(state.drift, 0)).mean(axis=0)
    owned = np.concatenate([np.asarray(e).reshape(-1) for e in state.owner_residual])
    total = flat(params, 1) + held + owned[: held.size]
    np.testing.assert_allclose(total, flat(wanted, 1), rtol=0, atol=1e-12)
    assert np.abs(total - flat(params, 1)).max() > RATE / 8


@pytest.mark.parametrize(
    "codes",
    [
        {"warmup_compressor": jaxcomp.identity()},
        {"compressor": jaxcomp.random_k(0.5)},  # a linear code is sent in float32 in a warm-up
    ],
)
def test_a_warm_up_by_exact_messages_is_adam_until_it_ends(codes):
    with jax.enable_x64(True):
        make = lambda steps: jaxcomp.zero_one_adam(
            RATE,
            "replica",
            warmup_steps=steps,
            **codes,
            variance_at=schedules.always,
            deviations=NONE._replace(fresh_variance=True),
        )
        history = trained(make(4), GRADIENTS, dtype=np.float64)
        for steps, differs in ((4, False), (6, True)):
            params, state = history[steps]
            wanted = adam(RATE, GRADIENTS[:steps])
            errors = [np.abs(params[k] - wanted[k]).max() for k in SHAPES]
            assert (max(errors) > 1e-4) if differs else (max(errors) < 1e-12)
        assert {k: int(n) for k, n in state.rounds.items()} == {
            "all": 6,
            "synchronize": 2,
            "variance": 6,
            "warmup": 4,
        }


both = pytest.mark.parametrize("name", ["zero_one_adam", "one_bit_adam"])


def learned_once(name, **options):
    """A method that learns its variance in the first step alone."""
    if name == "one_bit_adam":
        return jaxcomp.one_bit_adam(RATE, "replica", freeze_step=1, **options)
    return jaxcomp.zero_one_adam(RATE, "replica", variance_at=schedules.until(1), **options)


@both
def test_masks_move_from_one_synchronization_to_the_next(name):
    options = {"compressor": jaxcomp.random_k(0.5)}
    if name == "one_bit_adam":
        # Bounded momenta of two signs would cancel exactly, and a sent coordinate stay.
        options["deviations"] = jaxcomp.Deviations(step_bound=None)
    gradients = [jax.tree.map(np.float32, grads) for grads in GRADIENTS[:4]]
    history = trained(learned_once(name, **options), gradients)
    kernels = [np.asarray(params["kernel"]) for params, _ in history]
    *_, third, last = (before != after for before, after in itertools.pairwise(kernels))
    np.testing.assert_array_equal(last, ~third)


@both
def test_what_never_has_a_gradient_does_not_drift(name):
    make = {
        "zero_one_adam": lambda: jaxcomp.zero_one_adam(
            RATE, "replica", sync_at=every(2), variance_at=schedules.growing(1)
        ),
        "one_bit_adam": lambda: jaxcomp.one_bit_adam(RATE, "replica", freeze_step=5),
    }[name]
    mask = (np.arange(33) % 3 > 0).astype(np.float32)[:, None]
    gradients = []
    for step in range(120):
        grads = random_tree(step, 2)
        gradients.append(grads | {"kernel": grads["kernel"] * mask[None]})
    history = trained(make(), gradients, num_replicas=2)
    (start, _), (params, _) = history[0], history[-1]
    moved = np.abs(np.asarray(params["kernel"]) - np.asarray(start["kernel"])).max(axis=1)
    # A step is about the rate; 120 of them in one direction would be 1.
    assert moved[mask[:, 0] == 0].max() < 5 * RATE
    assert moved[mask[:, 0] == 1].min() > RATE


@both
@pytest.mark.parametrize("late", ["a row", "a leaf"])
def test_what_gets_its_gradient_late_takes_no_giant_step(name, late):
    """A leaf as an expert that no token chose before: its variance is zero everywhere."""
    later = {k: np.ones((4, *shape), np.float32) for k, shape in SHAPES.items()}
    first = later | {"kernel": later["kernel"] * (0 if late == "a leaf" else 1)}
    options = {}
    if late == "a row":  # without the floor its step would be the rate times 10**5
        first["kernel"][:, 0] = 1e-6
        options["compressor"] = jaxcomp.identity()
    (_, _), (before, _), (after, _) = trained(learned_once(name, **options), [first, later])
    moved = {k: np.abs(np.asarray(after[k]) - np.asarray(before[k])) for k in SHAPES}
    if late == "a row":
        assert RATE < moved["kernel"][0].max() < 20 * RATE
        assert moved["kernel"][1:].max() < 2 * RATE
    else:
        # Momentum and the mean variance of the other leaf are those of gradients of one.
        assert 0.1 * RATE < moved["kernel"].min() and moved["kernel"].max() < 2 * RATE
        assert moved["bias"].max() < 2 * RATE


def test_gradients_that_cancel_in_the_first_step_are_not_divided_by_eps():
    # No leaf's variance is known yet, and this one's mean gradient is zero.
    first, second = (random_tree(seed, 2) for seed in (1, 2))
    first["bias"] = np.stack([np.ones(7), -np.ones(7)]).astype("f4")
    (start, _), (params, state), (after, _) = trained(
        jaxcomp.zero_one_adam(RATE, "replica"), [first, second], num_replicas=2
    )
    for old, new in ((start, params), (params, after)):
        assert np.abs(np.asarray(new["bias"]) - np.asarray(old["bias"])).max() < 4 * RATE
    assert np.abs(np.asarray(state.residual["bias"])).max() < 16 * RATE


EVERY_SECOND = jaxcomp.zero_one_adam(
    RATE, "replica", sync_at=every(2), variance_at=lambda count: (count == 0) | (count == 2)
)


# Apart, where they meet and learn the variance, and apart; 1e20 has a square that is not finite.
@pytest.mark.parametrize(("count", "bad"), [(1, 1e20), (2, np.nan), (3, np.inf)])
def test_a_replica_whose_gradient_is_not_finite_stands_still(count, bad):
    gradients = [jax.tree.map(np.float32, grads) for grads in GRADIENTS[:4]]
    gradients[count]["kernel"][1, 0, 0] = bad
    history = trained(EVERY_SECOND, gradients)
    (before, old), (params, state) = history[count], history[count + 1]
    assert np.asarray(state.skipped).tolist() == [0, 1, 0, 0]
    assert all(np.all(np.isfinite(np.asarray(x))) for x in jax.tree.leaves((params, state)))
    if count == 2:  # a synchronization, to which it brings what it had
        assert not np.any(np.asarray(state.drift["kernel"]))
        assert np.any(np.asarray(params["kernel"]) != np.asarray(before["kernel"]))
    else:
        np.testing.assert_array_equal(state.drift["kernel"][1], old.drift["kernel"][1])
        np.testing.assert_array_equal(state.momentum["kernel"][1], old.momentum["kernel"][1])
        assert np.any(np.asarray(state.momentum["bias"][1] != old.momentum["bias"][1]))
        assert np.any(np.asarray(state.drift["kernel"][0] != old.drift["kernel"][0]))
        np.testing.assert_array_equal(params["kernel"], before["kernel"])


def test_if_every_step_synchronizes_the_state_has_no_drift():
    """Steps are those of a schedule that has every step, which keeps a drift of zeros."""
    of = lambda **options: trained(jaxcomp.zero_one_adam(RATE, "replica", **options), GRADIENTS)
    without, kept = of()[-1], of(sync_at=every(1), variance_at=schedules.growing())[-1]
    assert without[1].drift == optax.MaskedNode()
    assert not protocol.drifts(without[1]) and not protocol.evaluated_drifts(without[1])
    assert not any(map(np.any, jax.tree.leaves(kept[1].drift)))
    kept = kept[0], kept[1]._replace(drift=optax.MaskedNode())
    jax.tree.map(np.testing.assert_array_equal, without, kept)


def test_an_interval_without_a_rate_keeps_its_momenta():
    tx = jaxcomp.zero_one_adam(0.0, "replica", compressor=jaxcomp.identity())
    params, state = trained(tx, [jax.tree.map(np.float32, GRADIENTS[0])])[-1]
    assert np.all(np.isfinite(np.asarray(params["kernel"])))
    np.testing.assert_allclose(state.momentum["kernel"], 0.1 * GRADIENTS[0]["kernel"], rtol=1e-6)


def test_weight_decay_stays_outside_the_buffer():
    make = lambda decay: jaxcomp.zero_one_adam(
        0.125, "replica", weight_decay=decay, compressor=jaxcomp.identity()
    )
    gradients = [jax.tree.map(np.float32, GRADIENTS[0])]
    (start, _), (plain, state) = trained(make(0.0), gradients)
    _, (decayed, other) = trained(make(0.5), gradients)
    np.testing.assert_allclose(
        np.asarray(plain["kernel"]) - np.asarray(decayed["kernel"]),
        0.125 * 0.5 * np.asarray(start["kernel"]),
        rtol=0,
        atol=1e-6,
    )
    np.testing.assert_array_equal(state.momentum["kernel"], other.momentum["kernel"])


def test_a_transformation_can_be_made_before_devices_are_counted():
    program = """
import jax, jaxcomp, optax
schedules, rate = jaxcomp.schedules, optax.cosine_decay_schedule(1.0, 99)
jaxcomp.zero_one_adam(rate, "replica", sync_at=schedules.halving(rate, 99))
jaxcomp.one_bit_adam(rate, "replica")
jaxcomp.cocktail_sgd(optax.adam(rate), "replica")
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_variance_of_coded_gradients_is_off_by_no_more_than_their_code():
    grads = jax.tree.map(np.float32, GRADIENTS[0])
    tx = jaxcomp.zero_one_adam(RATE, "replica", variance_compressor=jaxcomp.quantize(8))
    (_, _), (_, state) = trained(tx, [grads])
    for name, g in grads.items():
        learned = np.sqrt(np.asarray(one_value(state.variance[name]), np.float64) / 1e-3)
        # Half a level on each of two ways, of a scale that float16 rounds.
        level = np.abs(g).max() / 127 * (1 + 2**-10)
        error = np.abs(learned - np.abs(g.mean(axis=0)))
        assert 0 < error.max() < level
