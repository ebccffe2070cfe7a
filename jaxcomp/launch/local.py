"""Starts processes on this machine, which talk only over the loopback interface."""

import socket
import sys
from collections.abc import Sequence

from jaxcomp.launch import addresses
from jaxcomp.launch.distributed import Cluster, Timeouts
from jaxcomp.launch.supervise import member_command

LOOPBACK = "lo" if sys.platform == "linux" else None
"""The loopback interface, for NCCL; gloo uses the coordinator's interface."""


def commands(
    places: Sequence[int],
    interface: str | None,
    timeouts: Timeouts,
    program: Sequence[str],
    devices: Sequence[Sequence[int]] | None = None,
) -> list[list[str]]:
    """Makes the command of each process.

    Args:
      places: The number of each process on this host, which selects its accelerator.
      interface: Network interface for collectives; None: the loopback interface.
      timeouts: How long processes wait for each other.
      program: The command of the program.
      devices: The accelerators of each place; None: a process finds them itself.

    Returns:
      One command per process, process 0 first.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator = addresses.join(*listener.getsockname())
    return [
        member_command(
            sys.executable,
            Cluster(coordinator, len(places), number, "flags", place, len(places)),
            interface or LOOPBACK,
            timeouts,
            program,
            None if devices is None else devices[place],
        )
        for number, place in enumerate(places)
    ]
