"""Runs in shards: as without them where codes are exact, and they go on, on other shards too."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.helpers.launching import words
from tests.helpers.tiny_runs import shared_tasks, stopped_after, tiny_config
from train import loop, report
from train import task as tasks
from train.config import Data, Images
from train.models.decoder import DecoderConfig
from train.models.vit import ViTConfig
from train.placement.resolve import resolve

pytestmark = pytest.mark.usefixtures("undrawn")

STEPS = 4
DENSE = "chain(compressed_mean(identity(), axis_name), adam(learning_rate, eps=1e-4))"
EXACT = "qsdp(axis_name, identity(), identity())"
ONCE = "qsdp(axis_name, identity(), identity(), gather_once=True)"
HYBRID = "qsdp(axis_name, identity(), identity(), fast_axis=fast_axis, secondary=True)"
LOSSY = (
    "qsdp(axis_name, learned_levels(2, block=64), learned_levels(2, block=64, "
    "rounding='stochastic'))"
)


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """Makes configs of tiny runs; none shares a folder with another."""
    folder = tmp_path_factory.mktemp("qsdp")
    data = Data(path=words(folder / "text"), cache=str(folder / "tokens"), batch=12)
    model = DecoderConfig(layers=2, width=16, heads=2, context=16)
    fixed = {"log_every": 1, "checkpoint_every": 2, "steps": STEPS, "data": data, "model": model}

    def make(name, qsdp, update="adam(learning_rate, eps=1e-4)", **changes):
        return tiny_config(folder, update, name=name, qsdp=qsdp, **(fixed | changes))

    return make


# Runs that differ in name or in where they begin share the compiled program.
shared_task = shared_tasks(99, name="any", runs_dir="", start_from=None)


@pytest.fixture(autouse=True)
def compile_once(monkeypatch):
    monkeypatch.setattr(loop, "make_task", shared_task)


def run(config):
    """Trains; the losses of all steps, and the last one of validation."""
    rows = loop.run(config)
    return [row["loss"] for row in rows[1:]], rows[-1]["val_loss"]


def run_a_step(*configs):
    """Trains a step of each, one after the other, and stops as a signal does."""
    for config in configs:
        with stopped_after(1):
            loop.run(config)


@pytest.mark.parametrize("scan", [False, True])
def test_exact_codes_train_as_replicas_do_that_hold_everything(config_of, scan):
    model = DecoderConfig(layers=2, width=16, heads=2, context=16, scan=scan)
    losses, last = run(config_of(f"dense {scan}", None, DENSE, model=model))
    in_shards, last_in_shards = run(config_of(f"exact {scan}", EXACT, model=model))
    # Gradients are summed in another order, and Adam with eps=1e-4 magnifies that little.
    np.testing.assert_allclose(in_shards, losses, rtol=1e-5)
    assert abs(last_in_shards - last) < 1e-5 * last

    once = config_of(f"once {scan}", ONCE, model=model, accumulate=3)
    losses_once, last_once = run(once)
    np.testing.assert_allclose(losses_once, losses, rtol=1e-5)
    assert abs(last_once - last) < 1e-5 * last
    task = shared_task(once)
    # Weights cross once and gradients once, half of them a replica, in spite of microbatches.
    assert abs(task.sent_bytes / (2 * 4 * tasks.num_parameters(task) / 2) - 1) < 0.01
    assert "1.0x fewer than a float32 sharded step" in report.text(task)


@pytest.fixture(scope="module")
def exact(config_of):
    """Losses of a run of exact codes that nothing has disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_task", shared_task)
        return run(config_of("undisturbed", EXACT))


def test_a_run_goes_on_bit_for_bit_and_on_other_shards_to_rounding(config_of, exact):
    whole = run(config_of("whole", LOSSY))
    parts = config_of("parts", LOSSY)
    run_a_step(parts)
    assert run(parts) == whole

    moved = config_of("moved", EXACT)
    run_a_step(moved, *(dataclasses.replace(moved, replicas=count) for count in (3, 1)))
    losses, last = run(moved)
    np.testing.assert_allclose(losses, exact[0], rtol=1e-5)
    assert abs(last - exact[1]) < 1e-5 * last


def test_a_mesh_of_two_axes_trains_alike_and_a_run_moves_between_meshes(config_of, exact):
    hybrid = config_of("two axes", HYBRID, replicas=4, fast=2)
    run_a_step(hybrid, dataclasses.replace(hybrid, replicas=3, fast=1), hybrid)
    losses, last = run(dataclasses.replace(hybrid, replicas=2))  # one host is left
    np.testing.assert_allclose(losses, exact[0], rtol=1e-5)
    assert abs(last - exact[1]) < 1e-5 * last

    task = shared_task(hybrid)
    text = report.text(task)
    numel = tasks.num_parameters(task)
    assert "bytes a step across the slow axis of 2 x 2 replicas," in text
    # Weights cross it once and gradients once, half of them a device; without secondary shards 3.
    assert abs(task.sent_bytes / (2 * 4 * numel / 2 / 2) - 1) < 0.01
    assert "1.5x fewer than a float32 sharded step" in text


def test_a_run_in_shards_begins_with_the_parameters_of_another_run(config_of):
    """The way back, from shards: tests/train/test_evaluation.py."""
    dense = config_of("dense", None, DENSE)
    _, last = run(dense)
    start_from = f"{dense.runs_dir}/dense"
    rows = loop.run(config_of("tuned", HYBRID, replicas=4, fast=2, start_from=start_from))
    assert abs(rows[0]["val_loss"] / last - 1) < 1e-6


def test_the_report_counts_parameters_and_what_is_held(config_of):
    task = shared_task(config_of("any", LOSSY))
    model = task.config.model
    per_block = 12 * model.width**2 + 13 * model.width
    numel = 256 * model.width + model.context * model.width + 2 * model.width + 2 * per_block
    assert tasks.num_parameters(task) == numel
    assert f"{numel:,} parameters on 2 replicas" in report.text(task)
    ratio = 3 * 4 * numel / 2 / task.sent_bytes
    assert f"{ratio:.1f}x fewer than a float32 sharded step" in report.text(task)
    held = sum(x.sharding.shard_shape(x.shape)[-1] for x in jax.tree.leaves(task.like["params"]))
    assert numel / 2 <= held < 1.01 * numel / 2
    # Steps 1, 2 and 4 fit levels.
    assert task.rounds == {"all": STEPS, "levels": 3}
    assert task.sent_bytes == task.sent[""] + task.sent["levels"] * 3 / STEPS > task.sent[""]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qsdp": "quantize(8)"}, "is a Compressor; write qsdp"),
        ({"qsdp": "qsdp(axis)"}, "'axis' is not a name"),
        ({"qsdp": EXACT, "overlap": True}, "overlap=True cannot be used with qsdp"),
        ({"qsdp": EXACT, "fast": 2}, "has the fast axis None, but fast=2 makes 'fast'"),
        ({"qsdp": "qsdp(axis_name, fast_axis='f')"}, "has the fast axis 'f', but fast=1"),
        (
            {
                "qsdp": EXACT,
                "objective": "classify",
                "model": ViTConfig(),
                "data": Images(batch=8),
            },
            "gather their weights",
        ),
    ],
)
def test_what_is_no_run_in_shards_is_refused(config_of, changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(config_of("refused", **({"qsdp": None} | changes)))
