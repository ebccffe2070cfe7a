"""Decisions that must be the same in all processes of a run: made once and broadcast."""

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxcomp.launch.exits import Transient, words
from jaxcomp.launch.regular import make_folder

# Errors of one process that all raise. A RuntimeError stands for those of any other kind.
_KINDS = (ConnectionError, OSError, Transient, ValueError, RuntimeError)
_PIECE = 4096  # bytes: answers are padded to multiples, so that one program broadcasts most of them


def is_first() -> bool:
    """Whether this process writes the run's files."""
    return jax.process_index() == 0


def from_first(make: Callable[[], Any]) -> Any:
    """Calls a function only in process 0, and returns its result in all processes.

    Every process calls it at the same point. In a run of one process it is `make()`.

    Args:
      make: Returns a value that JSON can hold.

    Returns:
      The value; in all processes but the first, as decoded from JSON.

    Raises:
      ValueError: In all processes, if `make` raised one; the same for OSError and `Transient`.
      RuntimeError: In the other processes, if `make` raised any other error.
    """
    if jax.process_count() == 1:
        return make()
    value = error = None
    if is_first():
        try:
            value = make()
        except Exception as caught:
            error = caught
    kind = error and next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
    text = json.dumps([value, error and words(error), kind and kind.__name__])
    answer = _broadcast(text.encode())
    if error is not None:
        raise error
    value, problem, kind = json.loads(answer)
    if kind is not None:
        raise {kind.__name__: kind for kind in _KINDS}[kind](problem)
    return value


def _broadcast(text: bytes) -> bytes:
    """Process 0's bytes."""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    room = np.zeros(-(-size // _PIECE) * _PIECE, np.uint8)
    if is_first():
        room[:size] = np.frombuffer(text, np.uint8)
    return multihost_utils.broadcast_one_to_all(room)[:size].tobytes()


def require_shared(
    folder: Path, seconds: float = 10.0, instead: str = "name another folder"
) -> None:
    """Checks that a folder is the same for all processes, if there are several.

    Args:
      folder: Folder of the run. Process 0 makes it and writes a file there; the others look for
        that.
      seconds: How long they look: on a network file system a new file may appear late.
      instead: What to write instead, for the message.

    Raises:
      OSError: If the folder cannot be made, or written to by process 0.
      ValueError: In all processes, if some do not see what process 0 wrote.
    """
    if jax.process_count() == 1:
        return

    def write():
        make_folder(folder, instead)
        token = folder / f".shared-{secrets.token_hex(8)}"
        token.touch()
        return token.name

    token = folder / from_first(write)
    deadline = time.monotonic() + seconds
    while not (seen := token.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
    votes = multihost_utils.process_allgather(np.int32(seen))
    if is_first():
        token.unlink()
    if blind := [str(process) for process, vote in enumerate(votes) if not vote]:
        raise ValueError(
            f"{folder.absolute()} is not one folder for all processes: what process 0 writes "
            f"there, process {', '.join(blind)} cannot see. Checkpoints need a file system that "
            f"all hosts share; {instead}, or start all in the same folder."
        )
