"""The steps of the authors' own code, replayed from its traces."""

import pathlib

import numpy as np
import pytest

from tests.helpers import deepspeed_numpy, replay, traces

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
# How many steps are replayed.
STEPS = {
    "cocktail_sgd": 10,
    "demo": 20,
    "lamb": 12,
    "one_bit_adam": 19,
    "one_bit_lamb": 23,
    "power_sgd": 12,
    "slamb": 24,
    "zero_one_adam": 17,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_method_takes_the_steps_of_the_authors_code(name, optimized):
    found = list(replay.errors(GOLDEN / f"{name}.npz"))
    assert len(found) >= STEPS[name]
    assert max(found) < (1e-5 if name == "demo" else 1e-6)


def test_a_replay_of_wrong_settings_is_noticed(tmp_path):
    trace = dict(np.load(GOLDEN / "cocktail_sgd.npz"))
    trace["meta_json"] = np.array(str(trace["meta_json"]).replace('"lr": 0.02', '"lr": 0.021'))
    np.savez(tmp_path / "wrong.npz", **trace)
    assert replay.main([str(tmp_path / "wrong.npz")]) == 1


@pytest.mark.parametrize("name", ["zero_one_adam", "zero_one_adam_variance"])
def test_numpy_takes_the_steps_of_deepspeed(name):
    trace = np.load(GOLDEN / f"{name}.npz")
    found = deepspeed_numpy.trace_of(trace)
    wanted = traces.named(trace, "x")
    largest = max(np.abs(x).max() for x in wanted.values())
    for tensor, x in wanted.items():
        assert np.abs(found[f"x_{tensor}"] - x).max() < 1e-6 * largest
    key = "engine_allreduce_before__same_on_all"
    np.testing.assert_array_equal(found[key], trace[key])


@pytest.mark.parametrize("interval", [1, 4])
def test_decay_that_enters_the_momentum_is_multiplied(interval):
    """The page states this factor; without gradients nothing but the decay moves anything."""
    rate, decay, b1, steps = 2.0**-10, 0.125, 0.5, 48
    config = {"betas": (b1, 0.999), "eps": 1.0, "weight_decay": decay, "var_freeze_step": 1}
    config |= {"var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": interval}
    start, rates = np.ones(16, np.float32), np.full(steps + 1, rate)  # 16 entries are not padded
    run = deepspeed_numpy.run(config, start, np.zeros((steps + 1, 2, 16), np.float32), rates)
    params = [step.x[0, 0] for step in run]
    strength = np.log(params[steps // 2 - 1] / params[steps - 1]) / (steps // 2 * rate * decay)
    factor = 1 / (1 - np.mean(b1 ** np.arange(1, interval + 1)))
    assert strength == pytest.approx(factor, rel=2e-3)
