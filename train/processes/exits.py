"""How a program of this folder ends: one message, never a traceback for a user's mistake."""

import contextlib
import enum
import os
import sys
from collections.abc import Iterator
from typing import NoReturn


class Exit(enum.IntEnum):
    """The exit statuses of a process of a run, and of its launcher.

    Attributes:
      meaning: In words, for the table in docs/many_hosts.md.
      again: Who may start the same command again: "nobody has to", "a person" or "a machine".
    """

    meaning: str
    again: str

    def __new__(cls, value: int, again: str, meaning: str):
        made = int.__new__(cls, value)
        made._value_, made.again, made.meaning = value, again, meaning
        return made

    DONE = 0, "nobody has to", "done, or stopped by Ctrl-C and saved"
    UNFORESEEN = 1, "a machine", "an error that nobody foresaw; its traceback is worth a report"
    MISTAKE = 2, "a person", "a mistake or a full disk; the last line says what to mend"
    TRY_AGAIN = 75, "a machine", "another process is missing, gone or cut off, or this one hung"
    # HTCondor's status for the same, so that nobody takes it for something else.
    DRAINED = 85, "a machine", "stopped by another signal and saved, with steps left"
    INTERRUPTED = (
        130,
        "a person",
        "stopped at once, unsaved, by Ctrl-C at the start or a third signal",
    )
    ABORTED = 134, "a machine", "SIGABRT: JAX or another library gave up"
    KILLED = 137, "a machine", "SIGKILL: the host or the pod ran out of memory, or was taken away"
    CRASHED = 139, "a machine", "SIGSEGV: a fault of a driver or a library"
    TERMINATED = 143, "a machine", "SIGTERM before the first step, so that nothing is lost"
    UNREACHABLE = 255, "a machine", "ssh has lost the host, or cannot reach it"


def may_restart(status: int) -> bool:
    """Whether a machine may start the same command again; so what the table does not name."""
    return status not in {end for end in Exit if end.again != "a machine"}


def of_returncode(code: int) -> int:
    """The exit status that a shell would see, of a child that `subprocess` has waited for."""
    return code if code >= 0 else 128 - code


class Transient(RuntimeError):
    """Nothing is wrong with the command: it goes on when it is started again."""


class Drained(KeyboardInterrupt):
    """A scheduler or a cloud has stopped the run: all is saved, and the same command goes on."""


@contextlib.contextmanager
def clean_exits() -> Iterator[None]:
    """Ends the program with one message on stderr if what is inside cannot go on.

    Raises:
      SystemExit: With `MISTAKE` for a ValueError, OSError or RuntimeError; with `TRY_AGAIN` for a
        ConnectionError, as another process of the run is gone, or a `Transient`; with `DONE` for
        a KeyboardInterrupt that says what was saved, as `train.loop.run` raises it, and `DRAINED`
        for a `Drained`; with `INTERRUPTED` for one without a text, where the program stopped at
        once.
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
        print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """A text, perhaps of a stranger, in which nothing tells a terminal what to do."""
    shown = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def status(error: BaseException) -> Exit:
    """The exit status for what ends a program, see `clean_exits`."""
    if isinstance(error, Drained):
        return Exit.DRAINED
    if isinstance(error, KeyboardInterrupt):
        return Exit.DONE if str(error) else Exit.INTERRUPTED
    return Exit.TRY_AGAIN if isinstance(error, (ConnectionError, Transient)) else Exit.MISTAKE


def leave(status: int | str | None) -> NoReturn:
    """Ends this process as `sys.exit` does; after an interrupt at once, also during a save."""
    if status == Exit.INTERRUPTED:
        flush()
        os._exit(Exit.INTERRUPTED)  # sys.exit would wait for the threads that still save
    sys.exit(status)


def flush() -> None:
    """Writes out what was printed, as `os._exit` does not."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log on a full disk
            stream.flush()
