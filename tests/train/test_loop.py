"""Whole runs of a tiny model: what they leave behind, and how they stop, go on and fail."""

import contextlib
import dataclasses
import errno
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxcomp.launch import claims, exits, watchdog
from tests.helpers.launching import TINY_ARGS, words
from tests.helpers.replicas import one_value
from train import __main__ as program
from train import examples, loop, report
from train import task as tasks
from train.checkpoints import files, store
from train.config import Config, Data, Optimizer, facts
from train.config.optimizer import schedule
from train.data import texts
from train.models.decoder import Decoder, DecoderConfig
from train.models.losses import cross_entropy
from train.models.modules import PathRngs, split
from train.output import metrics
from train.placement import devices

ROOT = pathlib.Path(__file__).parents[2]
NANO = ROOT / "configs" / "nano_dense.py"
ADAM = "chain(compressed_mean({}, axis_name), adam(learning_rate))"
STOCHASTIC = ADAM.format("quantize(4, rounding='stochastic')")
EXACT_SGD = "chain(compressed_mean(identity(), axis_name), sgd(learning_rate))"
# Adam divides by |g| + eps: of gradients that are zero but for rounding only eps keeps it.
EXACT_ADAM = "chain(compressed_mean(identity(), axis_name), adam(learning_rate, eps=1e-4))"
# They meet seldom, so that runs stop between meetings. Of all other methods:
# tests/methods/test_every_method.py, and on other numbers of replicas tests/users/test_elastic.py.
ZERO_ONE_ADAM = (
    "zero_one_adam(learning_rate, axis_name, sync_at=schedules.every(4, steps, after=1), "
    "variance_at=schedules.every(4, steps, after=1))"
)
SLAMB = "slamb(learning_rate, axis_name, density=0.5, sync_every=4, exact_numel=0)"
TINY = DecoderConfig(layers=1, width=16, heads=2, context=16)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return words(tmp_path_factory.mktemp("text"))


@pytest.fixture
def config_of(text, tmp_path, monkeypatch, undrawn):
    """Makes configs whose rows, checksums and evaluations fall on different steps.

    Their runs are in the default `runs_dir`, which is relative.
    """
    monkeypatch.chdir(tmp_path)

    def make(update=STOCHASTIC, rate=1e-2, name="tiny", batch=8, schedule="cosine", **changes):
        steps = changes.pop("steps", 6)
        every = {"log_every": 2, "eval_every": 3, "checksum_every": 4, "checkpoint_every": 100}
        return Config(
            name=name,
            steps=steps,
            optimizer=Optimizer(update, rate, min(2, steps - 1), schedule),
            eval_batches=2,
            data=Data(path=changes.pop("path", text), batch=batch),
            model=changes.pop("model", TINY),
            **(every | changes),
        )

    return make


@functools.lru_cache(maxsize=12)  # few: see `programs_of_one_module`
def compiled(config):
    return tasks.make_task(config)


@pytest.fixture(autouse=True)
def compile_once(monkeypatch, text):
    """Runs of one model and update share the compiled program."""
    irrelevant = {"name": "any", "resume": True, "log_every": 1, "eval_every": 1}
    irrelevant |= {"runs_dir": str(pathlib.Path(text).parent), "accept_data": False}

    def make_task(config):
        task = compiled(dataclasses.replace(config, **irrelevant, checkpoint_every=1))
        return task._replace(config=config)

    monkeypatch.setattr(loop, "make_task", make_task)


@pytest.fixture
def stop_after(monkeypatch):
    """Asks the next run to stop after so many of its steps, as a signal does."""

    def install(count):
        @contextlib.contextmanager
        def stop_signals():
            answers = iter([""] * count + ["SIGTERM"])
            yield lambda: next(answers)

        monkeypatch.setattr(loop, "stop_signals", stop_signals)

    return install


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
    tree, metadata, step = store.restore(directory, loop.make_task(config).like)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    contents = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
    return step, metadata["progress"], contents


