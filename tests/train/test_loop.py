"""Whole runs of a tiny model: what they leave behind, and how they stop, go on and fail."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxcomp.launch import claims, exits, watchdog
from tests.helpers.launching import words
from tests.helpers.restoring import restore
from tests.helpers.tiny_runs import (
    EXACT_SGD,
    TINY,
    shared_tasks,
    stopped_after,
    tiny_config,
    unreadable_once,
)
from train import examples, loop, report
from train import task as tasks
from train.checkpoints import files
from train.config import Data, Optimizer, facts
from train.config.optimizer import schedule
from train.data import texts
from train.output import metrics

STOCHASTIC = (
    "chain(compressed_mean(quantize(4, rounding='stochastic'), axis_name), adam(learning_rate))"
)
EXACT_ADAM = "chain(compressed_mean(identity(), axis_name), adam(learning_rate))"
# Meets seldom, so that runs stop between meetings. Of all other methods:
# tests/methods/test_every_method.py, and on other numbers of replicas tests/users/test_elastic.py.
SLAMB = "slamb(learning_rate, axis_name, density=0.5, sync_every=4, exact_numel=0)"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def config_of(text, tmp_path, monkeypatch, undrawn):
    """Makes configs whose rows, checksums and evaluations fall on different steps.

    Their runs are in the default `runs_dir`, which is relative.
    """
    monkeypatch.chdir(tmp_path)

    def make(update=STOCHASTIC, steps=6, path=text, **changes):
        every = {"log_every": 2, "eval_every": 3, "checksum_every": 4, "checkpoint_every": 100}
        optimizer = Optimizer(update, 1e-2, 2, changes.pop("schedule", "cosine"))
        fixed = {"name": "tiny", "replicas": 4, "eval_batches": 2, "runs_dir": "runs"}
        fixed |= {"steps": steps, "optimizer": optimizer, "data": Data(path=path, batch=8)}
        return tiny_config(tmp_path, **(every | fixed | changes))

    return make


@pytest.fixture(scope="module")
def shared_task(text):
    """Runs of one model and update share the compiled program."""
    irrelevant = {"name": "any", "resume": True, "log_every": 1, "eval_every": 1}
    irrelevant |= {"runs_dir": str(pathlib.Path(text).parent), "accept_data": False}
    return shared_tasks(12, **irrelevant, checkpoint_every=1)  # few: see `programs_of_one_module`


@pytest.fixture(autouse=True)
def compile_once(monkeypatch, shared_task):
    monkeypatch.setattr(loop, "make_task", shared_task)


@pytest.fixture
def change_task(monkeypatch):
    """Changes functions of the next run's task: `change(task) -> task`."""

    def install(change):
        make_task = loop.make_task
        monkeypatch.setattr(loop, "make_task", lambda config: change(make_task(config)))

    return install


def folder_of(config):
    return pathlib.Path(config.runs_dir, config.name)


def saved(config):
    """Everything in the newest checkpoint: step, progress, and the bytes of every leaf."""
    directory = folder_of(config) / "checkpoints"
    tree, metadata, step = restore(directory, loop.make_task(config).like)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    contents = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
    return step, metadata["progress"], contents


def saved_params(config):
    directory = folder_of(config) / "checkpoints"
    return restore(directory, loop.make_task(config).like)[0]["params"]


def without_times(rows):
    return [{name: row[name] for name in row if name != "step_seconds"} for row in rows]


# What a run leaves behind.


