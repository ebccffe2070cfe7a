"""Rows of results in a JSON file."""

import fcntl
import json
import os
import pathlib
from typing import Any

import jax

from train.output.metrics import hardware_name, write_text


def machine() -> dict[str, str]:
    """What every row says of where it was measured, for programs that use JAX themselves."""
    return {"hardware": hardware_name(), "jax": jax.__version__}


def write(path: pathlib.Path, rows: list[dict]) -> None:
    """Replaces the file by these rows, atomically; makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(rows, indent=1) + "\n")


def read(path: pathlib.Path) -> list[dict]:
    """The rows of a file; none if there is no such file."""
    return json.loads(path.read_text()) if path.exists() else []


def add(path: pathlib.Path, row: dict, key: dict[str, Any]) -> None:
    """Adds a row in place of one with this key; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = read(path)
        same = [index for index, old in enumerate(rows) if key.items() <= old.items()]
        place = slice(same[0], same[0] + 1) if same else slice(len(rows), None)
        rows[place] = [row]
        write(path, rows)
    finally:
        os.close(folder)  # and ends the lock
