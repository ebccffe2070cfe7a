"""A long run that is harmed again and again, and must lose nothing.

    python -m tests.soak --processes 8 --steps 1000

`train.launch --restarts` keeps a run going whose processes are killed, stopped, slowed down and
told to stop, whose disks fill up, whose folder a second run wants, and to whose ports strangers
write. A second run of the same length is left alone. Both must end with the same metrics and, bit
for bit, the same parameters and optimizer state; a step with NaN gradients must be skipped in both.
"""

import argparse
import contextlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np

from tests.helpers import harm
from tests.helpers.faults import metrics_of, write_config
from tests.helpers.harm import Place
from train import resume
from train import task as tasks
from train.config import run as configs
from train.placement import devices

WATCHDOG = 40  # seconds


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


def until(launcher: subprocess.Popen, place: Place, step: int, seconds: float = 900.0) -> None:
    """Waits until the run has told of a step."""
    deadline = time.monotonic() + seconds
    while harm.told(place) < step:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"stuck before step {step}, status {launcher.poll()}: "
                f"{(place.others / 'launcher.txt').read_text()[-2000:]}"
            )
        time.sleep(0.05)


def harmed(place: Place, count: int, steps: int, own: bool) -> None:
    """Trains to the end, with a harm every so many steps."""
    harms = [
        *(harm.kill, harm.pause, harm.lose, harm.second_writer, harm.slow, harm.strangers),
        *(harm.limit, harm.freeze, harm.drain, harm.strangers_at_the_start),
        *([harm.fill] if own else []),
        *(harm.lose, harm.kill),
    ]
    launcher, settings = None, ["--watchdog-seconds", str(WATCHDOG)]
    print("| step | harm | process | what was seen | went on from | steps lost | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for number, fault in enumerate(harms):
        if launcher is None:
            launcher = harm.launch(place, count, *settings)
        done = max(harm.told(place), 0)  # a harm may take many steps' time
        until(launcher, place, done + (steps - done) // (len(harms) - number + 1))
        # Victims in turn; process 0, which coordinates, is the last one's.
        victim = 0 if number == len(harms) - 1 else 1 + 3 * number % (count - 1)
        at, size, began = harm.told(place), len(harm.log_of(place)), time.monotonic()
        before = harm.members(launcher)
        seen = fault(launcher, place, victim)
        if launcher.poll() is not None:
            launcher = harm.launch(place, count, *settings)
        at = max(at, harm.told(place))
        until(launcher, place, at + 2)
        seconds = time.monotonic() - began
        went, of, lost = "it goes on", "", ""
        if harm.members(launcher) != before:
            resumed, of = harm.went_on(place, size)
            went, lost = f"{resumed}, {of}", str(max(0, at - resumed))
        row = [at, fault.__doc__.rstrip("."), victim, seen, went, lost, f"{seconds:.0f}"]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    if launcher.wait(3600):
        raise SystemExit(f"the run did not end well: {harm.log_of(place)[-3000:].decode()}")


def arrays(config: pathlib.Path) -> dict[str, bytes]:
    """The bytes of every leaf of a run's last checkpoint."""
    task = tasks.make_task(configs.load(str(config)))
    params, state, _ = resume.begin(task, config.parent / "run" / "checkpoints")
    leaves = jax.tree_util.tree_leaves_with_path((params, state))
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


def main() -> None:
    """Runs both, compares them, and prints what was seen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=8, help="at least 2")
    parser.add_argument("--steps", type=int, default=1000, help="at least 200")
    options = parser.parse_args()
    count, steps = options.processes, options.steps
    devices.start(count)  # to read the checkpoints in this process
    values = {"steps": steps, "replicas": count, "nan_step": steps // 3, "checkpoint_every": 50}
    values |= {"step_seconds": 0.1}
    with (
        small_disk(megabytes=64) as (folder, own),
        tempfile.TemporaryDirectory() as local,
        tempfile.TemporaryDirectory() as other,
    ):
        here, whole = pathlib.Path(other), write_config(pathlib.Path(other, "whole"), **values)
        config = write_config(folder / "harmed", **values)
        if not own:
            print("no small file system without root: no disk is filled, only files are limited")
        began = time.monotonic()
        place = Place(config, config.parent / "run", pathlib.Path(local, "harmed"), here)
        # Compiles what the second writer needs: else the run has ended when that one comes.
        harm.start_alone(place, "--steps", "4", "--name", "warm", "--runs-dir", str(here))
        alone = Place(whole, whole.parent / "run", pathlib.Path(local, "whole"), here / "whole")
        undisturbed = harm.launch(alone, count)
        harmed(place, count, steps, own)
        if undisturbed.wait(3600):
            raise SystemExit("the run that was left alone failed")
        rows, expected = (metrics_of(each.parent / "run") for each in (config, whole))
        found = {
            "every row once": [row["step"] for row in rows] == list(range(0, steps + 1, 2)),
            "the same metrics": rows == expected,
            "the NaN step skipped": rows[-1]["skipped"] == expected[-1]["skipped"] == 1,
            "the same parameters and state, bit for bit": arrays(config) == arrays(whole),
            "no copies left": not list(pathlib.Path(local).glob("*/jaxcomp-*/*/*")),
        }
        for claim, holds in found.items():
            print(f"{'yes' if holds else 'NO':>5}  {claim}")
        print(f"{steps} steps on {count} processes, twice, in {time.monotonic() - began:.0f} s")
        sys.exit(not all(found.values()))


if __name__ == "__main__":
    main()
