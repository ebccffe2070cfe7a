"""Sees to it that a run never hangs for ever, and that who ends it says why."""

import contextlib
import faulthandler
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from train.processes import exits, peers
from train.processes.aborts import on_abort

_TICK = 1.0  # seconds
_GRACE = 3.0  # seconds for others to hear of an end before the store of process 0 goes with it


class Watch(NamedTuple):
    """What the training loop tells its watchdog.

    Attributes:
      at: `(step: int, doing: str, seconds: float | None = None)`. `step` steps are done and
        `doing` begins, which may take so long; as long as a step where no time is given.
      stop: `(step: int, wish: str) -> str`. Why to stop before this step, see `peers.Peers`.
    """

    at: Callable[..., None]
    stop: Callable[[int, str], str]


@contextlib.contextmanager
def watch(seconds: float, latest: Callable[[], int | None]) -> Iterator[Watch]:
    """Ends this process if it makes no progress, or if the run's other processes have ended.

    A process that hangs prints who is missing and the stacks of its threads, and ends with
    status `TRY_AGAIN`. Time in which the process itself was stopped does not count.

    Args:
      seconds: Time without progress until the process counts as hung.
      latest: The step of the last checkpoint, for the message; None if there is none.

    Yields:
      The functions to call.

    Raises:
      ConnectionError: If an error inside came about because another process is gone.
    """
    claim, end = _make_claim(), functools.partial(_end, latest)

    def hear_end(status, what):
        time.sleep(_GRACE / 2)  # what the main thread finds out by itself is no worse
        claim()
        end(what, status)

    with peers.of_this_run(hear_end) as others, contextlib.ExitStack() as stack:
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
            others.end(exits.status(reason), str(reason))
            if reason is error:
                raise
            raise ConnectionError(f"{reason}. {_way_on(latest)}") from error
        except KeyboardInterrupt as interrupt:
            others.end(exits.status(interrupt), "interrupted")
            raise


def _reason(error: Exception, lost: str) -> Exception:
    """What to say instead of an error that others have caused; else the error itself."""
    first = str(error).partition("\n")[0][:200]
    if lost:
        return ConnectionError(f"{lost} (here: {first})")
    # gloo's errors come as ValueError, among others.
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
    """What a thread calls before it says how this process ends: only the first returns from it."""
    first = threading.Lock()

    def claim():
        if not first.acquire(blocking=False):
            threading.Event().wait()

    return claim


def _end(latest: Callable[[], int | None], reason: str, status: int = exits.Exit.TRY_AGAIN) -> None:
    if status == exits.Exit.TRY_AGAIN:
        reason = f"{reason}. {_way_on(latest)}"
    # The main thread may hold the lock of sys.stderr for ever.
    with contextlib.suppress(OSError):  # a log on a full disk
        os.write(2, exits.printable(f"error: {reason}\n").encode())
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
                if now["idle"] < now["limit"]:  # it went on while they were asked
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
        thread.join(2 * _TICK)  # it may have found the end claimed, and waits for ever


@contextlib.contextmanager
def _explained_aborts(lost, claim, end) -> Iterator[None]:
    """Says why where JAX aborts this process, unless it is about to end with words of its own."""

    def explain():
        claim()
        end(lost()[0] or "JAX has ended this process, as it says above")

    undo = on_abort(explain)
    # After an error it stays: the store may go with process 0 before this one has said what it is.
    yield
    undo()
