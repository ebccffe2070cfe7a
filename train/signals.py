"""Ctrl-C and SIGTERM, as a question for the training loop."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C or SIGTERM into a question that the training loop asks.

    The second one raises KeyboardInterrupt wherever the program is. The handlers that were
    there return at the end. Signals reach Python's main thread only: in any other thread
    nothing is installed, and the answer stays False.

    Yields:
      A function without arguments: whether a stop was asked for.
    """
    asked = threading.Event()

    def handle(signum, frame):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in previous.items():
            # None stands for a handler of a C library, which Python cannot put back.
            signal.signal(number, handler or signal.SIG_DFL)
