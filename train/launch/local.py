"""Processes on this machine, which talk over its loopback interface only."""

import socket
import sys
from collections.abc import Sequence

from train.launch.supervise import member_command
from train.processes import addresses
from train.processes.distributed import Cluster, Timeouts

LOOPBACK = "lo" if sys.platform == "linux" else None
"""The interface that never leaves this machine, for NCCL; gloo takes the coordinator's anyway."""


def commands(
    places: Sequence[int], interface: str | None, timeouts: Timeouts, train_args: Sequence[str]
) -> list[list[str]]:
    """Writes the command of each process.

    Args:
      places: Each one's number on this host, which says which accelerator it takes.
      interface: Network interface for collectives; None: the loopback interface.
      timeouts: How long processes wait for each other.
      train_args: Config file and overrides.

    Returns:
      One command a process, process 0 first.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        coordinator = addresses.join(*listener.getsockname())
    return [
        member_command(
            sys.executable,
            Cluster(coordinator, len(places), number, "flags", place, len(places)),
            interface or LOOPBACK,
            timeouts,
            train_args,
        )
        for number, place in enumerate(places)
    ]
