"""How programs end: with one message, and without a traceback for a user's mistake."""

import contextlib
import enum
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import TextIO


class Exit(enum.IntEnum):
    """The exit statuses of a process of a run, and of its launcher.

    Attributes:
      meaning: Text for the table in docs/many_hosts.md.
      again: Who may start the same command again: "nobody has to", "a person" or "a machine".
    """

    meaning: str
    again: str

    def __new__(cls, value: int, again: str, meaning: str):
        made = int.__new__(cls, value)
        made._value_, made.again, made.meaning = value, again, meaning
        return made

    DONE = 0, "nobody has to", "done, or stopped by Ctrl-C and saved"
    UNFORESEEN = 1, "a machine", "an unexpected error; please report its traceback"
    MISTAKE = 2, "a person", "a mistake or a full disk; the last line says what to fix"
    TRY_AGAIN = 75, "a machine", "another process is missing, gone or cut off, or this one hung"
    # HTCondor's status for the same case.
    DRAINED = 85, "a machine", "stopped by another signal and saved, with steps left"
    INTERRUPTED = (
        130,
        "a person",
        "stopped at once, unsaved, by Ctrl-C at the start or a third signal",
    )
    ABORTED = 134, "a machine", "SIGABRT: JAX or another library gave up"
    KILLED = 137, "a machine", "SIGKILL: the host or the pod ran out of memory, or was taken away"
    CRASHED = 139, "a machine", "SIGSEGV: a fault of a driver or a library"
    TERMINATED = 143, "a machine", "SIGTERM before the first step; nothing is lost"
    UNREACHABLE = 255, "a machine", "ssh has lost the host, or cannot reach it"


def may_restart(status: int) -> bool:
    """Whether a machine may start the same command again; true for statuses not in the table."""
    return status not in {end for end in Exit if end.again != "a machine"}


def from_returncode(code: int) -> int:
    """The exit status in a shell's terms, for a return code of `subprocess`."""
    return code if code >= 0 else 128 - code


class Transient(RuntimeError):
    """An error that is not the command's fault: start it again and it goes on."""


class Drained(KeyboardInterrupt):
    """A scheduler or a cloud stopped the run: all is saved, and the same command resumes it."""


@contextlib.contextmanager
def clean_exits() -> Iterator[None]:
    """Ends the program with one message on stderr if its body raises an error.

    Raises:
      SystemExit: With `MISTAKE` for a ValueError or OSError; with `TRY_AGAIN` for a `Transient` or
        a ConnectionError, since another process of the run is gone; with `DONE` for a
        KeyboardInterrupt with a text that says what was saved, and `DRAINED` for a `Drained`; with
        `INTERRUPTED` for a KeyboardInterrupt without a text, when the program stopped at once; with
        `UNFORESEEN`, after a traceback, for any other error.
    """
    open_streams()
    try:
        with _no_interrupt_lost():
            yield
    except KeyboardInterrupt as stop:
        say(str(stop) or "interrupted")
        sys.exit(status(stop))
    except Exception as error:
        end = status(error)
        say(traceback.format_exc() if end == Exit.UNFORESEEN else f"error: {error}")
        sys.exit(end)
    finally:
        _give_up_unwritten(sys.stderr)


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Interrupts the main thread again after a Ctrl-C during a callback.

    Python ignores what a callback raises, such as JAX's own in the garbage collector.
    """
    previous = sys.unraisablehook

    def hook(ignored):
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            # After the callback, and as a signal: `_thread.interrupt_main` would not end a wait.
            main = threading.main_thread().ident
            threading.Timer(0.01, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            previous(ignored)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous


def ended(function: Callable[[], None]) -> int:
    """Calls a function, and returns its exit status."""
    try:
        with clean_exits():
            function()
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or Exit.DONE
        say(end.code)
        return Exit.UNFORESEEN
    return Exit.DONE


def open_streams() -> None:
    """Opens standard streams that the caller has closed, as `2>&-` does, on nothing.

    A file that is opened later would take their place, and the output of libraries.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
            setattr(sys, name, open(opened, mode))


def say(text: str) -> None:
    """Prints to stderr, unless that is a file on a full disk, or a pipe that nobody reads."""
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Prints a result to stdout, unless that is a pipe that nobody reads any more, as of `head`.

    A character that stdout's encoding lacks is shown by its code: the result has cost its time.

    Raises:
      OSError: If it is a file on a full disk.
    """
    with contextlib.suppress(BrokenPipeError):
        try:
            known = getattr(sys.stdout, "encoding", None) or "utf-8"
            print(text.encode(known, "backslashreplace").decode(known), flush=True)
        finally:
            _give_up_unwritten(sys.stdout)


@contextlib.contextmanager
def while_read() -> Iterator[None]:
    """Ends the program, with status 0, when its body prints to a pipe that nobody reads any more.

    For long texts that a library prints, as `--help`; the body must not use sockets.
    """
    try:
        yield
    except BrokenPipeError:
        sys.exit(Exit.DONE)
    finally:
        _give_up_unwritten(sys.stdout)


def _give_up_unwritten(stream: TextIO) -> None:
    """Drops what a stream cannot write: Python would try again at its end, and exit with 120."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """A text, perhaps from a stranger, without terminal control codes."""
    shown = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return "".join(shown)


def status(error: BaseException) -> Exit:
    """The exit status for an error that ends a program, see `clean_exits`."""
    if isinstance(error, Drained):
        return Exit.DRAINED
    if isinstance(error, KeyboardInterrupt):
        return Exit.DONE if str(error) else Exit.INTERRUPTED
    if isinstance(error, (ConnectionError, Transient)):
        return Exit.TRY_AGAIN
    return Exit.MISTAKE if isinstance(error, (ValueError, OSError)) else Exit.UNFORESEEN


def words(error: BaseException) -> str:
    """An error's text for others; an unforeseen one means little without its type."""
    known = status(error) != Exit.UNFORESEEN
    return str(error) if known else f"{type(error).__name__}: {error}"


def flush() -> None:
    """Flushes the output, which `os._exit` does not do."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a log on a full disk
            stream.flush()


def silence() -> None:
    """Drops what libraries still log, so that the reason of the end stays the last line."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
