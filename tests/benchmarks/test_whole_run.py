"""The benchmark of whole runs: its methods are configs whose schedules fit, and its sums."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import worker
from benchmarks.studies import whole_run
from benchmarks.worker import MODELS
from train.placement.resolve import resolve


@pytest.mark.parametrize("steps", [5, 120, 1000])
def test_every_method_fits_a_run_of_this_length(steps):
    for update in whole_run.updates(steps).values():
        config = worker.config_of(update, MODELS["14M"], replicas=4, sequences=1)
        tx = resolve(config).tx
        # Schedules that do not fit each other are refused here.
        jax.eval_shape(jax.vmap(tx.init, axis_name="replica"), {"w": jnp.zeros((4, 3))})


def test_the_table_adds_up_all_steps_and_compares_at_each_rate():
    def row(method, rate, *seconds):
        sent = {"sent": 1e6 * len(seconds)}
        times = {"rate": rate, "step_seconds": {"all": list(seconds)}, "steps": len(seconds)}
        return {"method": method, "nic_bytes": sent, **times}

    rows = [
        row(whole_run.ONE_BIT, "100mbit", 8.0, 8.0, 1.0, 1.0),
        row(whole_run.ZERO_ONE, "100mbit", 3.0, 2.0),
        row(whole_run.ZERO_ONE, "500mbit", 1.0),
    ]
    text = whole_run.table(rows)
    assert "| 100mbit | 1-bit Adam | 18 | 1.00 | 16 | 1.00 |" in text
    assert "| 100mbit | 0/1 Adam | 5 | 0.28 | 4 | 0.25 |" in text
    assert "| 500mbit | 0/1 Adam | 1 |  | 1 |  |" in text
