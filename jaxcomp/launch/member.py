"""One process of a run: it finds its place, and becomes the program.

A Python program runs in this process, whose standard input is the control channel of the launcher;
any other runs below it.
"""

import argparse
import importlib.util
import os
import runpy
import shlex
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax

from jaxcomp.launch import control, detect, place, signals
from jaxcomp.launch.distributed import Cluster, Timeouts
from jaxcomp.launch.exits import Exit, Transient, from_returncode, say

_OPEN = (
    "this run has no --secret-file: anybody on its network can write to its processes, see "
    "docs/many_hosts.md"
)


def be_one(options: argparse.Namespace, command: Sequence[str], secret: bytes) -> None:
    """Finds this process's place, and runs the program there.

    Raises:
      SystemExit: With the program's status, unless it returns.
      ValueError: If the place is unknown or impossible, or there is no such program.
    """
    timeouts = Timeouts(options.start_timeout, options.heartbeat_timeout)
    cluster, devices = Cluster("127.0.0.1:0", 1, 0, "--single"), options.local_devices
    if not options.single:
        cluster = _detected(options)
        devices = detect.local_devices(cluster, os.environ, options.local_devices)
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        cores = os.cpu_count() or 1
        # XLA:CPU hangs where its pool has no more threads than there are devices.
        least = 4 * int(os.environ.get("JAX_NUM_CPU_DEVICES", "1"))
        share = detect.threads(cluster, allowed or cores, cores)
        os.environ.setdefault("NPROC", str(max(least, share)))
        text = detect.line(cluster, options.interface, devices, os.environ)
        say(text)
        if cluster.num_processes > 1 and not secret and cluster.process_id == 0:
            say(_OPEN)
    run(command, place.Place(cluster, options.interface, timeouts, devices, secret))


def _detected(options: argparse.Namespace) -> Cluster:
    fields = ("coordinator", "num_processes", "process_id", "local_id", "local_count")
    given = {field: getattr(options, field) for field in fields}
    cluster = detect.detect(os.environ, **given)
    if cluster is None:
        raise ValueError(
            "it is unknown which process of the run this is: neither mpirun, srun nor a JobSet has "
            "started it. Write --local N to start N processes here, --hosts FILE to start them by "
            "ssh, --coordinator, --num-processes and --process-id, or --single."
        )
    return cluster


def run(command: Sequence[str], own: place.Place) -> None:
    """Runs a program in a place: `python FILE` and `python -m MODULE` in this process."""
    first, *rest = command
    is_python = first in ("python", "python3", sys.executable)
    while is_python and rest[:1] == ["-u"]:  # as this process is
        rest.pop(0)
    if is_python and rest[:1] == ["-m"] and len(rest) > 1:
        if importlib.util.find_spec(rest[1].partition(".")[0]) is None:
            raise ValueError(f"there is no module {rest[1]!r} in {os.getcwd()}, nor installed.")
        _in_this_process(rest[1:], own, lambda name: runpy.run_module(name, None, "__main__", True))
    elif is_python and rest and not rest[0].startswith("-"):
        if not os.path.exists(rest[0]):
            raise ValueError(f"there is no program {rest[0]!r} in {os.getcwd()}.")
        sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
        _in_this_process(rest, own, lambda path: runpy.run_path(path, run_name="__main__"))
    else:
        _below_this_process([sys.executable, *rest] if is_python else [first, *rest], own)


def _in_this_process(args: list[str], own: place.Place, start: Any) -> None:
    initialize = jax.distributed.initialize

    def connect_or_initialize(*args, **options):
        place_options = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
        if args or any(options.get(name) is not None for name in place_options):
            return initialize(*args, **options)
        place.connect(**options)

    # Without arguments it detects clusters, but has no variable for the number of a process.
    jax.distributed.initialize = connect_or_initialize
    place.take(own)
    sys.argv[:], before = args, list(sys.argv)
    try:
        start(args[0])
    except (ConnectionError, Transient):  # the text says who is gone
        raise
    except Exception as error:
        # As Python does it, with a status that says who may start it again.
        say(traceback.format_exc().rstrip())
        sys.exit(Exit.TRY_AGAIN if _is_of_another(error) else Exit.UNFORESEEN)
    finally:
        sys.argv[:], jax.distributed.initialize = before, initialize


def _is_of_another(error: Exception) -> bool:
    """Whether an error says that another process is gone; gloo's are of several types."""
    words = str(error).lower()
    return "gloo" in words or "coordination service" in words


def _below_this_process(command: list[str], own: place.Place) -> None:
    try:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=os.environ | place.environ(own)
        )
    except OSError as error:
        write = f"; write python {shlex.join(command)}" if command[0].endswith(".py") else ""
        raise ValueError(f"{command[0]!r} cannot be started: {error.strerror}{write}.") from error
    control.at_end.append(popen.kill)
    pass_on = lambda number, frame: popen.send_signal(number)
    with signals.handled(dict.fromkeys(signals.to_catch(), pass_on)):
        sys.exit(from_returncode(popen.wait()))
