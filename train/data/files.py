"""Lists and reads the files of a corpus."""

import codecs
import contextlib
import os
import pathlib
from collections.abc import Collection, Iterator
from typing import BinaryIO, NoReturn

from train import checks

_PIECE = 1 << 20  # bytes of a text in memory


def files_below(
    root: pathlib.Path, links: bool = True, leave_out: Collection[str] = ()
) -> list[pathlib.Path]:
    """All files of a folder and its subfolders, in the order of their names, without hidden ones.

    Args:
      root: The folder.
      links: Whether to follow links to folders, except to a folder that contains the link.
      leave_out: Names of folders to skip.

    Raises:
      ValueError: If a folder cannot be listed.
    """
    found = []
    for folder, subfolders, names in os.walk(root, onerror=refuse, followlinks=links):
        path = pathlib.Path(folder)
        above = {os.path.realpath(each) for each in (path, *path.parents)}
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in leave_out
            and os.path.realpath(path / name) not in above
        ]
        found += [pathlib.Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=str)


@contextlib.contextmanager
def opened(file: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file; a ValueError for what is no regular file, and where reading it fails."""
    try:
        with checks.open_file(file) as made:
            yield made
    except OSError as error:
        refuse(error, file)


def content_of(file: pathlib.Path, most: int = checks.MOST_TEXT) -> bytes:
    """The bytes of a regular file; a ValueError if it cannot be read, or has more than `most`."""
    try:
        return checks.read_file(file, most)
    except OSError as error:
        refuse(error, file)


def stat(file: pathlib.Path) -> os.stat_result:
    """Size and times of a file; a ValueError if it is not a readable regular file."""
    try:
        found = file.stat()
    except OSError as error:
        refuse(error)
    if not file.is_file():  # reading a pipe would block
        raise ValueError(f"{str(file)!r} is no file; remove it.")
    return found


def refuse(error: OSError, file: str | pathlib.Path | None = None) -> NoReturn:
    """Raises a ValueError that says which file cannot be read, and why."""
    name = error.filename if file is None else str(file)
    raise ValueError(f"{name!r} cannot be read ({error.strerror or error}).") from error


def pieces(file: pathlib.Path) -> Iterator[str]:
    """The text of a file, a mebibyte at a time, cut at line ends if there are any.

    Without the byte order mark that some editors write first.

    Raises:
      ValueError: If it cannot be read, or is not UTF-8, or is binary.
    """
    decoder, rest, start, last = codecs.getincrementaldecoder("utf-8")(), "", 0, False
    with opened(file) as made:
        while not last:
            chunk = made.read(_PIECE)
            last, start = not chunk, made.tell() - len(chunk) - len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, last)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{str(file)!r} is not UTF-8 text (byte {start + error.start}); convert it or "
                    "take it out."
                ) from error
            if "\0" in text:
                raise ValueError(f"{str(file)!r} is binary: it holds NUL bytes; take it out.")
            if not start:  # a byte order mark is no text
                text = text.removeprefix("\ufeff")
            cut = text.rfind("\n") + 1
            if last or (not cut and len(rest) > _PIECE):
                cut = len(text)
            if cut or last:
                yield rest + text[:cut]
                rest = ""
            rest += text[cut:]
