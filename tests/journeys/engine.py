"""What a person types: the commands of a page, in a shell, in a copy of the checkout."""

import functools
import importlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sysconfig
import time
import venv
from collections.abc import Callable
from typing import NamedTuple

from jaxcomp.launch import programs
from tests.helpers.launching import members
from tests.helpers.snippets import ROOT
from train.checkpoints import files
from train.output import metrics

_PROGRAM = re.compile(
    r"""(?:[A-Z_]+=(?:"[^"]*"|\S+) )*(?:sudo )?"""
    r"(?:bash|head|hf|kubectl|make|pip|python|sbatch|tensorboard) "
)
_BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$|(?<=\n\n)((?: {4}[^\n]*\n)+)", re.M | re.S)
_TRAINS = re.compile(r"\bpython -m train(?:\.launch)? (?!.*--(?:report|plan|help)\b)")
_QUANTITY = re.compile(r"(?:\d[\d.,]*(?:e[+-]?\d+)?(?: (?:h|min|s|ms|[kMG]?B)\b)? ?)+")

# Of tests/conftest.py: most of a short run is the compiler's.
_QUICKLY = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")

# What ssh does, on this machine: what follows options and host, in a shell without our variables.
_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$*"
"""


class Command(NamedTuple):
    """A command of a page."""

    text: str  # without its comment
    comment: str
    shown: str  # the output that the page shows after it


Harm = Callable[[subprocess.Popen, Callable[[], int]], None]
"""What happens to a run: gets its process, and a function that tells the last step of its rows."""


def commands(page: str) -> list[Command]:
    """The commands in the code blocks of a Markdown text, in order.

    A line of options alone is added to the last command that trains. Other lines, and a block of
    `text` that Python before it does not print, are the output of the command before them.
    """
    found: list[Command] = []
    before = trains = ""
    for language, fenced, indented in _BLOCK.findall(page):
        text = re.sub(r"\\\n *", "", re.sub(r"^ {4}", "", indented, flags=re.M) or fenced)
        in_shell = indented or language in ("bash", "console", "sh")
        for line in text.splitlines() if in_shell else ():
            command, _, comment = re.sub(r"\s+# +", "\0", line).partition("\0")
            if command.startswith("--"):
                found.append(Command(f"{trains} {command}", comment, ""))
            elif _PROGRAM.match(command):
                found.append(Command(command, comment, ""))
                trains = command if _TRAINS.search(command) else trains
            elif found:
                found[-1] = found[-1]._replace(shown=f"{found[-1].shown}{line}\n")
        if language == "text" and before != "python" and found:
            found[-1] = found[-1]._replace(shown=f"{found[-1].shown}{text}")
        before = language
    return found


def checkout(home: pathlib.Path) -> pathlib.Path:
    """Copies the tracked files into a folder, where a page's `python` is the running one.

    Its `.venv` has the running environment's packages, but no jaxcomp. There, `pip` installs the
    copy without a network.
    """
    folder = home / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    venv.create(folder / ".venv", symlinks=True)
    (site,) = folder.glob(".venv/lib/*/site-packages")
    # Finders of editable packages are made by .pth files, which are not read in this folder.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = '#!/bin/sh\nexec python -m pip "$@"\n'
    for name, script in (("pip", pip), ("ssh", _SSH)):
        (folder / ".venv" / "bin" / name).write_text(script)
        (folder / ".venv" / "bin" / name).chmod(0o755)
    return folder


def asked(command: str) -> tuple[str, int] | None:
    """The name and the steps of the run that a command trains; None if it trains nothing."""
    if not _TRAINS.search(command):
        return None
    (stem,) = re.findall(r"\bconfigs/(\w+)\.py\b", command)
    config = importlib.import_module(f"configs.{stem}").get_config()
    (name,) = re.findall(r" --name (\S+)", command) or [config.name]
    (steps,) = re.findall(r" --steps (\d+)", command) or [config.steps]
    return name, int(steps)


def perform(
    folder: pathlib.Path, command: str, harm: Harm | None = None, quickly: bool = True
) -> str:
    """Types a command in a copy of the checkout, and checks its status; what it says.

    A run has few steps, one batch to evaluate on, and one layer if it is a nano run. It goes on by
    two steps if it is there already; by 40 where something happens to it. What has `$i` in it is
    typed twice, for 0 and 1.
    """
    if not (run_of := asked(command)):
        command = re.sub(r"^make demo\b", "make demo STEPS=4", command)
        return typed(folder, command, quickly=quickly)
    name, _ = run_of
    run = folder / "runs" / name
    start = files.latest(run / "checkpoints") or 0
    steps = start + (40 if harm else 2 if start else 4)
    command = re.sub(r" --steps \d+", "", command)
    short = f"--steps {steps} --eval-batches 1"
    short += " --model.layers 1" * ("configs/nano_" in command)
    one_line = re.sub(r"(\bconfigs/\w+\.py)", rf"\1 {short}", command)
    if "$i" in one_line:
        one_line = f"i=1; {one_line} & i=0; {one_line} && wait $!"
    harm = harm and functools.partial(harm, step=lambda: told(run))
    said = typed(folder, one_line, harm, quickly=quickly)
    done = [row["step"] for row in metrics.read(run / "metrics.jsonl")]
    assert done == sorted(set(done)), done
    if not re.search(r"stopped at step \d+; run the same command to go on", said):
        assert re.search(rf"^runs/{name}: step {steps}, ", said, re.M), said
        assert done[-1] == steps == files.latest(run / "checkpoints")
    return said


def typed(
    folder: pathlib.Path,
    command: str,
    harm: Callable[[subprocess.Popen], None] | None = None,
    ends: int = 0,
    seconds: float = 900.0,
    quickly: bool = True,
) -> str:
    """Runs a command in bash, without our variables, until it ends with a status; what it says.

    Programs are compiled `quickly`, as those of other tests, or as for a reader.
    """
    names = ("HOME", "LANG", "TMPDIR", *_QUICKLY * quickly)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    path = f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}"
    # pip reads the second as: do not isolate.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    cache = programs.kept(folder.parent / "programs")
    output = folder.parent / "said.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=kept | offline | cache | {"PATH": path, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if harm:
                harm(process)
            status = process.wait(seconds)
        finally:
            # Processes of a launcher end when it does.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = output.read_text(errors="replace")
    assert status == ends, f"{command}\nends with status {status}\n{said[-4000:]}"
    return said


def told(run: pathlib.Path) -> int:
    """The step of the last row of a run's metrics; 0 without one."""
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, IndexError, ValueError):  # not there, or not whole
        return 0


def await_rows(process: subprocess.Popen, step: Callable[[], int], seconds=600.0) -> None:
    """Waits until a run has trained for at least 20 steps."""
    first, until = step(), time.monotonic() + seconds
    while step() < first + 20:
        assert process.poll() is None and time.monotonic() < until, "it ended before the harm"
        time.sleep(0.05)


def ctrl_c(process: subprocess.Popen, step: Callable[[], int]) -> None:
    """Presses Ctrl-C in the run's terminal."""
    await_rows(process, step)
    os.killpg(process.pid, signal.SIGINT)


def kill_one(process: subprocess.Popen, step: Callable[[], int]) -> None:
    """Kills the second process that a launcher has started, as `kill -9`."""
    await_rows(process, step)
    os.kill(members(process)[1], signal.SIGKILL)


def require_shown(shown: str, said: str) -> None:
    """Asserts that the lines that a page shows were said, in their order; numbers may differ."""
    kind = lambda line: _QUANTITY.sub("# ", line).rstrip()
    rest = iter(map(kind, said.splitlines()))
    for line in filter(None, map(kind, shown.splitlines())):
        assert line in rest, f"the page shows {line!r}, not said in\n{said[-4000:]}"