def test_run_leaves_record_metrics_picture_checkpoint_and_report(config_of, text):
    config = config_of()
    rows = loop.run(config)
    folder = folder_of(config)
    assert sorted(os.listdir(folder)) == [
        *("checkpoints", "config.json", "loss.png", "metrics.jsonl", "report.txt", "writer")
    ]
    record = json.loads((folder / "config.json").read_text())
    assert record["config"] == json.loads(facts.to_json(config))
    assert record["versions"]["jax"] == jax.__version__
    assert record["versions"].keys() == {"python", "jax", "jaxlib", "flax", "optax", "numpy"}
    assert record["hardware"].endswith(f"{os.cpu_count()} cores")
    assert record["data"]["sha256"] == texts.read(config.data, TINY.context).record["sha256"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert files.latest(folder / "checkpoints") == 6
    sent = record["plan"]["sent_bytes_per_step"]
    assert f"{sent:,.0f} bytes a step" in (folder / "report.txt").read_text()
    assert rows == metrics.read(folder / "metrics.jsonl")


def test_rows_count_what_was_sent_and_say_rate_and_time(config_of):
    config = config_of()
    rows = loop.run(config)
    plan = json.loads((folder_of(config) / "config.json").read_text())["plan"]
    assert 0 < plan["sent_bytes_per_step"] < 2 * 4 * plan["parameters"] * 3 / 4
    assert [row["step"] for row in rows] == [0, 2, 3, 4, 6]
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 3, 6]
    assert [row["step"] for row in rows if row.get("checksum_spread") == 0] == [4, 6]
    assert rows[0]["loss"] is None and "step_seconds" not in rows[0]
    rate = schedule(config.optimizer, config.steps)
    for row in rows:
        assert row["sent_bytes"] == row["step"] * plan["sent_bytes_per_step"]
        assert row["dense_bytes"] == row["step"] * plan["dense_bytes_per_step"]
        assert row["rounds"] == row["step"] and row["skipped"] == 0
        # The update of step n is the optimizer's with count n - 1.
        assert row["learning_rate"] == float(rate(max(0, row["step"] - 1)))
    assert all(row["step_seconds"] > 0 and row["loss"] > 0 for row in rows[1:])
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]


@pytest.mark.parametrize("terminal", [True, False])
def test_step_seconds_are_of_steps_alone_and_shown(
    config_of, capsys, change_task, monkeypatch, terminal
):
    now = [0.0]

    def takes(seconds, function):
        def longer(*args):
            now[0] += seconds
            return function(*args)

        return longer

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(loop._Run, "require_equal", takes(100.0, loop._Run.require_equal))
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    change_task(
        lambda task: task._replace(step=takes(0.5, task.step), evaluate=takes(9.0, task.evaluate))
    )
    # Every window of steps has an evaluation, a checksum or a save before it or in it.
    rows = loop.run(config_of(checkpoint_every=1))
    assert [row["step_seconds"] for row in rows[1:]] == [0.5] * 4
    shown = re.findall(r", loss ([\d.]+), 0.500 s/step", capsys.readouterr().err)
    assert shown[-1] == f"{rows[-1]['loss']:.3f}"


def test_loss_of_a_row_is_the_mean_over_its_steps_in_whatever_pieces_they_are_gathered(
    config_of, monkeypatch
):
    each = loop.run(config_of(name="each", log_every=1))
    monkeypatch.setattr(tasks, "_MOST_GATHERED", 2)
    task = tasks.make_task(config_of(name="some", log_every=5, eval_every=100, checksum_every=100))
    monkeypatch.setattr(loop, "make_task", lambda config: task)
    some = loop.run(task.config)
    mean = sum(row["loss"] for row in each[1:6]) / 5
    assert [row["step"] for row in some] == [0, 5, 6] and some[1]["loss"] == mean


# Stopping and going on.


@pytest.mark.parametrize(("update", "held"), [(STOCHASTIC, "residual"), (SLAMB, "drift")])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(config_of, change_task, update, held):
    whole, parts = (config_of(update, name=name) for name in ("whole", "parts"))
    # Step 4, the fifth, is left out: a checkpoint counts it before any row tells it.
    change_task(poisoned_at(4))
    rows = loop.run(whole)
    assert rows[-1]["skipped"] + rows[-1]["left_out"] > 0
    for count, step in ((1, 1), (2, 3), (2, 5)):
        with stopped_after(count, f"stopped at step {step}; run the same"):
            loop.run(parts)
        assert files.latest(folder_of(parts) / "checkpoints") == step
    contents = saved(parts)[2]
    assert any(any(contents[name]) for name in contents if held in name)
    assert without_times(loop.run(parts)) == without_times(rows)
    assert saved(parts) == saved(whole)


