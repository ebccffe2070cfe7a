"""What a launcher knows of the program that it starts: by default, that it is any program."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Plan(NamedTuple):
    """How a run of a program is started, and started again.

    Attributes:
      logs: Folder for the logs of its processes.
      fewer: `(all, count, least) -> arguments`. Further arguments for a run that was made for `all`
        processes, on `count` of them; None if it cannot run so, or `--min-replicas` is more.
      saved: The number of the newest checkpoint, 0 if there is none. A run is told to save and end
        for a host that is back only if this is known.
    """

    logs: Path
    fewer: Callable[[int, int, int], Sequence[str] | None]
    saved: Callable[[], int] | None = None


def count_processes(options: argparse.Namespace, args: Sequence[str]) -> Plan:
    """The plan for a program that runs unchanged on any number of processes.

    Raises:
      ValueError: If options conflict.
    """
    if options.min_replicas is not None and not options.restarts:
        raise ValueError("--min-replicas needs --restarts; write how often to start again.")
    return Plan(
        Path(options.logs or "logs"),
        lambda processes, count, least: [] if count >= least else None,
    )


class Program(NamedTuple):
    """A program, and the words for it in the launcher's messages.

    Attributes:
      module: The launcher's name for it, after `python -m`.
      noun: What follows `--`.
      place: The same in a usage.
      own: The arguments after that.
      counted: What `--min-replicas` counts.
      command: The words before these in the command of each process.
      plan: `(options, args) -> Plan`.
    """

    module: str = "jaxcomp.launch"
    noun: str = "program"
    place: str = "PROGRAM"
    own: str = "its arguments"
    counted: str = "processes"
    command: Sequence[str] = ()
    plan: Callable[[argparse.Namespace, Sequence[str]], Plan] = count_processes
