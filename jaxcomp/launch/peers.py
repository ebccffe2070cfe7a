"""Messages between the processes of a run outside collectives.

Signs of life, requests to stop and reasons for an end go over the run's board: a few hundred bytes
per second from each process. Without a secret, anybody can write there.
"""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import jax

from jaxcomp.launch import board
from jaxcomp.launch.board import Board
from jaxcomp.launch.exits import Exit

_TROUBLE = (RuntimeError, ValueError)  # JAX turns a status into one of these
_BEGUN = re.compile(r"([0-9]{1,15})(?: ([A-Z0-9]{1,12}))?")  # steps, why it wants to stop
_SIGN = re.compile(r"[0-9]{1,15} ([0-9]{1,15}) (.{1,80})")  # number, step, activity
_T = TypeVar("_T")

A_PERSON = "SIGINT"
"""Reason of a stop after which no machine should restart the run."""

_LOOK = 4  # signs of life of this process between two looks at the others'


class Peers(NamedTuple):
    """Functions to talk to the other processes.

    Attributes:
      at: `(step: int, doing: str)`. Reports where this process is.
      stop: `(step: int, reason: str) -> str`. Called before each step: the reason if all processes
        stop before it. Once one of them has asked for a stop, with a word for the reason, all agree
        on the first step that none has begun; until then nobody waits. `A_PERSON` takes precedence
        over other reasons; otherwise the first process's reason counts.
      end: `(status: int, reason: str)`. Tells the others that this process ends, and how.
      lost: `() -> (str, str)`. Texts about the process without a sign of life and, if there is
        none, about the one that is behind; empty if nobody. Takes the time of a few signs.
    """

    at: Callable[[int, str], None]
    stop: Callable[[int, str], str]
    end: Callable[[int, str], None]
    lost: Callable[[], tuple[str, str]]


@contextlib.contextmanager
def meet(
    me: int,
    count: int,
    texts: Board | None,
    hear_end: Callable[[int, str], None],
    every: float = 1.0,
) -> Iterator[Peers]:
    """Keeps in touch with the other processes, in a thread.

    Args:
      me: Number of this process, in [0, count).
      count: Processes of the run.
      texts: Their board; None for a single process.
      hear_end: Called once, in the thread, with the status of a process that has ended, and a text.
      every: Seconds between two signs of life.

    Yields:
      The functions of `Peers`.
    """
    if texts is None:
        yield Peers(
            at=lambda step, doing: None,
            stop=lambda step, reason: reason,
            end=lambda status, reason: None,
            lost=lambda: ("", ""),
        )
        return
    place, closed, agreement = ["0 start"], threading.Event(), _agreement(me, count)
    # Each process's last sign of life, and this process's own number when it arrived.
    seen: dict[int, tuple[str, int]] = {}

    def talk():
        is_known = False
        for number in itertools.count():
            if closed.wait(every):
                return
            # JAX and the collectives notice when the store is gone.
            with contextlib.suppress(*_TROUBLE):
                texts.put("life", f"{number} {place[0]}")
                agreement.hear(texts)
                if number % _LOOK == 0:
                    for process, text in texts.look("life").items():
                        if seen.get(process, ("", 0))[0] != text:
                            seen[process] = text, number
                ends = texts.look("end")
                ends.pop(me, None)
                if ends and not is_known:
                    is_known = True
                    process, text = next(iter(ends.items()))
                    status, _, reason = text.partition(" ")
                    hear_end(_failure(status), f"process {process} of {count} has ended: {reason}")

    def at(step, doing):
        place[0] = f"{step} {doing}"

    def end(status, reason):
        bounded(lambda: texts.put("end", f"{int(status)} {reason}"), 2 * every)

    thread = threading.Thread(target=talk, daemon=True, name="peers")
    thread.start()
    try:
        yield Peers(
            at=at,
            stop=agreement.stop,
            end=end,
            lost=lambda: _lost(me, count, texts, seen, every),
        )
    finally:
        closed.set()
        thread.join(2 * every)