def test_a_run_may_begin_with_anothers_parameters(config_of, monkeypatch):
    first = config_of(EXACT_SGD, name="first")
    last = loop.run(first)[-1]["val_loss"]
    second = config_of(STOCHASTIC, name="second", start_from=str(folder_of(first)))
    rows = loop.run(second)
    assert rows[0]["val_loss"] == last and rows[-1]["val_loss"] < last
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 6
    other = dataclasses.replace(second, name="third", model=dataclasses.replace(TINY, width=32))
    with pytest.raises(ValueError, match=r"is of another model.*params/.*got float32\[.*16"):
        loop.run(other)
    nothing = dataclasses.replace(second, name="fourth", start_from=str(folder_of(first) / "no"))
    monkeypatch.setattr(loop, "make_task", None)  # which would compile
    with pytest.raises(ValueError, match="no checkpoint in .*no/checkpoints, .*; train that run"):
        loop.run(nothing)


def test_a_run_ends_with_what_replicas_did_since_they_met(config_of, monkeypatch):
    """The default interval of `slamb` is of more steps than the run has."""
    shown = []

    @contextlib.contextmanager
    def progress(name, first, steps):
        yield shown.append

    monkeypatch.setattr("train.output.progress.progress", progress)
    config = config_of("slamb(learning_rate, axis_name)", replicas=2)
    rows = loop.run(config)
    before, last = rows[-2], rows[-1]
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    # Before the end each replica evaluates its own parameters: the consensus has not moved.
    assert losses[0] > losses[1] > losses[2]
    tree = restore(folder_of(config) / "checkpoints", loop.make_task(config).like)[0]
    own = jax.tree.map(lambda p, d: p + np.mean(d, axis=0), tree["params"], tree["state"].drift)
    found = loop.make_task(config).evaluate(jax.tree.map(np.asarray, own))["loss"]
    np.testing.assert_allclose(found, last["val_loss"], rtol=1e-6)
    # The mean of two is sent once, in float32, beside what each step sends; no rate shows it.
    plan = json.loads((folder_of(config) / "config.json").read_text())["plan"]
    steps = before["sent_bytes"] / before["step"] * last["step"]
    assert 1 <= (last["sent_bytes"] - steps) / (4 * plan["parameters"]) < 1.01
    assert [row["sent_bytes"] for row in shown] == [*(r["sent_bytes"] for r in rows[1:-1]), steps]
    second = config_of(name="second", start_from=str(folder_of(config)))
    assert loop.run(second)[0]["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)


def test_finished_run_is_left_as_it_is(config_of, capsys):
    rows, record = loop.run(config_of()), folder_of(config_of()) / "config.json"
    before = record.read_bytes()
    assert loop.run(config_of()) == rows == loop.run(config_of(log_every=3))
    assert record.read_bytes() == before  # of the settings that made its steps
    assert "no step is left for other settings: log_every 2 -> 3; write" in capsys.readouterr().err
    (folder_of(config_of()) / "metrics.jsonl").unlink()
    assert loop.run(config_of()) == []


# Two runs in one folder.


def test_a_run_begins_nothing_in_a_folder_that_has_a_writer(config_of):
    config = config_of()
    with claims.claimed(folder_of(config)):
        with pytest.raises(exits.Transient, match="has a writer: process .* Wait for its end"):
            loop.run(config)
        assert [path.name for path in folder_of(config).iterdir()] == ["writer"]
    assert loop.run(config)[-1]["step"] == 6


def test_a_run_that_was_replaced_ends_without_a_row_or_a_checkpoint(config_of, change_task):
    config = config_of(log_every=1, checkpoint_every=1)
    note = folder_of(config) / "writer" / "1"

    def replaced_at_3(task):
        def step(*args):
            done.append(None)
            if len(done) == 4:
                note.unlink()
            return task.step(*args)

        done = []
        return task._replace(step=step)

    change_task(replaced_at_3)
    with pytest.raises(exits.Transient, match="another one has taken .* over"):
        loop.run(config)
    assert metrics.read(folder_of(config) / "metrics.jsonl")[-1]["step"] == 3
    # Step 3 may have been on its way to the disk.
    assert files.latest(folder_of(config) / "checkpoints") in (2, 3)


# What a checkpoint may not be.


def corrupt(config, step):
    paths = [path for path in folder_of(config).rglob(f"checkpoints/{step}/state/**/*")]
    largest = max((path for path in paths if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_kept_and_the_run_ends_as_ever(config_of, capsys):
    config = config_of(checkpoint_every=4)
    rows = loop.run(config)
    corrupt(config, 6)
    capsys.readouterr()
    assert without_times(loop.run(config)) == without_times(rows)
    assert "from step 4 on since step 6 is damaged: the bytes of state/" in capsys.readouterr().err
    checkpoints = folder_of(config) / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} >= {"4", "6", "damaged-6"}
    for step in (4, 6):
        corrupt(config, step)
    with pytest.raises(ValueError, match="No other checkpoint there is good"):
        loop.run(config)
    assert {path.name for path in checkpoints.iterdir()} >= {"4", "6"}


def test_checkpoint_that_does_not_fit_is_refused_and_kept(config_of, tmp_path, change_task, capsys):
    loop.run(config_of())
    before = saved(config_of())
    log = (folder_of(config_of()) / "metrics.jsonl").read_text()
    refused = [
        ({"update": EXACT_ADAM, "schedule": "constant"}, "of another model, optimizer"),
        ({"resume": False}, "has a checkpoint of step 6, which --no-resume would overwrite"),
        ({"steps": 5}, "was trained to step 6, but steps=5; write more --steps"),
    ]
    for changes, message in refused:
        with pytest.raises(ValueError, match=message):
            loop.run(config_of(**changes))
    (tmp_path / "other.txt").write_text("something else " * 100)
    other = examples.read(config_of(path=str(tmp_path / "other.txt")))
    change_task(lambda task: task._replace(examples=other))
    with pytest.raises(ValueError, match="was trained on other data .* or write --accept-data"):
        loop.run(config_of())
    assert saved(config_of()) == before
    assert (folder_of(config_of()) / "metrics.jsonl").read_text() == log
    assert loop.run(config_of(accept_data=True, steps=8))[-1]["step"] == 8
    assert "from step 6 on accepts data that changed" in capsys.readouterr().err


# Numbers that are not finite, and replicas that differ.


def poisoned_at(*steps):
    """One replica's first token does not exist at these steps: its loss is NaN."""

    def change(task):
        def batch(step, seen=None):
            tokens = task.batch(step)
            wrong = tokens.at[0, 0].set(300) if step in steps else tokens
            return jax.device_put(wrong, tokens.sharding)

        return task._replace(batch=batch)

    return change


def test_poisoned_batch_of_one_replica_is_skipped_by_all(config_of, change_task):
    config = config_of()
    change_task(poisoned_at(1, 5))
    rows = loop.run(config)
    assert [row["skipped"] for row in rows] == [0, 1, 1, 1, 2]
    assert [row["loss"] is None for row in rows] == [True, True, False, False, True]
    rate = schedule(config.optimizer, config.steps)
    assert rows[-1]["learning_rate"] == float(rate(3))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(saved_params(config)))
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]


