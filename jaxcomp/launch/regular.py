"""Files that strangers may have replaced with something else, and errors that name a path."""

import contextlib
import io
import os
import pathlib
import stat
from collections.abc import Iterator

_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFDIR: "folder"}
_KINDS |= {stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


def open_file(path: str | pathlib.Path) -> io.BufferedReader:
    """Opens a regular file to read its bytes; links to one count.

    Raises:
      ValueError: If it is a FIFO, on which a plain `open` waits forever, a device, a socket or a
        folder.
      OSError: If it does not exist or cannot be opened.
    """
    # Without a writer, a FIFO opens at once; regular files ignore the flag.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise ValueError(f"{path} is a {_KINDS.get(stat.S_IFMT(kind), 'socket')}; needs a file.")
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
    """Names a file in an OSError that names none, as Python's for a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_folder(path: pathlib.Path, instead: str) -> None:
    """Makes a folder if necessary; an OSError says what to do instead where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot make {path}: {error.strerror}; {instead}") from error


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file's text atomically: a crash leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # from a crash, or a link that somebody has made
    with named(path), part.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