class _Agreement(NamedTuple):
    stop: Callable[[int, str], str]
    hear: Callable[[Board], None]


def _agreement(me: int, count: int) -> _Agreement:
    """Agrees on one step before which all processes stop.

    Once a request to stop is known, each process reports how many steps it has begun, and begins no
    other until all have reported. Then all go on to the largest of these numbers. A process that is
    ahead waits for the others inside a step, so its thread must report, and no process may stop
    before it has reached that number.
    """
    changed = threading.Condition()
    begun, asked, reported = 0, "", ""
    target: tuple[int, str] | None = None

    def stop(step, reason):
        nonlocal begun, asked
        with changed:
            asked = asked or reason
            if not reported:
                begun = step + 1
                return ""
            changed.wait_for(lambda: target is not None)
            last, why = target or (0, "")
            return why if step >= last else ""

    def hear(texts):
        nonlocal reported, target
        with changed:
            if target is not None:
                return
            reason = asked
        if not reason and not texts.look("stop"):
            return
        texts.put("stop", "")
        with changed:
            reported = reported or f"{begun} {asked}".rstrip()  # once: others rely on it
        texts.put("begun", reported)
        found = [_BEGUN.fullmatch(text) for _, text in sorted(texts.look("begun").items())]
        answers = [answer for answer in found if answer is not None]
        if len(answers) == len(found) == count:
            whys = [answer[2] for answer in answers if answer[2]]
            why = A_PERSON if A_PERSON in whys else (whys or ["NOBODY"])[0]
            with changed:
                target = max(int(answer[1]) for answer in answers), why
                changed.notify_all()

    return _Agreement(stop, hear)


def _lost(me: int, count: int, texts: Board, seen: dict, every: float) -> tuple[str, str]:
    look = lambda: bounded(lambda: texts.look("life"), 5 * every)
    before = look()
    time.sleep(3 * every)
    after = look() if before is not None else None
    if after is None or before is None:
        # JAX closes the store when a process is missing: use what was seen before.
        newest = max((number for _, number in seen.values()), default=0)
        after = {process: text for process, (text, _) in seen.items()}
        silent = [process for process, (_, number) in seen.items() if number < newest]
        if not silent:
            lost = f"process 0 of {count} is gone: it coordinates the others and does not answer"
            return lost, ""
    else:
        alive = [me, *(number for number, text in after.items() if text != before.get(number))]
        silent = sorted(after.keys() - alive)
    gone = [
        f"process {number} of {count} is gone or stopped: its last sign of life came at "
        f"{_place(after[number])}"
        for number in silent
    ]
    if gone:
        return "; ".join(gone), ""
    signs = [_SIGN.fullmatch(after.get(number, "")) for number in range(count)]
    steps = [int(sign[1]) if sign else -1 for sign in signs]
    behind = [
        f"process {number} of {count} is behind, at {_place(after.get(number, ''))}"
        for number, step in enumerate(steps)
        if step == min(steps) < max(steps)
    ]
    return "", "; ".join(behind)


def _place(sign: str) -> str:
    """The step and activity of a sign of life, as text."""
    found = _SIGN.fullmatch(sign)
    return f"step {found[1]} ({found[2]})" if found else "its very beginning"


def _failure(status: str) -> int:
    """The exit status after another process has ended; never that of a finished run."""
    known = {str(int(end)): end for end in Exit if end}
    return known.get(status, Exit.TRY_AGAIN)


def bounded(call: Callable[[], _T], seconds: float) -> _T | None:
    """The result of a call that may block or raise; None if it does."""
    results = []

    def run():
        with contextlib.suppress(*_TROUBLE):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def this_run(hear_end: Callable[[int, str], None]):
    """`meet` for the processes that JAX has connected."""
    return meet(jax.process_index(), jax.process_count(), board.this_run(), hear_end)
