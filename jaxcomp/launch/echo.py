"""Shows the first process's output on the launcher's terminal, with its progress as a bar."""

import contextlib
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxcomp.launch import progress

# Control codes of ASCII, and of Latin-1 in UTF-8.
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f]|\xc2[\x80-\x9f]")


@contextlib.contextmanager
def echo(log: pathlib.Path, began: int) -> Iterator[Callable[[], None]]:
    """Copies new text of a log to standard output.

    On a terminal, lines of progress become a bar below all other text, if tqdm is installed. The
    log keeps them.

    Args:
      log: The process's output.
      began: Position in the log where it begins.

    Yields:
      A function that copies the text since the last call.
    """
    with open(log, "rb") as file, contextlib.ExitStack() as stack:
        file.seek(began)
        if sys.stdout.isatty() and sys.stderr.isatty():
            screen = stack.enter_context(contextlib.closing(_Screen()))
            copy = lambda: screen.show(file.read())
        else:
            copy = lambda: write(file.read())
        yield copy
        copy()


class _Screen:
    """A terminal with text, and the bar of a run in its last line."""

    def __init__(self):
        self.bar: Any = None
        self.rest = b""  # a line that has not ended yet
        self.shown = time.monotonic()  # when the bar was last drawn
        self.began = time.time()

    def show(self, new: bytes) -> None:
        *lines, self.rest = (self.rest + new).split(b"\n")
        for line in lines:
            found = progress.read(line.decode(errors="replace"))
            if found is None or not self._step(found):
                self._print(line + b"\n")
        if self.bar and time.monotonic() > self.shown + 1:
            self.bar.refresh()  # the time goes on
            self.shown = time.monotonic()

    def _step(self, line: progress.Line) -> bool:
        """Shows a line as a bar; False if there is no tqdm."""
        if self.bar is None:
            self.bar = progress.bar(line.name, line.step, line.steps, from_lines=True)
            if self.bar is None:
                return False
            self.bar.start_t = self.began
        left = line.left and f"{line.left} left"
        self.bar.set_postfix_str(", ".join(filter(None, (line.rates, left))), refresh=False)
        self.bar.update(line.step - self.bar.n)
        if line.step == line.steps:  # the run's summary comes below
            self.close_bar()
        return True

    def _print(self, text: bytes) -> None:
        if self.bar:
            self.bar.clear()
        write(text)

    def close(self) -> None:
        if self.rest:
            self._print(self.rest)
        self.close_bar()

    def close_bar(self) -> None:
        if self.bar:
            self.bar.refresh()
            self.bar.close()
            self.bar = None


def _harmless(text: bytes) -> bytes:
    """A log's text without terminal control codes, since some of it may come from strangers."""
    return _CONTROL.sub(lambda found: b"\\x%02x" % found[0][-1], text)


def write(text: bytes) -> None:
    """Writes to standard output; nothing more of it after a failure."""
    if text:
        try:
            sys.stdout.buffer.write(_harmless(text))
            sys.stdout.buffer.flush()
        except OSError:  # no reader or a full disk: the log has it all
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
