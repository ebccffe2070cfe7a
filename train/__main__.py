"""`python -m train CONFIG [overrides]`, see `train.program`."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """Ends the process at once at a Ctrl-C, if Python's own handler would raise an error.

    An error in the midst of imports is a long traceback, is lost in a callback of the garbage
    collector, or aborts a library. In these seconds there is nothing to save.
    """

    def handle(number, frame):
        os.write(2, b"interrupted\n")
        os._exit(130)  # Exit.INTERRUPTED, which cannot be imported yet

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


if __name__ == "__main__":
    with ended_at_once():
        from jaxcomp import launch
        from train.program import main

    launch.finish(lambda: main(sys.argv[1:]))
