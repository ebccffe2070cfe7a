"""Processed data that is made once, in a folder that many runs may read."""

import hashlib
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from jaxcomp.launch.regular import make_folder, named

_FORMAT = 2  # of the results; a change makes all again


def once(folder: pathlib.Path, key: Any, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Makes a folder unless it exists: completely or not at all, even with concurrent runs.

    Args:
      folder: Parent of the folders of all keys.
      key: Equal for equal results; compared by `repr`.
      make: Fills an empty folder.

    Returns:
      The folder of this key.
    """
    made = folder / hashlib.sha256(repr((_FORMAT, key)).encode()).hexdigest()[:16]
    if made.is_dir():
        return made
    make_folder(folder, "write another folder as --runs-dir or --data.cache")
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as unfinished:
        new = pathlib.Path(unfinished, "new")
        new.mkdir(mode=0o755)
        with named(folder):
            make(new)
        try:
            new.rename(made)
        except OSError:
            if not made.is_dir():  # otherwise another run has made it
                raise
    return made
