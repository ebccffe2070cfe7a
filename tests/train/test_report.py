"""Notes of a report: which updates get one, by their state and by what they send."""

from types import SimpleNamespace

import numpy as np
import pytest

import jaxcomp
from tests.helpers.replicas import mesh_of
from train import report
from train.config import Config, Optimizer
from train.placement.resolve import resolve

PARAMS = {"w": np.zeros((64, 64), np.float32)}
MORE = {"frozen": np.zeros((64, 64), np.float32)}


def notes(update, bits, trainable=None):
    """The notes of a run of 4 replicas whose step sends so many bits a parameter and direction."""
    config = Config(name="any", steps=9, optimizer=Optimizer(update, 1e-3, 2), trainable=trainable)
    placement, params = resolve(config), PARAMS | (MORE if trainable else {})
    mesh = mesh_of(4)
    state = jaxcomp.state_shapes(placement.tx, params, 4, mesh, "replica")
    return report.notes(
        SimpleNamespace(
            placement=placement,
            mesh=mesh,
            natural=params,
            like={"params": params, "state": state},
            sent_bytes=bits / 8 * 64 * 64 * 2 * 3 / 4,
        )
    )


MEAN = "compressed_mean(sign(), axis_name)"


@pytest.mark.parametrize(
    "update",
    [
        f"chain({MEAN}, adam(learning_rate))",
        f"chain({MEAN}, optax.adamw(learning_rate))",
        f"chain({MEAN}, lamb(learning_rate))",
        f"chain({MEAN}, chain(rmsprop(learning_rate)))",
        f"chain({MEAN}, clip_by_global_norm(1.0), scale_by_adam(), scale(-1e-3))",
        f"chain(clip(1.0), masked({MEAN}, True), adam(learning_rate))",
        "chain(compressed_mean(sign(), axis_name, error_feedback=False), adam(learning_rate))",
    ],
)
@pytest.mark.parametrize("bits", [0.4, 2.1])
def test_a_coarse_mean_before_a_second_moment_is_noted(update, bits):
    (note,) = notes(update, bits)
    assert note.startswith(f"note: compressed_mean at {bits} bits per parameter and direction")
    assert "second moment" in note and "quantize(4)" in note and "momentum" in note


def test_an_update_that_is_evaluated_elsewhere_is_noted():
    (note,) = notes(f"chain({MEAN}, contrib.schedule_free_adamw(learning_rate))", 4.1)
    assert "validation" in note and "schedule_free_eval_params" in note


@pytest.mark.parametrize(
    ("update", "bits"),
    [
        (f"chain({MEAN}, adam(learning_rate))", 4.1),
        (f"chain({MEAN}, adam(learning_rate))", 0),
        (f"chain({MEAN}, sgd(learning_rate, momentum=0.9))", 1.1),
        (f"chain(scale_by_adam(), {MEAN}, scale(-1e-3))", 1.1),
        ("one_bit_adam(learning_rate, axis_name, freeze_step=2)", 1.1),
        ("cocktail_sgd(adam(learning_rate), axis_name)", 0.2),
        ("sharded_optimizer(adam(learning_rate), axis_name)", 2.0),
    ],
)
def test_other_updates_get_no_note(update, bits):
    assert notes(update, bits) == []


def test_the_mean_of_frozen_parameters_is_no_coarse_mean():
    only = "^w$|kernel$"  # of these parameters, and of the model that the config says
    assert notes("cocktail_sgd(adam(learning_rate), axis_name)", 0.2, only) == []
    assert len(notes(f"chain({MEAN}, adam(learning_rate))", 0.4, only)) == 1
