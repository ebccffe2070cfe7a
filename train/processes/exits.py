"""How a program of this folder ends: one message, never a traceback for a user's mistake."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

TRY_AGAIN = 75
"""Exit status if nothing is wrong with the command, and it goes on when it is started again."""

INTERRUPTED = 130
"""Exit status of a program that a signal stopped at once."""


@contextlib.contextmanager
def clean_exits() -> Iterator[None]:
    """Ends the program with one message on stderr if what is inside cannot go on.

    Raises:
      SystemExit: With status 2 for a ValueError, OSError or RuntimeError; with `TRY_AGAIN` for a
        ConnectionError: another process of the run is gone; with 0 for a KeyboardInterrupt that
        says what was saved, as `train.loop.run` raises it; with 130 for one without a text,
        where the program stopped at once.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        say(f"error: {error}")
        sys.exit(status(error))
    except KeyboardInterrupt as stop:
        say(str(stop) or "interrupted")
        sys.exit(status(stop))


def say(text: str) -> None:
    """Prints to stderr, unless that is a file on a full disk."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def status(error: BaseException) -> int:
    """The exit status for what ends a program, see `clean_exits`."""
    if isinstance(error, KeyboardInterrupt):
        return 0 if str(error) else INTERRUPTED
    return TRY_AGAIN if isinstance(error, ConnectionError) else 2


def leave(status: int | str | None) -> NoReturn:
    """Ends this process as `sys.exit` does; after an interrupt at once, also during a save."""
    if status == INTERRUPTED:
        flush()
        os._exit(INTERRUPTED)  # sys.exit would wait for the threads that still save
    sys.exit(status)


def flush() -> None:
    """Writes out what was printed, as `os._exit` does not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log on a full disk
            stream.flush()
