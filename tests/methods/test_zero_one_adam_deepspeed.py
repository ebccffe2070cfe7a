"""DeepSpeed's 0/1 Adam: its steps with weight decay, and what it leaves out and refuses."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomp
from jaxcomp import schedules
from tests.helpers import deepspeed_numpy, replay, replicas, traces
from tests.helpers.replicas import everywhere, mesh_of, transform
from tests.helpers.zero_one_adam_deepspeed import zero_one_adam_deepspeed

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TRACES = ("zero_one_adam", "zero_one_adam_variance")
random_tree = functools.partial(replicas.random_tree, shapes={"bias": (7,), "kernel": (33, 40)})


@pytest.mark.parametrize("name", TRACES)
def test_numpy_takes_the_steps_of_the_authors_code(name):
    trace = np.load(GOLDEN / f"{name}.npz")
    found = deepspeed_numpy.trace_of(trace, 0.0)
    wanted = traces.named(trace, "x")
    largest = max(np.abs(x).max() for x in wanted.values())
    for tensor, x in wanted.items():
        assert np.abs(found[f"x_{tensor}"] - x).max() < 1e-6 * largest
    key = "engine_allreduce_before__same_on_all"
    np.testing.assert_array_equal(found[key], trace[key])


@pytest.mark.parametrize("name", TRACES)
def test_it_takes_the_same_steps_with_weight_decay(name, tmp_path):
    """Which no recorded trace has: in the second one the variance is never frozen."""
    trace = np.load(GOLDEN / f"{name}.npz")
    np.savez(tmp_path / "decay.npz", **deepspeed_numpy.trace_of(trace, 0.05))
    found = list(replay.errors(tmp_path / "decay.npz"))
    assert len(found) >= 19 and max(found) < 1e-6


@pytest.mark.parametrize("interval", [1, 4])
def test_decay_that_enters_the_momentum_is_multiplied(interval):
    """The page states this factor; without gradients nothing but the decay moves anything."""
    rate, decay, b1, steps = 2.0**-10, 0.125, 0.5, 48
    tx = zero_one_adam_deepspeed(
        *(rate, "replica", b1),
        eps=1.0,
        freeze_step=1,
        sync_at=schedules.every(interval, steps),
        variance_at=schedules.until(1),
        compressor=jaxcomp.identity(),
        weight_decay=decay,
    )
    start = {"w": np.ones(8, np.float32)}
    params = [
        x["w"][0] for x, _ in replicas.history_of(tx, start, [{"w": np.zeros((2, 8))}] * steps, 2)
    ]
    strength = np.log(params[steps // 2] / params[steps]) / (steps // 2 * rate * decay)
    factor = 1 / (1 - np.mean(b1 ** np.arange(1, interval + 1)))
    assert strength == pytest.approx(factor, rel=2e-3)


@pytest.mark.parametrize("bad", [np.nan, 1e20])  # the last has a square that is not finite
@pytest.mark.parametrize("count", [0, 3])  # learning the variance together, apart
def test_a_gradient_that_is_not_finite_is_left_out_with_its_decay(count, bad):
    tx = zero_one_adam_deepspeed(
        *(2.0**-7, "replica"),
        eps=1e-2,
        freeze_step=2,
        sync_at=lambda count: count % 2 == 0,
        variance_at=schedules.until(1),
        weight_decay=0.5,
    )
    gradients = [random_tree(step, 4) for step in range(1, 5)]
    gradients[count]["kernel"][1, 0, 0] = bad
    history = replicas.history_of(tx, random_tree(0), gradients, 4)
    (_, old), (_, state) = history[count], history[count + 1]
    assert np.asarray(state.local.skipped).tolist() == [0, 1, 0, 0]
    assert all(np.all(np.isfinite(np.asarray(x))) for x in jax.tree.leaves(history[-1]))
    if count == 3:
        drift, before = state.local.drift["kernel"], old.local.drift["kernel"]
        np.testing.assert_array_equal(drift[1], before[1])
        assert np.all(np.any(drift[jnp.array([0, 2, 3])] != 0, axis=(1, 2)))


def test_it_needs_a_variance_from_the_first_step_on():
    make = functools.partial(zero_one_adam_deepspeed, 0.1, "replica", freeze_step=3)
    params = everywhere(mesh_of(2), random_tree(0))
    for wrong in (schedules.never, schedules.every(2, 100)):
        with pytest.raises(ValueError, match="variance_at does not hold at count 0"):
            transform(make(variance_at=wrong), mesh_of(2), params)
    for right in (None, schedules.until(1)):
        transform(make(sync_at=schedules.every(4, 100), variance_at=right), mesh_of(2), params)
