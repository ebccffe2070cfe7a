"""Ends a run that hangs, with a message that says why."""

import contextlib
import faulthandler
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from jaxcomp.launch import exits, peers
from jaxcomp.launch.aborts import on_abort

_TICK = 1.0  # seconds
_GRACE = 3.0  # seconds for others to hear of an end before process 0 takes the store with it


class Watch(NamedTuple):
    """How the training loop talks to its watchdog.

    Attributes:
      at: `(step: int, doing: str, seconds: float | None = None)`. `step` steps are done and `doing`
        begins, which may take `seconds`, by default as long as a step.
      stop: `(step: int, reason: str) -> str`. The reason to stop before this step, as in
        `peers.Peers`.
    """

    at: Callable[..., None]
    stop: Callable[[int, str], str]


@contextlib.contextmanager
def watch(seconds: float, latest: Callable[[], int | None] = lambda: None) -> Iterator[Watch]:
    """Ends this process if it makes no progress, or if other processes of the run have ended.

    A process that hangs prints who is missing and the stacks of its threads, and ends with
    status `TRY_AGAIN`. Time in which the process itself is stopped does not count.

    Args:
      seconds: Time without progress until the process counts as hung.
      latest: The step of the last checkpoint, for the message; None if there is none.

    Yields:
      The functions to call.

    Raises:
      ConnectionError: If an error inside happened because another process is gone.
    """
    claim, end = _make_claim(), functools.partial(_end, latest)

    def hear_end(status, what):
        time.sleep(_GRACE / 2)  # the main thread may find out itself
        claim()
        end(what, status)

    with peers.this_run(hear_end) as others, contextlib.ExitStack() as stack:
        many = jax.process_count() > 1
        if many:
            stack.enter_context(_explained_aborts(others.lost, claim, end))
        at = stack.enter_context(_clock(seconds, others, claim, end))
        try:
            yield Watch(at, others.stop)
        except Exception as error:
            if not many:
                raise
            reason = _reason(error, others.lost()[0])
            claim()
            others.end(exits.status(reason), exits.words(reason))
            if reason is error:
                raise
            raise ConnectionError(f"{reason}. {_way_on(latest)}") from error
        except KeyboardInterrupt as interrupt:
            others.end(exits.status(interrupt), "interrupted")
            raise


def _reason(error: Exception, lost: str) -> Exception:
    """A clearer error if others have caused this one; else the error itself."""
    first = str(error).partition("\n")[0][:200]
    if lost:
        return ConnectionError(f"{lost} (here: {first})")
    # gloo's errors are of several types, among them ValueError.
    if isinstance(error, jax.errors.JaxRuntimeError) or "gloo" in first.lower():
        return ConnectionError(f"the processes have lost each other, but all are alive ({first})")
    return error


def _way_on(latest: Callable[[], int | None]) -> str:
    last = "There is no checkpoint yet"
    try:
        if (step := latest()) is not None:
            last = f"The last checkpoint is step {step}"
    except OSError as error:  # the file system may be what hangs
        last = f"The checkpoints cannot be listed ({error.strerror})"
    return f"{last}; start the same command to go on"


def _make_claim() -> Callable[[], None]:
    """A function to call before saying how this process ends; only the first call returns."""
    first = threading.Lock()

    def claim():
        if not first.acquire(blocking=False):
            threading.Event().wait()

    return claim


def _end(latest: Callable[[], int | None], reason: str, status: int = exits.Exit.TRY_AGAIN) -> None:
    if status == exits.Exit.TRY_AGAIN:
        reason = f"{reason}. {_way_on(latest)}"
    # The main thread may hold the lock of sys.stderr forever.
    with contextlib.suppress(OSError):  # a log on a full disk
        os.write(2, exits.printable(f"error: {reason}\n").encode())
    exits.silence()
    time.sleep(_GRACE if jax.process_index() == 0 else 0)
    os._exit(status)


@contextlib.contextmanager
def _clock(seconds, others: peers.Peers, claim, end) -> Iterator[Callable[..., None]]:
    now, closed = {"step": 0, "doing": "start", "idle": 0.0, "limit": seconds}, threading.Event()

    def at(step, doing, limit=None):
        others.at(step, doing)
        now.update(step=step, doing=doing, idle=0.0, limit=limit or seconds)

    def count():
        # Ticks instead of a clock: a process that was stopped for an hour has not hung.
        while not closed.wait(_TICK):
            now["idle"] += _TICK
            if now["idle"] >= now["limit"]:
                gone, behind = others.lost()
                if now["idle"] < now["limit"]:  # it made progress meanwhile
                    continue
                claim()
                what = "no progress for {limit:g} s after step {step} ({doing})".format(**now)
                what = ": ".join(filter(None, (what, gone or behind)))
                others.end(exits.Exit.TRY_AGAIN, what)
                faulthandler.dump_traceback(2, all_threads=True)
                end(what)

    thread = threading.Thread(target=count, daemon=True, name="watchdog")
    thread.start()
    try:
        yield at
    finally:
        closed.set()
        thread.join(2 * _TICK)  # it may wait forever for a claim that another thread has


@contextlib.contextmanager
def _explained_aborts(lost, claim, end) -> Iterator[None]:
    """Prints a reason when JAX aborts this process, unless it is about to end itself."""

    def explain():
        claim()
        end(lost()[0] or "JAX has ended this process, as it says above")

    undo = on_abort(explain)
    # It stays after an error: process 0 may take the store with it before this one has spoken.
    yield
    undo()
