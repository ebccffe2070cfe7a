"""What is made of data once, in a folder that many runs may read."""

import hashlib
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

_FORMAT = 1  # of what is made: another one is made anew


def once(folder: pathlib.Path, key: Any, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Makes a folder, unless it is there: whole or not at all, also where several runs want it.

    Args:
      folder: Where those of all keys lie.
      key: Equal where the same would be made, by its `repr`.
      make: Fills an empty folder.

    Returns:
      The folder of this key.
    """
    made = folder / hashlib.sha256(repr((_FORMAT, key)).encode()).hexdigest()[:16]
    if made.is_dir():
        return made
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as unfinished:
        new = pathlib.Path(unfinished, "new")
        new.mkdir(mode=0o755)
        make(new)
        try:
            new.rename(made)
        except OSError:
            if not made.is_dir():  # else another run has made the same
                raise
    return made
