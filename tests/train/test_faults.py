"""Processes of a run are killed, stopped and cut off: all end with one message, and go on."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import optax
import pytest

from tests.helpers.faults import (
    ended,
    last_line,
    last_step,
    limit_files,
    metrics_of,
    said,
    started,
    until_checkpoint,
    until_row,
    write_config,
)
from tests.helpers.restoring import require_equal_bits, restore
from train import task as tasks
from train.checkpoints import files
from train.config import run as configs

STEPS, NAN_STEP = 120, 25
ON = "; start the same command to go on"


def checkpoints_of(config):
    return files.steps(config.parent / "run" / "checkpoints")


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """Makes the config file of a run in a new folder."""
    return lambda **values: write_config(tmp_path_factory.mktemp("run"), **values)


@pytest.fixture(scope="module")
def chain(config_of):
    """One run of two processes that is harmed five times, and ends in a single process."""
    config = config_of(steps=STEPS, nan_step=NAN_STEP, step_seconds=0.03)
    seen = SimpleNamespace(config=config)

    with started(config, 2) as run:
        until_row(run, 14)
        until_checkpoint(run)
        began = time.monotonic()
        run.processes[1].kill()
        seen.killed = ended(run), said(run), time.monotonic() - began
        seen.checkpoint = checkpoints_of(config)[-1]

    with started(config, 2, "--watchdog-seconds", 20) as run:
        until_row(run, 28)
        run.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(3)
        step = last_step(run)
        run.processes[1].send_signal(signal.SIGCONT)
        until_row(run, step + 6)
        run.processes[0].kill()
        seen.first_killed = ended(run), said(run)

    with started(config, 2) as run:
        until_row(run, step + 14)
        limit_files(run, 1, 4_000)
        seen.full = ended(run), said(run)

    with started(config, 2) as run:
        until_row(run, step + 24)
        before = checkpoints_of(config)
        run.processes[1].terminate()
        seen.stopped = ended(run), said(run)
        seen.made = [made for made in checkpoints_of(config) if made not in before]
        seen.last_row = last_step(run)

    with started(config, 2, "--watchdog-seconds", 8) as run:
        # Behind a save and an evaluation, which have more time than a step.
        row = seen.last_row + 4
        until_row(run, row + (2 - row) % 10)
        run.processes[1].send_signal(signal.SIGSTOP)
        seen.hung = ended(run, but=[1]), said(run)

    with started(config, 1) as run:
        assert ended(run) == [0], said(run)
        seen.rows = metrics_of(run.folder)
    return seen


@pytest.fixture(scope="module")
def whole(config_of):
    """The same run, in one process and never harmed."""
    config = config_of(steps=STEPS, nan_step=NAN_STEP)
    with started(config, 1) as run:
        assert ended(run) == [0], said(run)
    return config


def test_a_killed_process_ends_the_others_with_its_number_and_the_way_on(chain):
    (status, _), (said, _), seconds = chain.killed
    assert status == 75 and seconds < 30
    message = last_line(said)
    assert message.startswith("error: process 1 of 2 is gone")
    assert message.endswith(f"The last checkpoint is step {chain.checkpoint}{ON}")
    assert said.count("error:") == 1 and "Traceback" not in said


def test_the_coordinator_killed_ends_the_others_with_its_number_and_the_way_on(chain):
    (_, status), (_, said) = chain.first_killed
    assert status == 75
    assert last_line(said).startswith("error: process 0 of 2 is gone")
    assert last_line(said).endswith(ON) and "Traceback" not in said


def test_a_failed_save_of_one_process_is_told_by_all_at_once(chain):
    statuses, (first, second) = chain.full
    assert statuses == [2, 2]
    message = last_line(second)
    assert "could not save a checkpoint in" in message and "File too large" in message
    assert last_line(first).startswith("error: process 1 of 2 has ended: ")
    assert last_line(first).endswith(message.removeprefix("error: "))


def test_a_signal_to_one_process_stops_all_before_one_step_with_one_checkpoint(chain):
    statuses, texts = chain.stopped
    assert statuses == [85, 85]
    *regular, stop = chain.made
    assert all(step % 10 == 0 for step in regular) and stop - chain.last_row in (0, 1)
    for text in texts:
        assert last_line(text) == f"stopped at step {stop}; run the same command to go on"


def test_a_process_that_stands_still_is_named_with_stacks_in_the_others_log(chain):
    (status, stopped), (said, _) = chain.hung
    assert (status, stopped) == (75, None)
    message = last_line(said)
    assert message.startswith("error: no progress for 8 s after step ")
    assert ": process 1 of 2 is gone or stopped: its last sign of life came at step " in message
    assert message.endswith(ON)
    assert "most recent call first" in said and 'train/loop.py"' in said


def test_a_run_that_was_harmed_on_two_processes_equals_one_that_was_not_on_one(chain, whole):
    expected = metrics_of(whole.parent / "run")
    assert chain.rows == expected
    assert [row["step"] for row in expected] == list(range(0, STEPS + 1, 2))
    assert expected[-1]["skipped"] == 1
    like = tasks.make_task(configs.load(str(whole))).like
    read = lambda config: restore(config.parent / "run" / "checkpoints", like)
    (tree, _, step), (wanted, _, _) = read(chain.config), read(whole)
    assert step == STEPS
    require_equal_bits(tree, wanted)
    assert np.any(optax.tree_utils.tree_get(tree["state"], "residual")["block_0"]["up"]["kernel"])


def test_each_process_makes_its_own_rows_of_the_batch_and_no_others(chain):
    for number, part in enumerate(["0 4", "4 8"]):
        lines = (chain.config.parent / f"rows_2_{number}.txt").read_text().splitlines()
        assert len(lines) > 40
        assert {line.split(maxsplit=1)[1] for line in lines} == {part}


def test_processes_without_a_common_folder_say_so_before_they_train(config_of, tmp_path):
    config = config_of(steps=4)
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with started(config, 2, "--runs-dir", "here", folders=places) as run:
        assert ended(run) == [2, 2], said(run)
    for text in said(run):
        assert "is not one folder for all processes" in last_line(text)
        assert "process 1 cannot see" in last_line(text)
    assert os.listdir(places[0] / "here" / "run") == [] and os.listdir(places[1]) == []


SLOW_DISK = """
from train.checkpoints import store

write = store.write_checksums


def after_a_minute(directory):
    time.sleep(60)
    write(directory)


store.write_checksums = after_a_minute
"""


def test_a_save_that_takes_too_long_is_told_by_all(config_of):
    config = config_of(steps=10_000, step_seconds=0.03)
    config.write_text(config.read_text() + SLOW_DISK)
    with started(config, 2, "--save-seconds", 4) as run:
        until_row(run, 10)
        began = time.monotonic()
        assert ended(run, seconds=60) == [2, 2], said(run)
    # Before the disk would have answered.
    assert time.monotonic() - began < 50
    for text in said(run):
        assert "could not save a checkpoint in" in last_line(text)
        assert "this process and the others did not write all of it in 4 s" in last_line(text)
    assert checkpoints_of(config) == []
