"""Runs are stopped, killed and started again as a person types it: `make journeys`."""

import functools
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from tests.helpers import page_inputs
from tests.journeys import engine
from train.checkpoints import files
from train.output import metrics

# A run of an earlier number of steps is the beginning of one of more: its rate is constant.
CONFIG = """
import dataclasses

from configs import nano_4bit
from train.config import Data
from train.models.decoder import DecoderConfig


def get_config():
    nano = nano_4bit.get_config()
    return dataclasses.replace(
        nano,
        name="tiny",
        optimizer=dataclasses.replace(nano.optimizer, warmup_steps=1, schedule="constant"),
        model=DecoderConfig(layers=1, width=32, heads=2, context=16),
        data=Data(path="text", batch=4),
        replicas=2,
        eval_batches=1,
        checkpoint_every=10,
    )
"""
TRAIN = "python -m train configs/tiny.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with a tiny config and its text."""
    folder = engine.checkout(tmp_path_factory.mktemp("runs"))
    (folder / "configs" / "tiny.py").write_text(CONFIG)
    page_inputs.text(folder)
    return folder


@pytest.fixture
def typed(checkout):
    """Types commands in a checkout without runs."""
    shutil.rmtree(checkout / "runs", ignore_errors=True)
    return functools.partial(engine.typed, checkout)


def rows(checkout, name):
    """The rows of a run, without times."""
    found = metrics.read(checkout / "runs" / name / "metrics.jsonl")
    return [{key: x for key, x in row.items() if key != "step_seconds"} for row in found]


def during(checkout, act):
    """What happens to the run `tiny` once it has a newer checkpoint than before it."""
    saved = lambda: files.latest(checkout / "runs" / "tiny" / "checkpoints") or 0

    def harm(process):
        first, until = saved(), time.monotonic() + 300
        while saved() <= first:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        act(process)

    return harm


def test_a_finished_run_is_started_again_and_goes_on_with_more_steps(checkout, typed):
    first = typed(f"{TRAIN} --steps 10")
    before = rows(checkout, "tiny")
    assert typed(f"{TRAIN} --steps 10").splitlines()[-6:] == first.splitlines()[-6:]
    assert rows(checkout, "tiny") == before
    said = typed(f"{TRAIN} --steps 20")
    assert "tiny: from step 10 on with other settings: steps 10 -> 20" in said
    assert re.search(r"^  checkpoint  runs/tiny/checkpoints/20$", said, re.M)
    assert rows(checkout, "tiny")[-1]["step"] == 20
    exported = typed("python -m train.export runs/tiny tiny")
    assert "tiny holds the model of runs/tiny" in exported


def test_a_run_after_ctrl_c_and_kill_9_is_that_of_one_piece(checkout, typed):
    stop = during(checkout, lambda process: os.killpg(process.pid, signal.SIGINT))
    assert "run the same command to go on" in typed(f"{TRAIN} --steps 100000", stop)
    stopped = files.latest(checkout / "runs" / "tiny" / "checkpoints")
    kill = during(checkout, lambda process: os.killpg(process.pid, signal.SIGKILL))
    typed(f"{TRAIN} --steps 100000", kill, ends=-signal.SIGKILL)
    killed = files.latest(checkout / "runs" / "tiny" / "checkpoints")
    assert killed > stopped
    steps = killed // 10 * 10 + 20
    typed(f"{TRAIN} --steps {steps}")
    typed(f"{TRAIN} --steps {steps} --name whole")
    # A stop is no row.
    assert rows(checkout, "tiny") == rows(checkout, "whole")
    said = typed(f"{TRAIN} --steps {steps + 10} --replicas 1")
    assert f"tiny: from step {steps} on 1 replicas instead of 2, resize=keep_mean" in said


def test_a_launched_run_restarts_after_kill_9(checkout, typed):
    kill = lambda process: engine.kill_one(process, lambda: engine.told(checkout / "runs" / "tiny"))
    launch = "python -m train.launch --local 2 --restarts 3 -- configs/tiny.py"
    typed(f"{launch} --steps 400", kill)
    steps = [row["step"] for row in rows(checkout, "tiny")]
    assert steps == sorted(set(steps)) and steps[-1] == 400


def test_two_runs_beside_each_other_end_and_a_second_in_one_folder_is_sent_away(checkout, typed):
    both = f"{TRAIN} --steps 20 --name one & {TRAIN} --steps 20 --name two && wait $!"
    typed(both)
    assert rows(checkout, "one") == rows(checkout, "two")

    def second(process):
        environ = os.environ | {"PATH": f"{checkout / '.venv' / 'bin'}:{os.environ['PATH']}"}
        environ.pop("PYTHONPATH", None)
        more = subprocess.run(
            f"{TRAIN} --steps 100000", shell=True, cwd=checkout, env=environ, capture_output=True
        )
        assert more.returncode == 75 and b"has a writer" in more.stderr
        os.killpg(process.pid, signal.SIGINT)

    typed(f"{TRAIN} --steps 100000", during(checkout, second))