def test_a_step_that_one_replica_leaves_out_by_itself_is_counted(config_of, change_task):
    change_task(poisoned_at(1, 5))
    rows = loop.run(config_of(update="cocktail_sgd(adam(learning_rate), axis_name)"))
    assert [row["skipped"] for row in rows] == [0, 0, 0, 0, 0]
    assert [row["left_out"] for row in rows] == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("checksum_every", [4, 100], ids=["in a comparison", "before a save"])
def test_replicas_gone_apart_stop_the_run_with_the_step(
    config_of, change_task, monkeypatch, checksum_every
):
    monkeypatch.setattr(report, "text", lambda task: "")  # it reads the compiled step

    def change(task):
        def step(params, state, batch):
            params, state, out = task.step(params, state, batch)
            if int(state[0].count) == 3:
                leaf = params["position"]
                copies = [shard.data for shard in leaf.addressable_shards]
                copies[1] = copies[1].at[0, 0].add(2**-20)
                params["position"] = jax.make_array_from_single_device_arrays(
                    leaf.shape, leaf.sharding, copies
                )
            return params, state, out

        return task._replace(step=step)

    change_task(change)
    config = config_of(checkpoint_every=2, checksum_every=checksum_every)
    with pytest.raises(exits.Transient, match="after step 4 the replicas' parameters"):
        loop.run(config)
    assert files.latest(folder_of(config) / "checkpoints") == 2