def saved_params(config):
    directory = folder_of(config) / "checkpoints"
    return store.restore(directory, loop.make_task(config).like)[0]["params"]


def without_times(rows):
    return [{name: row[name] for name in row if name != "step_seconds"} for row in rows]


def first_params(config):
    """The initial parameters of a config, on one device."""
    return jax.tree.map(one_value, loop.make_task(config).init()[0])


def loss_fn(params, tokens):
    apply, _ = split(Decoder(TINY, rngs=PathRngs(0)))
    return cross_entropy(apply(params, tokens[:, :-1]), tokens[:, 1:])


def all_params(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


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


@pytest.mark.parametrize(
    ("update", "held"),
    [
        (STOCHASTIC, "residual"),
        (SLAMB, "drift"),
    ],
)
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    config_of, stop_after, change_task, update, held
):
    whole, parts = (config_of(update, name=name) for name in ("whole", "parts"))
    # Step 4, the fifth, is left out: a checkpoint counts it before any row tells it.
    change_task(poisoned_at(4))
    rows = loop.run(whole)
    assert rows[-1]["skipped"] + rows[-1]["left_out"] > 0
    for count, step in ((1, 1), (2, 3), (2, 5)):
        stop_after(count)
        with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step}; run the same"):
            loop.run(parts)
        assert files.latest(folder_of(parts) / "checkpoints") == step
    contents = saved(parts)[2]
    assert any(any(contents[name]) for name in contents if held in name)
    stop_after(100)
    assert without_times(loop.run(parts)) == without_times(rows)
    assert saved(parts) == saved(whole)


def test_a_run_may_begin_with_anothers_parameters(config_of):
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
    tree = store.restore(folder_of(config) / "checkpoints", loop.make_task(config).like)[0]
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


def test_finished_run_is_left_as_it_is(config_of):
    rows = loop.run(config_of())
    assert loop.run(config_of()) == rows
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
    assert np.all(np.isfinite(all_params(saved_params(config))))
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


# The mathematics of a step.


def trained(config, steps=3):
    """The parameters after a few steps, compared over the replicas."""
    task = loop.make_task(config)
    params, state = task.init()
    for step in range(steps):
        params, state, _ = task.step(params, state, task.batch(step))
    return jax.tree.map(one_value, params)


def test_identity_is_adam_on_the_gradient_of_the_whole_batch(config_of):
    config = config_of(EXACT_ADAM, schedule="constant")
    params = first_params(config)
    optimizer = optax.adam(schedule(config.optimizer, config.steps), eps=1e-4)
    state = optimizer.init(params)
    for step in range(3):
        tokens = jnp.asarray(np.asarray(loop.make_task(config).batch(step)))
        updates, state = optimizer.update(jax.grad(loss_fn)(params, tokens), state)
        params = optax.apply_updates(params, updates)
    moved = np.abs(all_params(params) - all_params(first_params(config))).max()
    assert moved > 5e-3
    # Gradients differ by 1e-8, a few float32 roundings of 0.1; over eps, times the rate.
    np.testing.assert_allclose(
        all_params(trained(config)), all_params(params), rtol=0, atol=3 * 1e-8 / 1e-4 * 1e-2
    )


@pytest.mark.parametrize(("changes", "size"), [({"accumulate": 2}, 4), ({"replicas": 0}, 8)])
def test_division_of_the_batch_changes_nothing_but_rounding(config_of, changes, size):
    make = functools.partial(config_of, EXACT_SGD, rate=0.5, schedule="constant")
    one, other = trained(make(replicas=1)), trained(make(**changes))
    assert loop.make_task(make(**changes)).mesh.size == size
    moved = np.abs(all_params(one) - all_params(first_params(make(replicas=1)))).max()
    assert moved > 1e-2
    # Means over 128 tokens in another order: a few float32 roundings of the largest update.
    np.testing.assert_allclose(
        all_params(other), all_params(one), rtol=0, atol=8 * 2**-24 * max(moved, 1.0)
    )


