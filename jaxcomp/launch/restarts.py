"""Restarts a run that loses processes, with all of them or with fewer.

With fewer, it keeps asking who is back. As soon as more processes could take part, and a checkpoint
has been made, the run is told to save and end, and is started again with them. A program that does
not report its checkpoints has them back at its next restart.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxcomp.launch.exits import Exit, may_restart, say
from jaxcomp.launch.program import Plan
from jaxcomp.launch.supervise import End

_PAUSE = 10.0  # seconds between two checks of a host


class Group(NamedTuple):
    """The places of a run's processes, one each, and functions on them.

    Attributes:
      places: All places, in the order of the processes.
      run: `(places, further arguments, is_wanted) -> End`. Starts a process in each and
        waits; tells them to save and end once `is_wanted()` is true.
      left: `(places, lost processes) -> places`. Which places could take part in the next start,
        after a start in `places` that lost the processes with these numbers.
      back: `() -> places`. Which places could take part now; None if that is unknown.
    """

    places: Sequence[Any]
    run: Callable[[Sequence[Any], list[str], Callable[[], bool]], End]
    left: Callable[[Sequence[Any], Sequence[int]], Sequence[Any]]
    back: Callable[[], Sequence[Any]] | None = None


def keep_running(group: Group, plan: Plan, restarts: int, least: int | None) -> int:
    """Starts a run, and restarts it after each end that needs no action by a person.

    Args:
      group: Where its processes are.
      plan: Of its program.
      restarts: Most restarts after a loss.
      least: Least processes, or what the plan counts, to continue without lost processes; None:
        waits until all places are there.

    Returns:
      The exit status of the last start.
    """
    places, more = group.places, list[str]()
    while True:
        with _returned(group, plan, least, places) as are_back:
            end = group.run(places, more, are_back)
            returned = end.status == Exit.DRAINED and are_back()
        if end.signalled or not may_restart(end.status) or not (restarts or returned):
            return end.status
        restarts -= not returned
        were = group.places if returned else places
        places, more = _next(group, plan, least, were, end.lost)
        sentences = [f"the run goes on with {len(places)} of {len(group.places)} processes", *more]
        say(" ".join(sentences))


def _next(group: Group, plan: Plan, least: int | None, places: Sequence[Any], lost):
    """The places and further arguments of the next start; waits until there are enough places."""
    left = group.left(*((places, lost) if least is not None else (group.places, ())))
    shown = False
    while (found := _start(group, plan, least, left)) is None:
        left = group.left(group.places, ())
        if len(left) < len(group.places):
            if not shown:
                say(f"{len(left)} of {len(group.places)} processes could run: waiting for others")
                shown = True
            time.sleep(_PAUSE)
    return found


@contextlib.contextmanager
def _returned(
    group: Group, plan: Plan, least: int | None, places: Sequence[Any]
) -> Iterator[Callable[[], bool]]:
    """Whether more places could take part, and this start has made a checkpoint."""
    back, saved = group.back, plan.saved
    if least is None or back is None or saved is None or len(places) == len(group.places):
        yield lambda: False
        return
    found, closed = threading.Event(), threading.Event()
    before = saved()

    def ask():
        while not closed.wait(_PAUSE):
            start = _start(group, plan, least, back())
            more = start is not None and len(start[0]) > len(places)
            if more and saved() > before:
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


def _start(group: Group, plan: Plan, least: int | None, left: Sequence[Any]):
    """As many of the remaining places as fit the run; None if there are too few."""
    if len(left) == len(group.places):
        return group.places, []
    for count in range(len(left), 0, -1):
        more = None if least is None else plan.fewer(len(group.places), count, least)
        if more is not None:
            return left[:count], list(more)
    return None
