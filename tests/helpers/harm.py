"""Ways to harm a run that `train.launch --restarts` keeps running, for the soak."""

import contextlib
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import NamedTuple

from tests.helpers.launching import ROOT, environment, members, ports
from train.checkpoints import files
from train.output import metrics

PAUSE = 5.0  # seconds
_WENT_ON = re.compile(rb"from step (\d+) on with emergency copies")


class Place(NamedTuple):
    """Where a run is: its config, its folder, and its processes' own disks."""

    config: pathlib.Path
    folder: pathlib.Path
    local: pathlib.Path
    others: pathlib.Path  # for programs, and what the launcher says


def launch(place: Place, count: int, *overrides: str) -> subprocess.Popen:
    """Starts the launcher of a run."""
    command = [sys.executable, "-m", "train.launch", "--local", str(count), "--restarts", "99"]
    command += ["--heartbeat-timeout", "30", "--start-timeout", "300", "--", str(place.config)]
    command += ["--emergency-every", "5", "--emergency-dir", str(place.local), *overrides]
    with (place.others / "launcher.txt").open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(JAX_COMPILATION_CACHE_DIR=str(place.others / "cache")),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def told(place: Place) -> int:
    """The last step that the run has told of; -1 before the first."""
    log = place.folder / "metrics.jsonl"
    with contextlib.suppress(ValueError, OSError):  # it is being replaced
        rows = metrics.read(log)
        return rows[-1]["step"] if rows else -1
    return -1


def log_of(place: Place) -> bytes:
    """What process 0 has printed so far."""
    log = place.folder / "logs" / "process_0.log"
    return log.read_bytes() if log.is_file() else b""


def went_on(place: Place, since: int) -> tuple[int, str]:
    """From where the run has gone on, as its log says from some place on."""
    found = _WENT_ON.findall(log_of(place)[since:])
    if found:
        return int(found[-1]), "copies"
    return files.latest(place.folder / "checkpoints") or 0, "checkpoint"


# Harm: the launcher, the run, the number of a process -> what was seen, if that is not known.


def kill(launcher, place, number) -> str:
    """A process is killed."""
    os.kill(members(launcher)[number], signal.SIGKILL)
    return ""


def lose(launcher, place, number) -> str:
    """A process is killed, and its own disk is gone with it."""
    os.kill(members(launcher)[number], signal.SIGKILL)
    for folder in place.local.glob(f"jaxcomp-*/*/{number}"):
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def pause(launcher, place, number) -> str:
    """A process is stopped for 5 s."""
    pid = members(launcher)[number]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    os.kill(pid, signal.SIGCONT)
    return ""


def slow(launcher, place, number) -> str:
    """A process runs a fifth of the time, for 10 s."""
    pid, until = members(launcher)[number], time.monotonic() + 2 * PAUSE
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.1)
    return ""


def freeze(launcher, place, number) -> str:
    """A process is stopped forever."""
    os.kill(members(launcher)[number], signal.SIGSTOP)
    return ""


def drain(launcher, place, number) -> str:
    """A process gets a SIGTERM, as from its host."""
    before = members(launcher)
    os.kill(before[number], signal.SIGTERM)
    until = time.monotonic() + 600
    while members(launcher) == before and time.monotonic() < until:
        time.sleep(0.05)
    return ""


def limit(launcher, place, number) -> str:
    """A process can write no large file any more."""
    resource.prlimit(members(launcher)[number], resource.RLIMIT_FSIZE, (4_000, 4_000))
    status = launcher.wait(600)
    return f"status {status}"


def fill(launcher, place, number) -> str:
    """The disk of the run's folder is full to the last byte."""
    filler = place.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        return f"status {launcher.wait(600)}"
    finally:
        filler.unlink()


def second_writer(launcher, place, number) -> str:
    """Another run is started in the same folder."""
    ended = start_alone(place)
    if ended.returncode != 75 or "has a writer" not in ended.stderr:
        raise SystemExit(f"a second writer was not sent away: {ended}")
    return "it is sent away, with status 75"


def start_alone(place: Place, *overrides: str) -> subprocess.CompletedProcess:
    """Starts the run in one process, without the launcher, and waits for its end."""
    command = [sys.executable, "-m", "train", str(place.config), *overrides]
    env = environment(JAX_COMPILATION_CACHE_DIR=str(place.others / "alone"))
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)


def strangers(launcher, place, number) -> str:
    """Strangers write to every port of every process."""
    draw, sent = random.Random(number), 0
    for pid in members(launcher):
        for address, port in ports(pid):
            for _ in range(20):
                sent += _write(str(address), port, draw)
    return f"{sent} connections"


def strangers_at_the_start(launcher, place, number) -> str:
    """A process is killed, and strangers are at the run's door while it starts again."""
    draw, sent, before = random.Random(number), 0, set(members(launcher))
    os.kill(members(launcher)[number], signal.SIGKILL)
    until = time.monotonic() + 600
    size = len(log_of(place))
    while b"[Gloo] Rank" not in log_of(place)[size:] and time.monotonic() < until:
        time.sleep(0.05)
        for pid in set(members(launcher)) - before:
            with contextlib.suppress(OSError, ValueError):  # it has just begun, or has ended
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                at = words[words.index(b"--coordinator") + 1].decode()
                address, _, port = at.rpartition(":")
                sent += _write(address, int(port), draw)
                break
    return f"{sent} connections"


def _write(address: str, port: int, draw: random.Random) -> bool:
    """Writes some bytes, of any length and some of them well-formed, and does not wait."""
    text = draw.choice(
        [b"", b"{}\n", b'{"process": 1, "of": 8}\n', b"[" * 5000, b"GET / HTTP/1.1\n"]
    )
    with contextlib.suppress(OSError):
        with socket.create_connection((address, port), timeout=1.0) as connection:
            connection.sendall(text + draw.randbytes(draw.randrange(200)))
            return True
    return False