# Data that cannot be read.


@pytest.mark.parametrize(
    ("where", "step"),
    [({"step": 4}, 4), ({"evaluations": [2]}, 3), ({"evaluations": [2, 3]}, 3)]
    + [({"evaluations": [3, 4]}, 6)],
)
def test_a_run_whose_data_cannot_be_read_saves_first_and_goes_on_when_they_can(
    config_of, change_task, where, step
):
    whole, harmed = (config_of(name=name) for name in ("whole", "harmed"))
    rows = loop.run(whole)
    change_task(unreadable_once(**where))
    with pytest.raises((ValueError, OSError), match="a file cannot be read"):
        loop.run(harmed)
    assert files.latest(folder_of(harmed) / "checkpoints") == step
    assert without_times(loop.run(harmed)) == without_times(rows)
    whole, harmed = (dataclasses.replace(config, steps=8) for config in (whole, harmed))
    assert without_times(loop.run(harmed)) == without_times(loop.run(whole))
    assert saved(harmed) == saved(whole)


@pytest.mark.parametrize(
    ("every", "step", "times"),
    [(1, 2, 1), (3, 4, 2), (3, 6, 1), (1, 6, 2)],
)
def test_a_row_that_cannot_be_written_is_the_first_of_the_next_start(
    config_of, monkeypatch, step, times, every
):
    """Local steps: at the end, the bytes of a last mean are counted once."""
    update = "local_steps(sgd(learning_rate), axis_name, every=2)"
    make = lambda name: config_of(update, name=name, log_every=1, checkpoint_every=every)
    whole, harmed = make("whole"), make("harmed")
    rows, failed, log = loop.run(whole), [], folder_of(harmed) / "metrics.jsonl"

    def full(file):
        of_rows = os.path.samestat(os.fstat(file), log.stat()) if log.exists() else False
        if of_rows and metrics.read(log)[-1]["step"] == step and len(failed) < times:
            failed.append(step)
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            loop.run(harmed)
    last = metrics.read(log)[-1]["step"]
    saved_at = files.latest(folder_of(harmed) / "checkpoints") or 0
    assert len(failed) == times and saved_at == step
    assert last == step - (times > 1)  # a second attempt may be enough
    assert without_times(loop.run(harmed)) == without_times(rows)
    whole, harmed = (dataclasses.replace(config, steps=8) for config in (whole, harmed))
    assert without_times(loop.run(harmed)) == without_times(loop.run(whole))
    assert saved(harmed) == saved(whole)


def test_steps_that_others_have_begun_are_made_with_the_last_batch(
    config_of, change_task, monkeypatch
):
    asked = []

    @contextlib.contextmanager
    def watch(*args):
        def stop(step, wish):
            asked.append(wish)
            return wish if asked.count("ERROR") == 2 else ""  # another one had begun a step more

        yield watchdog.Watch(lambda *args: None, stop)

    monkeypatch.setattr(watchdog, "watch", watch)
    change_task(unreadable_once(step=4))
    with pytest.raises(ValueError, match="a file cannot be read"):
        loop.run(config_of())
    assert asked == [""] * 5 + ["ERROR"] * 2
    assert files.latest(folder_of(config_of()) / "checkpoints") == 5


def test_too_little_memory_is_a_mistake_and_not_lost_processes(config_of, change_task):
    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    change_task(lambda task: task._replace(step=full))
    with pytest.raises(ValueError, match="more memory than a device has .*9 bytes.*--accumulate"):
        loop.run(config_of())
