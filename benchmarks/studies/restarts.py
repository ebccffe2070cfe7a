"""The cost of a lost process in a run with `train.launch --restarts`: steps and seconds.

    python -m benchmarks.studies.restarts --processes 4 --kills 6

One run is undisturbed; in another one random processes are killed at random times. Both end with
the same losses, bit for bit. A row is one kill: the last reported step, the checkpoint from which
the run resumed, and the seconds until it reported a new step, with those of each phase of process
0. Model and steps are small: these are seconds of the end, the start and the compilation, and of
other programs on the machine.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.rows import RESULTS
from train.checkpoints import files
from train.output import metrics

TINY = "--model.layers 1 --model.width 32 --model.heads 2 --model.context 16 --eval-batches 1"
SETTINGS = "--eval-every 100000 --checksum-every 100 --log-every 1 --optimizer.warmup-steps 1"


def command(options: argparse.Namespace, folder: pathlib.Path, name: str) -> list[str]:
    """The launcher's command of one run."""
    return [
        *(sys.executable, "-m", "train.launch", "--local", str(options.processes)),
        *("--restarts", str(options.kills), "--heartbeat-timeout", "10", "--"),
        *("configs/nano_4bit.py", "--name", name, "--runs-dir", str(folder), *TINY.split()),
        *(*SETTINGS.split(), "--steps", str(options.steps), "--replicas", str(options.processes)),
        *("--checkpoint-every", str(options.checkpoint_every)),
    ]


def told(folder: pathlib.Path) -> int:
    """The last step that a run has told of; -1 before the first."""
    log = folder / "metrics.jsonl"
    rows = metrics.read(log) if log.is_file() else []
    return rows[-1]["step"] if rows else -1


def kills(options: argparse.Namespace, folder: pathlib.Path, launcher: int) -> Iterator[dict]:
    """Kills a process of a running run now and then; yields what each kill has cost."""
    draw = random.Random(options.seed)
    children = f"/proc/{launcher}/task/{launcher}/children"
    while told(folder) < 1:
        time.sleep(0.05)
    for _ in range(options.kills):
        time.sleep(draw.uniform(1.0, 4.0))
        victim = draw.randrange(options.processes)
        number = int(pathlib.Path(children).read_text().split()[victim])
        last, ended = told(folder), phases(folder)
        os.kill(number, signal.SIGKILL)
        began, seconds = time.monotonic(), {}
        for phase, is_over in ended.items():
            while not is_over():
                time.sleep(0.02)
            seconds[phase] = round(time.monotonic() - began - sum(seconds.values()), 1)
            if phase == "restore":
                resumed = files.latest(folder / "checkpoints")
        yield {
            "process": victim,
            "last": last,
            "resumed": resumed,
            "seconds": round(sum(seconds.values()), 1),
            "phases": seconds,
        }


def phases(folder: pathlib.Path) -> dict[str, Callable[[], bool]]:
    """What follows the loss of a process, in order, and whether it is over by now."""
    log, rows, last = folder / "logs" / "process_0.log", folder / "metrics.jsonl", told(folder)
    size, inode = log.stat().st_size, rows.stat().st_ino

    def says(mark):
        with log.open("rb") as file:
            file.seek(size)
            return mark in file.read()

    def another(read):
        before = read()
        return lambda: read() not in (before, [])

    return {
        "end of the others": lambda: says(b"--- "),
        "Python and imports": lambda: says(b"process 0 of "),
        "connection": lambda: says(b"[Gloo] Rank 0 "),
        "data and compilation": another(lambda: os.listdir(folder / "writer")),
        "restore": lambda: rows.stat().st_ino != inode,  # a start drops rows after its checkpoint
        "steps": lambda: told(folder) > last,
    }


def main(args: Sequence[str]) -> None:
    """Runs both and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, number in {"processes": 4, "kills": 6, "steps": 600, "checkpoint-every": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        harmed = command(options, folder, "harmed")
        with subprocess.Popen(harmed, stdout=sys.stderr) as launcher:
            rows = list(kills(options, folder / "harmed", launcher.pid))
            status = launcher.wait()
        subprocess.run(command(options, folder, "whole"), check=True, stdout=sys.stderr)
        losses = [
            [row["loss"] for row in metrics.read(folder / name / "metrics.jsonl")]
            for name in ("harmed", "whole")
        ]
    found: dict[str, Any] = vars(options) | {
        "hardware": metrics.hardware_name(),
        "status": status,
        "losses_equal": losses[0] == losses[1],
        "killed": rows,
    }
    (RESULTS / "restarts.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
