"""Rows of results in a JSON file."""

import json
import pathlib

import jax

from train.output.metrics import hardware_name, write_text


def machine() -> dict[str, str]:
    """What every row says of where it was measured, for programs that use JAX themselves."""
    return {"hardware": hardware_name(), "jax": jax.__version__}


def write(path: pathlib.Path, rows: list[dict]) -> None:
    """Replaces the file by these rows, atomically; makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(rows, indent=1) + "\n")
