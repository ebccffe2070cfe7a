"""The launcher's copies, of the state of a training run: optional, and newer than checkpoints."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxcomp.launch import copies, parts
from jaxcomp.launch.claims import Claim
from jaxcomp.launch.copies import Copies
from jaxcomp.launch.parts import Entry
from train import checks
from train.checkpoints.trees import described, require_same


@contextlib.contextmanager
def opened(
    folder: Path, claim: Claim, directory: str | None, seconds: int, patience: int
) -> Iterator[Copies | None]:
    """Opens the copies of a run, as `copies.opened` does; None without a directory for them."""
    if directory is None:
        copies.forget(folder)
        yield None
        return
    instead = "Write another --emergency-dir"
    with copies.opened(folder, claim, Path(directory), seconds, patience, instead) as made:
        yield made


def record(tree: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """What a copy says of its step."""
    return {"leaves": described(tree), "run": metadata}


def load(files: Sequence[Path], like: Any, where: str) -> Any:
    """Assembles the parts of a step, on any devices.

    Raises:
      ValueError: If they are from another model, or incomplete.
    """
    held: list[tuple[Entry, np.ndarray]] = []
    for file in files:
        found, header = parts.read(file)
        held += found
    require_same(Path(where), header["leaves"], header["run"], described(like))
    return parts.assembled(like, held)


def record_of(files: Sequence[Path]) -> dict[str, Any]:
    """The record that a run made with these parts."""
    _, header = parts.read(files[0])
    checks.require_keys(header, str(files[0]), leaves=dict[str, str], run=dict[str, Any])
    return header["run"]
