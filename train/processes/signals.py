"""Ctrl-C and SIGTERM, as a question for the training loop."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

_SECOND = b"already stopping: the run saves and ends; a third signal ends it at once, unsaved\n"


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a question that the training loop asks.

    The second one says on stderr what a third would do, and stops nothing: schedulers send two,
    a warning and the end some seconds later. The third raises KeyboardInterrupt wherever the
    program is. The handlers that were there return at the end. Signals reach Python's main thread
    only: in any other thread nothing is installed, and the answer stays False.

    Yields:
      A function without arguments: whether a stop was asked for.
    """
    arrived: list[int] = []

    def handle(signum, frame):
        arrived.append(signum)
        if len(arrived) == 2:
            # The program may be inside of a print, which cannot be entered again.
            with contextlib.suppress(OSError):  # a log on a full disk
                os.write(2, _SECOND)
        elif len(arrived) > 2:
            raise KeyboardInterrupt

    asked = lambda: bool(arrived)
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            # None stands for a handler of a C library, which Python cannot put back.
            signal.signal(number, handler or signal.SIG_DFL)