def test_bfloat16_computes_in_16_bits_and_keeps_float32_parameters(config_of):
    full = config_of(EXACT_SGD, rate=0.5, schedule="constant", replicas=1)
    half = dataclasses.replace(full, model=dataclasses.replace(TINY, dtype="bfloat16"))
    full_loss, half_loss = (
        loop.make_task(config).evaluate(trained(config))["loss"] for config in (full, half)
    )
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(trained(half)))
    # bfloat16 keeps 8 bits of each activation; errors of many average out in the loss.
    assert 0 < abs(half_loss - full_loss) < 2**-8 * full_loss


# The command line.


def main(monkeypatch, capsys, *args):
    """Runs the program in this process, whose devices exist; returns status, output, errors."""
    monkeypatch.setattr(devices, "start", lambda replicas, num_processes=1: None)
    status = 0
    try:
        program.main([str(arg) for arg in args])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def reported(monkeypatch, capsys, tmp_path, text):
    """Prints the report of `nano_dense` with another update, and other settings."""
    monkeypatch.chdir(tmp_path)

    def report(update, args=""):
        args = [*TINY_ARGS.split(), "--data.path", text, *args.split()]
        args += ["--optimizer.update", update]
        status, out, err = main(monkeypatch, capsys, NANO, "--report", *args)
        assert (status, err, os.listdir(tmp_path)) == (0, "", [])
        return out

    return report


def test_report_prints_bytes_and_makes_nothing(reported):
    # Wide enough that most parameters do not travel exact.
    out = reported(ADAM.format("sign(block=128)"), "--model.width 128")
    for line in ("all-to-all", "bytes a step", "MiB of parameters"):
        assert line in out
    assert re.search(r"in float32, \d+ arrays: block_\*/", out) and out.count("note: ") == 1


def test_report_of_a_run_that_skips_rounds_counts_its_bits(reported):
    out = reported(ZERO_ONE_ADAM, "--steps 12 --optimizer.warmup-steps 1")
    number = lambda pattern: float(re.search(pattern, out)[1].replace(",", ""))
    total, bits = number(r"([\d,]+) bytes over the run"), number(r"run, ([\d.]+) bits")
    dense = number(r"\(dense: ([\d,]+), 32;")
    assert dense == 12 * 4 * number(r"([\d,]+) parameters on 4 replicas") * 2 * 3 / 4
    assert bits == pytest.approx(32 * total / dense, abs=0.005)
    assert "of 12 steps 4 send anything: synchronize 4 times" in out and bits < 32 * 5 / 12
    # 0.15 of 32 bits, and 0.85 of one with a float32 scale for 1,024.
    assert number(r"dense steps: about [\d,]+, ([\d.]+)\)") == 5.68


def test_one_replica_reports_that_it_sends_nothing(reported):
    out = reported(ZERO_ONE_ADAM, "--replicas 1")
    assert "one replica sends 0 bytes a step" in out and "nothing to send with one replica" in out


