"""A long run on real processes that is harmed again and again, and must lose no step.

    python -m tests.soak --processes 4 --steps 1000

A second run of the same length is left alone. Both must end with the same metrics and, bit for
bit, the same parameters and optimizer state; a step with NaN gradients must be skipped in both.
Processes are killed, stopped for a while or for ever, told to stop, and lose their disk while
they save; after each of these the same command is started again.
"""

import argparse
import contextlib
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np

from tests.helpers.faults import (
    Run,
    ended,
    last_line,
    last_step,
    limit_files,
    metrics_of,
    said,
    started,
    until_row,
    write_config,
)
from train import task as tasks
from train.checkpoints import resume
from train.config import run as configs
from train.processes import devices

WATCHDOG = 20  # seconds
PAUSE = 5  # seconds


@contextlib.contextmanager
def small_disk(megabytes: int) -> Iterator[tuple[pathlib.Path, bool]]:
    """A folder, on a small file system of its own if this user may mount one, and whether so."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        own = (
            bool(shutil.which("mount"))
            and not subprocess.run(mount, capture_output=True).returncode
        )
        try:
            yield pathlib.Path(folder), bool(own)
        finally:
            if own:
                subprocess.run(["umount", "-l", folder], check=True)


def kill(run: Run, number: int) -> list[int | None]:
    """Kills a process."""
    run.processes[number].kill()
    return ended(run)


def pause(run: Run, number: int) -> list[int | None]:
    """Stops a process for a time that is shorter than anybody's patience."""
    run.processes[number].send_signal(signal.SIGSTOP)
    time.sleep(PAUSE)
    run.processes[number].send_signal(signal.SIGCONT)
    return []


def freeze(run: Run, number: int) -> list[int | None]:
    """Stops a process for ever."""
    run.processes[number].send_signal(signal.SIGSTOP)
    return ended(run, but=[number])


def ask(run: Run, number: int) -> list[int | None]:
    """Asks a process to stop."""
    run.processes[number].terminate()
    return ended(run)


def limit(run: Run, number: int) -> list[int | None]:
    """Lets a process write no array of a checkpoint; its disk is full."""
    limit_files(run, number, 4_000)
    return ended(run)


def fill(run: Run, number: int) -> list[int | None]:
    """Fills the disk of all processes up to the last byte."""
    filler = run.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        return ended(run)
    finally:
        filler.unlink()


def harmed(config: pathlib.Path, count: int, steps: int, own: bool) -> None:
    """Trains to the end, with one fault in each equal part of the steps."""
    faults = [kill, pause, limit, freeze, ask, *([fill] if own else []), kill, pause, kill]
    places = [(k + 1) * steps // (len(faults) + 1) for k in range(len(faults))]
    print(f"{'step':>5}  {'fault':8}{'process':>8}  {'seconds':>7}  statuses; last words")
    pending = list(zip(places, faults, strict=True))
    while pending:
        with started(config, count, "--watchdog-seconds", WATCHDOG) as run:
            over = False
            while pending and not over:
                step, fault = pending.pop(0)
                # Victims in turn; process 0, which coordinates, is the last one's.
                number = 0 if not pending else 1 + step % (count - 1)
                until_row(run, step)
                began, at = time.monotonic(), last_step(run)
                statuses = fault(run, number)
                over = bool(statuses)
                words = last_line(said(run)[1 if number == 0 else 0]) if over else "it goes on"
                if over and any(status is None for n, status in enumerate(statuses) if n != number):
                    raise SystemExit(f"not all processes ended: {statuses} {said(run)}")
                seconds = time.monotonic() - began
                print(
                    f"{at:>5}  {fault.__name__:8}{number:>8}  {seconds:>7.1f}  {statuses} {words}"
                )
    with started(config, count) as run:
        if any(ended(run, seconds=3600)):
            raise SystemExit(f"the last start failed: {said(run)}")


def arrays(config: pathlib.Path) -> dict[str, bytes]:
    """The bytes of every leaf of a run's last checkpoint."""
    task = tasks.make_task(configs.load(str(config)))
    params, state, _ = resume.begin(task, config.parent / "run" / "checkpoints")
    leaves = jax.tree_util.tree_leaves_with_path((params, state))
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def main() -> None:
    """Runs both, compares them, and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=4, help="at least 2")
    parser.add_argument("--steps", type=int, default=1000, help="at least 200")
    options = parser.parse_args()
    count, steps = options.processes, options.steps
    devices.start(count)  # to read the checkpoints in this process
    values = {"steps": steps, "replicas": count, "nan_step": steps // 3, "checkpoint_every": 20}
    with small_disk(megabytes=64) as (folder, own), tempfile.TemporaryDirectory() as other:
        config = write_config(folder / "harmed", **values)
        whole = write_config(pathlib.Path(other), **values)
        if not own:
            print("no small file system without root: no disk is filled, only files are limited")
        began = time.monotonic()
        harmed(config, count, steps, own)
        with started(whole, count) as run:
            if any(ended(run, seconds=3600)):
                raise SystemExit(f"the run that was left alone failed: {said(run)}")
        rows, expected = (metrics_of(each.parent / "run") for each in (config, whole))
        found = {
            "every row once": [row["step"] for row in rows] == list(range(0, steps + 1, 2)),
            "the same metrics": rows == expected,
            "the NaN step skipped": rows[-1]["skipped"] == expected[-1]["skipped"] == 1,
            "the same parameters and state, bit for bit": arrays(config) == arrays(whole),
        }
        for claim, holds in found.items():
            print(f"{'yes' if holds else 'NO':>5}  {claim}")
        print(f"{steps} steps on {count} processes, twice, in {time.monotonic() - began:.0f} s")
        sys.exit(not all(found.values()))


if __name__ == "__main__":
    main()
