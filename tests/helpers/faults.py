"""What the tests of faults and the soak share: a run on real processes, and ways to harm them."""

import contextlib
import json
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from tests.helpers.launching import ROOT, environment, free_port
from train.checkpoints import files

# A config file is Python: this one makes tokens of one step that do not exist, so that the loss
# of one replica is NaN there, in every start alike; and it notes which rows a process makes.
CONFIG = """
import pathlib
import time

import jax

from train.data import texts
from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig

FOLDER = pathlib.Path({folder!r})
draw = texts.batch


def batch(tokens, seed, step, batch_size, context, rows=slice(None)):
    made = draw(tokens, seed, step, batch_size, context, rows)
    first, last, _ = rows.indices(batch_size)
    if step == {nan_step} and first == 0:
        made[0, 0] = 300
    with open(FOLDER / f"rows_{{jax.process_count()}}_{{jax.process_index()}}.txt", "a") as file:
        file.write(f"{{step}} {{first}} {{last}}\\n")
    if first == 0:
        time.sleep({step_seconds})
    return made


texts.batch = batch


def get_config():
    return Config(
        name="run",
        steps={steps},
        replicas={replicas},
        optimizer=Optimizer(
            "chain(compressed_mean(quantize(4, rounding='stochastic'), axis_name), "
            "sgd(learning_rate))",
            learning_rate={learning_rate},
            schedule="constant",
        ),
        eval_every=20,
        eval_batches=1,
        log_every=2,
        checksum_every=10,
        checkpoint_every={checkpoint_every},
        runs_dir=str(FOLDER),
        model=DecoderConfig(layers=1, width=32, heads=2, context=16),
        data=Data(path={text!r}, batch={batch}),
    )
"""


def write_config(folder: pathlib.Path, **values) -> pathlib.Path:
    """Writes a config file and a text into a folder; the run's directory is `folder/run`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("".join(f"{i * i % 9973} and {i * 7 % 13} is a sum; " for i in range(2_000)))
    path = folder / "config.py"
    known = {"nan_step": -1, "step_seconds": 0.0, "checkpoint_every": 10, "replicas": 2, "batch": 8}
    known |= {"learning_rate": 0.5}
    path.write_text(CONFIG.format(folder=str(folder), text=str(text), **(known | values)))
    return path


class Run(NamedTuple):
    """The processes of one start."""

    folder: pathlib.Path  # of the run
    processes: list[subprocess.Popen]
    writers: list[subprocess.Popen]  # of the logs, one a process
    logs: list[pathlib.Path]
    began: float  # seconds, as files' times


@contextlib.contextmanager
def started(config, count, *overrides, heartbeat=30, folders=None):
    """Starts `count` processes of the run that a config file describes, and kills them in the end.

    Args:
      config: Of `write_config`.
      count: Processes; one starts without a launcher.
      overrides: Of the config.
      heartbeat: Seconds.
      folders: Working directory of each; the checkout by default.
    """
    logs = [config.parent / f"log_{number}.txt" for number in range(count)]
    run, port = Run(config.parent / "run", [], [], logs, time.time()), free_port()
    many = (
        f"-m train.launch --coordinator 127.0.0.1:{port} --num-processes {count} --interface lo "
        f"--heartbeat-timeout {heartbeat} --start-timeout 200 --process-id"
    )
    try:
        for number, log in enumerate(logs):
            program = f"{many} {number} --" if count > 1 else "-m train"
            process = subprocess.Popen(
                [sys.executable, *program.split(), config, *map(str, overrides)],
                cwd=folders[number] if folders else ROOT,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            run.processes.append(process)
            # A pipe: the log of a process whose files are limited is no file of its own.
            with log.open("w") as output, process.stdout:
                run.writers.append(subprocess.Popen(["cat"], stdin=process.stdout, stdout=output))
        yield run
    finally:
        for process in run.processes:
            process.kill()
        for process in run.processes + run.writers:
            process.wait()


def last_step(run: Run) -> int:
    """The step of the last row that this start has written, or kept; -1 before that."""
    log = run.folder / "metrics.jsonl"
    if log.is_file() and log.stat().st_mtime > run.began:
        rows = log.read_text().split("\n")[:-1]
        return json.loads(rows[-1])["step"] if rows else -1
    return -1


def until_row(run: Run, step: int) -> None:
    """Waits until a row of this step or a later one is there."""
    _until(run, lambda: last_step(run) >= step)


def until_checkpoint(run: Run, step: int = 0) -> None:
    """Waits until a checkpoint of this step or a later one is complete: the run goes on then."""
    _until(run, lambda: max(files.steps(run.folder / "checkpoints"), default=-1) >= step)


def _until(run: Run, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert all(process.poll() is None for process in run.processes), said(run)
        assert time.monotonic() < deadline, said(run)
        time.sleep(0.02)


def limit_files(run: Run, number: int, size: int) -> None:
    """Lets a process write no file larger than this: its part of the disk is full."""
    resource.prlimit(run.processes[number].pid, resource.RLIMIT_FSIZE, (size, size))


def ended(run: Run, but=(), seconds: float = 300.0) -> list[int | None]:
    """Statuses of all processes when they have ended; those in `but` are not waited for."""
    deadline = time.monotonic() + seconds
    for number, process in enumerate(run.processes):
        if number not in but:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
                run.writers[number].wait(10)
    return [process.poll() for process in run.processes]


def said(run: Run) -> list[str]:
    """What each process has printed."""
    return [log.read_text() for log in run.logs]


def last_line(text: str) -> str:
    """The last line that a process printed."""
    return text.splitlines()[-1]


def metrics_of(folder: pathlib.Path) -> list[dict]:
    """The rows of a run, without the times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: row[name] for name in row if name != "step_seconds"} for row in rows]
