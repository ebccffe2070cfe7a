"""What the processes of a run tell each other beside the collectives.

Signs of life, a wish to stop and the reason of an end go over the board of the run: a few hundred
bytes a second from each process. Without a secret anybody may have written what is read there.
"""

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from train.processes import board
from train.processes.board import Board
from train.processes.exits import Exit

_TROUBLE = (RuntimeError, ValueError)  # JAX makes the one or the other of a status
_BEGUN = re.compile(r"([0-9]{1,15})(?: ([A-Z0-9]{1,12}))?")  # steps, why it wants to stop
_SIGN = re.compile(r"[0-9]{1,15} ([0-9]{1,15}) (.{1,80})")  # number, step, what it does
A_PERSON = "SIGINT"
"""Why a run stops that no machine shall start again."""

_LOOK = 4  # signs of life of this process until it looks for the others'


class Peers(NamedTuple):
    """The other processes, as this one hears of them.

    Attributes:
      at: `(step: int, doing: str)`. Says where this process is.
      stop: `(step: int, wish: str) -> str`. Asked before each step: whether all processes stop
        before this one, and why. After one of them has wished it, by a word for the reason, all
        agree on the first step that none has begun; until then nobody waits for anybody. Where
        they have several reasons, `A_PERSON` counts, and else that of the first process.
      end: `(status: int, reason: str)`. Tells the others that this process ends, and how.
      lost: `() -> (str, str)`. In words, who gives no sign of life and, if all do, who has stayed
        behind; empty if nobody. Takes a few signs' time.
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
      texts: Where they find each other's words; None where there is one process.
      hear_end: Called in the thread, once, with the status of a process that has ended, and words.
      every: Seconds between two signs of life.

    Yields:
      The functions of `Peers`.
    """
    if texts is None:
        yield Peers(
            at=lambda step, doing: None,
            stop=lambda step, wish: wish,
            end=lambda status, reason: None,
            lost=lambda: ("", ""),
        )
        return
    place, closed, agreement = ["0 start"], threading.Event(), _agreement(me, count)
    # Each process's last sign of life, and this one's number when it was new.
    seen: dict[int, tuple[str, int]] = {}

    def talk():
        heard = False
        for number in itertools.count():
            if closed.wait(every):
                return
            # A store that is gone is noticed by JAX and by the collectives.
            with contextlib.suppress(*_TROUBLE):
                texts.put("life", f"{number} {place[0]}")
                agreement.hear(texts)
                if number % _LOOK == 0:
                    for process, text in texts.look("life").items():
                        if seen.get(process, ("", 0))[0] != text:
                            seen[process] = text, number
                ends = texts.look("end")
                ends.pop(me, None)
                if ends and not heard:
                    heard = True
                    process, text = next(iter(ends.items()))
                    status, _, reason = text.partition(" ")
                    hear_end(_failure(status), f"process {process} of {count} has ended: {reason}")

    def at(step, doing):
        place[0] = f"{step} {doing}"

    thread = threading.Thread(target=talk, daemon=True, name="peers")
    thread.start()
    try:
        yield Peers(
            at=at,
            stop=agreement.stop,
            end=lambda status, reason: bounded(
                lambda: texts.put("end", f"{int(status)} {reason}"), 2 * every
            ),
            lost=lambda: _lost(me, count, texts, seen, every),
        )
    finally:
        closed.set()
        thread.join(2 * every)


class _Agreement(NamedTuple):
    stop: Callable[[int, str], str]
    hear: Callable[[Board], None]


def _agreement(me: int, count: int) -> _Agreement:
    """How processes find one step before which all of them stop.

    Once a wish is known, each says how many steps it has begun and begins no other until all have
    said so; then all go on to the largest of these numbers. A process that is ahead waits inside
    a step for those behind, so its thread must say it, and nobody may be held up below that.
    """
    changed = threading.Condition()
    begun, wished, said, target = 0, "", "", None

    def stop(step, wish):
        nonlocal begun, wished
        with changed:
            wished = wished or wish
            if not said:
                begun = step + 1
                return ""
            changed.wait_for(lambda: target is not None)
            last, why = target
            return why if step >= last else ""

    def hear(texts):
        nonlocal said, target
        with changed:
            if target is not None:
                return
            wish = wished
        if not wish and not texts.look("stop"):
            return
        texts.put("stop", "")
        with changed:
            said = said or f"{begun} {wished}".rstrip()  # once: others count on it
        texts.put("begun", said)
        answers = [_BEGUN.fullmatch(text) for _, text in sorted(texts.look("begun").items())]
        if len(answers) == count and None not in answers:
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
    if after is None:
        # JAX closes the store when it misses a process: what was seen before must do.
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
    """A sign of life's place, in words."""
    found = _SIGN.fullmatch(sign)
    return f"step {found[1]} ({found[2]})" if found else "its very beginning"


def _failure(status: str) -> int:
    """The status to end with because another process did; never that of a run that is done."""
    known = {str(int(end)): end for end in Exit if end}
    return known.get(status, Exit.TRY_AGAIN)


def bounded(call: Callable[[], object], seconds: float) -> object:
    """The result of a call that may block or raise; None if it does."""
    results = []

    def run():
        with contextlib.suppress(*_TROUBLE):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def of_this_run(hear_end: Callable[[int, str], None]):
    """`meet` for the processes that JAX has connected."""
    return meet(jax.process_index(), jax.process_count(), board.of_this_run(), hear_end)
