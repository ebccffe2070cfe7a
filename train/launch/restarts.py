"""Restarts a run that loses processes from its newest checkpoint, with all of them or with fewer.

With fewer, it keeps asking who is back. As soon as more processes could take part, and a checkpoint
has been made, the run is told to save and end, and is started again with them.
"""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from train.checkpoints import files
from train.config.run import Config
from train.launch.supervise import End
from train.processes.exits import Exit, may_restart, say

_PAUSE = 10.0  # seconds between two checks of a host


class Group(NamedTuple):
    """The places of a run's processes, one each, and functions on them.

    Attributes:
      places: All places, in the order of the processes.
      run: `(places, overrides of the config, is_wanted) -> End`. Starts a process in each and
        waits; tells them to save and end once `is_wanted()` is true.
      left: `(places, lost processes) -> places`. Which places could take part in the next start,
        after a start in `places` that lost the processes with these numbers.
      back: `() -> places`. Which places could take part now; None if that is unknown.
    """

    places: Sequence[Any]
    run: Callable[[Sequence[Any], list[str], Callable[[], bool]], End]
    left: Callable[[Sequence[Any], Sequence[int]], Sequence[Any]]
    back: Callable[[], Sequence[Any]] | None = None


def keep_running(group: Group, config: Config, restarts: int, min_replicas: int | None) -> int:
    """Starts a run, and restarts it after each end that needs no action by a person.

    Args:
      group: Where its processes are.
      config: The run.
      restarts: Most restarts after a loss.
      min_replicas: Least replicas to continue without lost processes; None: waits until all places
        are there.

    Returns:
      The exit status of the last start.
    """
    places, overrides = group.places, list[str]()
    while True:
        with _returned(group, config, min_replicas, places) as are_back:
            end = group.run(places, overrides, are_back)
            returned = end.status == Exit.DRAINED and are_back()
        if end.told or not may_restart(end.status) or not (restarts or returned):
            return end.status
        restarts -= not returned
        were = group.places if returned else places
        places, overrides = _next(group, config, min_replicas, were, end.lost)
        said = [f"the run goes on with {len(places)} of {len(group.places)} processes", *overrides]
        say(" ".join(said))


def _next(group: Group, config: Config, least: int | None, places: Sequence[Any], lost):
    """The places and overrides of the next start; waits until there are enough places."""
    left = group.left(*((places, lost) if least is not None else (group.places, ())))
    told = False
    while (found := _start(group, config, least, left)) is None:
        left = group.left(group.places, ())
        if len(left) < len(group.places):
            if not told:
                say(f"{len(left)} of {len(group.places)} processes could run: waiting for others")
                told = True
            time.sleep(_PAUSE)
    return found


@contextlib.contextmanager
def _returned(
    group: Group, config: Config, least: int | None, places: Sequence[Any]
) -> Iterator[Callable[[], bool]]:
    """Whether more places could take part, and this start has made a checkpoint."""
    if least is None or group.back is None or len(places) == len(group.places):
        yield lambda: False
        return
    found, closed = threading.Event(), threading.Event()
    directory = pathlib.Path(config.runs_dir, config.name, "checkpoints")
    before = files.latest(directory) or 0

    def ask():
        while not closed.wait(_PAUSE):
            start = _start(group, config, least, group.back())
            more = start is not None and len(start[0]) > len(places)
            if more and (files.latest(directory) or 0) > before:
                say(
                    f"{len(start[0])} of {len(group.places)} processes can run again: the run saves"
                )
                found.set()
                return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield found.is_set
    finally:
        closed.set()


def _start(group: Group, config: Config, least: int | None, left: Sequence[Any]):
    """As many of the remaining places as fit the run; None if there are too few."""
    if len(left) == len(group.places):
        return group.places, []
    for count in range(len(left), 0, -1):
        found = fitted(config, len(group.places), count)
        if least is not None and found is not None and found.replicas >= least:
            return left[:count], found.overrides
    return None


class Fitted(NamedTuple):
    """A run's config for fewer processes."""

    replicas: int
    overrides: list[str]


def fitted(config: Config, processes: int, count: int) -> Fitted | None:
    """Fits replicas and accumulation to fewer processes, with the same global batch.

    A replica's microbatch does not grow, so that it still fits into memory.

    Args:
      config: The run, on `processes` processes.
      processes: Number of processes that it was made for.
      count: Number of processes now.

    Returns:
      None if the batch does not divide, or `config.replicas` is 0.
    """
    if not config.replicas or config.replicas % processes:
        return None
    replicas = config.replicas // processes * count
    if replicas % config.fast or config.data.batch % replicas:
        return None
    share, least = config.data.batch // replicas, config.accumulate * processes / count
    accumulate = next(
        parts for parts in range(1, share + 1) if parts >= least and share % parts == 0
    )
    return Fitted(replicas, ["--replicas", str(replicas), "--accumulate", str(accumulate)])