def test_run_ends_with_the_loss_and_the_picture(monkeypatch, capsys, tmp_path, text):
    monkeypatch.chdir(tmp_path)
    args = [
        *TINY_ARGS.split(),
        *"--steps 2 --optimizer.warmup-steps 0 --model.width 128".split(),
        "--data.path",
        text,
    ]
    update = ADAM.format("sign()")
    status, out, err = main(monkeypatch, capsys, NANO, *args, "--optimizer.update", update)
    assert status == 0
    first, *facts, picture = out.splitlines()
    assert re.fullmatch(r"runs/nano_dense: step 2, validation loss \d\.\d{4} nats per byte", first)
    assert [fact.split()[0] for fact in facts] == ["time", "sent", "losses", "checkpoint"]
    assert picture == "runs/nano_dense/loss.png" and pathlib.Path(picture).is_file()
    assert err.startswith("note: compressed_mean at ") and "second moment trains badly" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("configs/nano_dens.py", "is no config file; write one of"),
        ("{nano} --data.path {tmp}/missing", "missing' does not exist; name a text file"),
        ("{nano} --replicas 16", "replicas=16, but there are 8 cpu devices"),
        ("{nano} --replicas 0 --data.batch 9", "must be divisible by 8 replicas"),
        ("{nano} --runs-dir {tmp}/empty.txt", "Not a directory"),
        ("{nano} --optimizer.update adam()", "cannot be called like this"),
        ("{nano} --optimizer.update compressed_mean(sign(),'x')", "the axis 'x' is unknown"),
        ("{nano} --optimizer.update adam(learning_rate)", "compressed_mean"),
        ("{nano} --optimizer.update scale(learning_rate)", "does not fit gradients"),
    ],
)
def test_mistake_ends_with_status_2_and_one_message(
    monkeypatch, capsys, tmp_path, text, args, message
):
    (tmp_path / "empty.txt").write_text("")
    words = args.format(nano=NANO, tmp=tmp_path).split()
    own = "--model.layers 1 --model.width 16 --model.heads 2"
    own = [*own.split(), "--runs-dir", str(tmp_path / "runs"), "--data.path", text]
    monkeypatch.chdir(ROOT)
    status, out, err = main(monkeypatch, capsys, words[0], *own, *words[1:])
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("args", [[], ["--report"]])
def test_no_config_is_answered_with_the_usage(monkeypatch, capsys, args):
    status, out, _ = main(monkeypatch, capsys, *args)
    assert status == 2 and out.startswith("usage: python -m train CONFIG.py")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt("stopped at step 3"), 0, "stopped at step 3\n"),
        (exits.Drained("stopped at step 3"), 85, "stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("too many"), 2, "error: too many\n"),
        (exits.Transient("gone apart"), 75, "error: gone apart\n"),
        (ConnectionError("lost"), 75, "error: lost\n"),
    ],
)
def test_ends_are_one_message_and_a_status(capsys, error, status, message):
    with pytest.raises(SystemExit) as stop, exits.clean_exits():
        raise error
    assert (stop.value.code, capsys.readouterr().err) == (status, message)


def test_device_start_makes_a_device_for_each_replica_and_threads_for_all():
    code = (
        "import os, jax; from train.placement import devices; devices.start(5); "
        "print(len(jax.devices()), os.environ['NPROC'], len(os.listdir('/proc/self/task')))"
    )
    env = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], **{"cwd": ROOT, "env": env, "capture_output": True}
    )
    count, pool, threads = map(int, done.stdout.split())
    assert count == 5 and pool == max(20, os.cpu_count()) and threads > pool


# Data that cannot be read.


def unreadable_once(step=None, evaluation=None):
    """Makes the batch of a step, or an evaluation, fail the first time."""

    def change(task):
        def batch(number, seen=None):
            batches.append(number)
            if number == step and batches.count(number) == 1:
                raise ValueError("a file cannot be read")
            return task.batch(number, seen)

        def evaluate(*given):
            evaluations.append(None)
            if len(evaluations) == evaluation:
                raise OSError("a file cannot be read")
            return task.evaluate(*given)

        return task._replace(batch=batch, evaluate=evaluate)

    batches, evaluations = [], []
    return change


@pytest.mark.parametrize(("where", "step"), [({"step": 4}, 4), ({"evaluation": 2}, 3)])
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
    assert saved(harmed) == saved(whole)


@pytest.mark.parametrize(
    ("every", "step", "times"),
    [(1, 2, 1), (3, 4, 2), (3, 6, 1), (1, 6, 2)],
)
def test_no_checkpoint_is_of_a_step_whose_row_is_not_on_disk(
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
    assert len(failed) == times and saved_at <= last == step - (times > 1)
    assert times > 1 or saved_at == step  # a second attempt was enough
    assert without_times(loop.run(harmed)) == without_times(rows)
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
