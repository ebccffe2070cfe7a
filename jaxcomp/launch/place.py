"""The place of this process in its run: its launcher finds it, the program takes it."""

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxcomp.launch import board, distributed, programs
from jaxcomp.launch.distributed import Cluster, Timeouts
from jaxcomp.launch.exits import clean_exits

VARIABLE = "JAXCOMP_PLACE"
"""Environment variable with the place, as JSON, of a program below the launcher's process."""


class Place(NamedTuple):
    """What a process needs to connect to the others."""

    cluster: Cluster
    interface: str | None
    timeouts: Timeouts
    devices: list[int] | None  # visible accelerators of this process; None: all
    secret: bytes


_found: list[Place] = []  # of this process, until it has connected


def take(place: Place) -> None:
    """Keeps the place for `connect`."""
    _found[:] = [place]


def environ(place: Place) -> dict[str, str]:
    """The variables with which another program finds the place: JAX's, and all of it."""
    cluster, *others, secret = place
    found = {
        "JAX_COORDINATOR_ADDRESS": cluster.coordinator,
        "JAX_NUM_PROCESSES": str(cluster.num_processes),
        "JAX_PROCESS_ID": str(cluster.process_id),
        VARIABLE: json.dumps([cluster, *others, secret.decode()]),
    }
    if place.devices is not None:
        found["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, place.devices))
    return found


def from_environ(environ: Mapping[str, str]) -> Place | None:
    """The inverse of `environ`; None without a launcher."""
    if VARIABLE not in environ:
        return None
    cluster, interface, timeouts, devices, secret = json.loads(environ[VARIABLE])
    return Place(Cluster(*cluster), interface, Timeouts(*timeouts), devices, secret.encode())


def connect(**options: Any) -> int:
    """Connects this process to the others of its run, if `python -m jaxcomp.launch` started it.

    Call it before JAX's first use, and before devices are counted. Processes meet with the run's
    secret. If one is missing or there twice, all of them end with one message that says which.
    Process 0 listens on the coordinator's address alone, and gloo on the interface towards it.
    Without a launcher, or a second time, it does nothing: the same program runs alone.

    Args:
      **options: Further arguments of `jax.distributed.initialize`, which win over the launcher's.

    Returns:
      The number of processes.

    Raises:
      SystemExit: If the processes cannot meet, after a message.

    Examples:
      >>> from jaxcomp import launch
      >>> launch.connect()  # this process was not started by a launcher
      1
    """
    place = _found.pop() if _found else from_environ(os.environ)
    os.environ.pop(VARIABLE, None)  # programs that this one starts are in no place of the run
    if place is None or place.cluster.num_processes == 1:
        return board.numbers()[1]
    with clean_exits():
        distributed.connect(*place, **options)
        programs.keep_own(place.cluster.process_id)
    return place.cluster.num_processes
