"""The signals that end a run, which the training loop polls."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

STOPS = {
    "SIGINT": "Ctrl-C; LSF's first word after SIGUSR2",
    "SIGTERM": "`kill`, SLURM, Kubernetes, systemd; a spot machine that is taken away",
    "SIGHUP": "a terminal or an ssh connection that closes; not under `nohup`",
    "SIGUSR1": "a warning: SLURM with `--signal=USR1@120`, or Grid Engine before a pause",
    "SIGUSR2": "a warning: LSF at the run limit, or Grid Engine before it kills",
    "SIGXCPU": "the limit of processor time is used up; then it comes every second",
    "SIGPWR": "a UPS reports a power failure; LXC stops a container with it",
}
"""The signals that ask a run to save and end, and who sends them; for docs/many_hosts.md."""

ORDERS = ("SIGINT", "SIGTERM")  # which a person in a hurry repeats; the others are warnings
_SECOND = b"""\
already stopping: the run saves and ends; a third Ctrl-C or SIGTERM ends it at once, unsaved
"""


def to_catch() -> list[signal.Signals]:
    """The signals of `STOPS` on this system, without ignored warnings."""
    return [number for number in _here() if number not in ignored()]


def ignored() -> list[signal.Signals]:
    """The warnings of `STOPS` that this process ignores, for example SIGHUP under nohup."""
    is_ignored = lambda number: signal.getsignal(number) is signal.SIG_IGN
    return [number for number in _here() if number.name not in ORDERS and is_ignored(number)]


def _here() -> list[signal.Signals]:
    return [signal.Signals[name] for name in STOPS if hasattr(signal, name)]


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], str]]:
    """Catches the first signal of `STOPS`, for the training loop to poll.

    A second Ctrl-C or SIGTERM only prints what a third would do: schedulers send two, a warning
    and the end some seconds later. The third raises KeyboardInterrupt wherever the program is. The
    other signals never do that. The old handlers return at the end. Signals reach only Python's
    main thread: in any other thread nothing is installed, and the answer stays empty.

    Yields:
      A function without arguments that returns the name of the first signal; empty if none has
      come.
    """
    arrived: list[str] = []

    def handle(number, frame):
        arrived.append(signal.Signals(number).name)
        if arrived[-1] not in ORDERS:
            return
        orders = sum(name in ORDERS for name in arrived)
        if orders == 2:
            # The program may be inside a print, which is not reentrant.
            with contextlib.suppress(OSError):  # a log on a full disk
                os.write(2, _SECOND)
        elif orders > 2:
            raise KeyboardInterrupt

    asked = lambda: arrived[0] if arrived else ""
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    with handled(dict.fromkeys(to_catch(), handle)):
        yield asked


@contextlib.contextmanager
def handled(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Sets the handlers of signals, and puts the old ones back at the end."""
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None stands for a handler of a C library, which Python cannot put back.
            signal.signal(number, handler or signal.SIG_DFL)
