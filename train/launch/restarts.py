"""A run that loses processes goes on from its newest checkpoint, with all of them or with fewer."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from train.config.run import Config
from train.launch.supervise import End
from train.processes.exits import may_restart, say

_PAUSE = 10.0  # seconds between two questions whether a host is there


class Group(NamedTuple):
    """The places where a run's processes may be, one each, and what is done there.

    Attributes:
      places: All of them, in the order of the processes.
      run: `(places, overrides of the config) -> End`. Starts a process in each, and waits.
      left: `(places, lost processes) -> places`. Which of all could take part in the next start,
        after one in `places` that lost the processes of these numbers.
    """

    places: Sequence[Any]
    run: Callable[[Sequence[Any], list[str]], End]
    left: Callable[[Sequence[Any], Sequence[int]], Sequence[Any]]


def keep_running(group: Group, config: Config, restarts: int, min_replicas: int | None) -> int:
    """Starts a run, and starts it again after each end that a machine may mend.

    Args:
      group: Where its processes are.
      config: The run.
      restarts: How often to start it again, at most.
      min_replicas: How many replicas must be left to go on without those that were lost; None: it
        waits until all places are there.

    Returns:
      The exit status of the last start.
    """
    places, overrides = group.places, list[str]()
    while True:
        end = group.run(places, overrides)
        if not restarts or end.told or not may_restart(end.status):
            return end.status
        restarts -= 1
        places, overrides = _next(group, config, min_replicas, places, end.lost)
        said = [f"the run goes on with {len(places)} of {len(group.places)} processes", *overrides]
        say(" ".join(said))


def _next(group: Group, config: Config, least: int | None, places: Sequence[Any], lost):
    """Where to start next, and with which overrides; waits until enough places are there."""
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


def _start(group: Group, config: Config, least: int | None, left: Sequence[Any]):
    """As many of the places that are left as fit the run; None if they are too few."""
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
    """Fits replicas and accumulation to fewer processes; the batch of all replicas stays.

    A microbatch of one replica does not grow, so that it fits into memory as before.

    Args:
      config: The run, on `processes` processes.
      processes: How many it was made for.
      count: How many there are.

    Returns:
      None where the batch does not divide, or `config.replicas` does not say how many there are.
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
