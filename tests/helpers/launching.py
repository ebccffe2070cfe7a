"""What the launchers' tests share: a tiny run, and programs started with a bound on their time."""

import contextlib
import ipaddress
import os
import pathlib
import random
import socket
import subprocess
import sys
import time

from jaxcomp.launch import addresses, rendezvous

ROOT = pathlib.Path(__file__).parents[2]
TINY_ARGS = "--model.layers 1 --model.width 16 --model.heads 2 --model.context 16 --eval-batches 1"

CONFIG = """
from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig


def get_config():
    return Config(
        name="tiny",
        steps=2,
        replicas=2,
        optimizer=Optimizer("chain(compressed_mean(quantize(4), axis_name), sgd(0.1))", 0.1),
        eval_batches=1,
        log_every=1,
        runs_dir={folder!r},
        model=DecoderConfig(layers=1, width=32, heads=2, context=16),
        data=Data(path={text!r}, batch=4),
    )
"""


def write_config(folder: pathlib.Path) -> pathlib.Path:
    """Writes the config of a tiny run, and its text, into a folder."""
    (folder / "text.txt").write_text("to be or not to be that is the question " * 200)
    runs, text = str(folder / "runs"), str(folder / "text.txt")
    path = folder / "tiny.py"
    path.write_text(CONFIG.format(folder=runs, text=text))
    return path


def words(folder: pathlib.Path) -> str:
    """Fills a folder with ten small files of English words; its path."""
    folder.mkdir(exist_ok=True)
    few = "the of and to in is that it was for on are with as his they at be this from".split()
    draw = random.Random(0)
    for number in range(10):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(few, k=400)))
    return str(folder)


def environment(**more: str) -> dict[str, str]:
    """Environment of a program that trains here, on CPU and compiled quickly."""
    ours = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    # The tests' own number of threads is for the eight devices of one process.
    inherited = {name: value for name, value in os.environ.items() if name != "NPROC"}
    return inherited | ours | more


def run(command, seconds=300.0, **options) -> subprocess.CompletedProcess:
    """Runs a command, and ends it and what it has started after `seconds`."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **options,
    ) as process:
        try:
            said = process.communicate(timeout=seconds)[0]
        finally:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
    return subprocess.CompletedProcess(command, process.returncode, said)


def piped(program: str, *args: str, errors=subprocess.PIPE, **more: str) -> subprocess.Popen:
    """Starts a program of this text, whose output and errors are read here."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *args],
        cwd=ROOT,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )


def until(condition, seconds: float = 60.0) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def reach(coordinator: str) -> socket.socket:
    """A connection to `host:port`, as soon as somebody listens there."""
    address = addresses.split(coordinator)
    return rendezvous._reach(coordinator, *address, time.monotonic() + 5, "")


def free_port(first: int = 0, last: int = 0) -> int:
    """A port of 127.0.0.1 that is free now, of a range if one is given."""
    ports = range(first, last + 1)
    for port in random.sample(ports, len(ports)):  # tests of one range run side by side
        try:
            with socket.create_server(("127.0.0.1", port)) as listener:
                return listener.getsockname()[1]
        except OSError:
            continue
    raise OSError("no free port")


def members(launcher: subprocess.Popen) -> list[int]:
    """The process numbers of a run's processes, in their order."""
    children = f"/proc/{launcher.pid}/task/{launcher.pid}/children"
    return [int(pid) for pid in pathlib.Path(children).read_text().split()]


@contextlib.contextmanager
def two_processes(program: str, *args: str, host: str = "127.0.0.1", **more: str):
    """Starts a program twice, with the number of the process and process 0's address before `args`.

    Yields:
      Both, which end with the body. Their errors go into their output.
    """
    coordinator = f"{host}:{free_port()}"
    with contextlib.ExitStack() as stack:
        started = []
        for number in "01":
            process = piped(program, number, coordinator, *args, errors=subprocess.STDOUT, **more)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield started


def listening(pid):
    """Addresses on which a process accepts TCP connections."""
    return [address for address, _ in ports(pid)]


def ports(pid):
    """Addresses and ports on which a process accepts TCP connections."""
    sockets = set()
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except OSError:
            pass  # closed meanwhile
    found = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                # The kernel writes words of 32 bits in the machine's order of bytes.
                digits, _, port = fields[1].partition(":")
                words = [digits[i : i + 8] for i in range(0, len(digits), 8)]
                packed = b"".join(int(word, 16).to_bytes(4, sys.byteorder) for word in words)
                address = ipaddress.ip_address(packed)
                found.append((getattr(address, "ipv4_mapped", None) or address, int(port, 16)))
    return found
