"""One row of metrics every few steps of a run, and the hardware that it ran on."""

import json
import math
import os
import pathlib
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxcomp.launch.regular import named, write_text
from train import checks

_SUMMED = ("examples", "sent_bytes", "dense_bytes", "step_seconds", "skipped", "left_out")
_DRAWN = ("loss", "val_loss", "val_accuracy", "learning_rate")

Row = Mapping[str, Any]
"""`step` and the numbers measured there, by name."""


def append(path: pathlib.Path, row: Row, require: Callable[[], None] = lambda: None) -> None:
    """Appends a row to a JSON Lines file; it is on disk when this returns.

    Numbers that are not finite become null, as JSON cannot express them.

    Args:
      path: The file; created if necessary.
      row: Numbers (Python's, NumPy's or JAX's scalars) and strings by name.
      require: Raises an error if this process may no longer write there.

    Raises:
      OSError: If it cannot be written; then nothing of it is left.
    """
    line = json.dumps({name: plain(value) for name, value in row.items()}, allow_nan=False)
    with named(path), path.open("ab", buffering=0) as file:
        # Only now: a run that takes over replaces the file, and this one is then orphaned.
        require()
        end, left = file.tell(), f"{line}\n".encode()
        try:
            while left:  # a disk that is almost full takes a part
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)  # the next row would go on with half a line
            raise


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows of a JSON Lines file; null is None.

    A last line without its newline was cut off by a crash, and is ignored.

    Raises:
      ValueError: If there is no such file, or another line is not a row: JSON with `step`.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; train the run first.")
    rows = []
    text = path.read_bytes().decode(errors="replace")
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            rows.append(_row(line))
        except ValueError as error:
            what = f"is no row ({error}): {line!r:.80}"
            raise ValueError(f"{str(path)!r}, line {number}, {what}.") from error
    return rows


def _row(line: str) -> dict[str, Any]:
    """A row with a step; values that are plotted or summed are numbers, or null if not finite."""
    row = checks.json_value(line)
    if not isinstance(row, dict):
        raise ValueError("no object")
    if not checks.has_type(step := row.get("step"), int) or step < 0:
        raise ValueError(f"needs a whole number for step, and got {step!r:.40}")
    if "val_loss" in row and "sent_bytes" not in row:
        raise ValueError("needs sent_bytes beside val_loss")
    kinds = dict.fromkeys(_SUMMED, float) | dict.fromkeys(_DRAWN, float | None)
    for name, kind in kinds.items():
        if name in row and not checks.has_type(row[name], kind):
            raise ValueError(f"needs a number for {name}, and got {row[name]!r:.40}")
    return row


def keep_until(path: pathlib.Path, step: int) -> None:
    """Drops the rows after a step, atomically, so that a resumed run repeats none.

    Args:
      path: The JSON Lines file; may be missing.
      step: The last step to keep, that of the restored checkpoint; -1 keeps none.
    """
    if path.is_file():
        kept = [json.dumps(row) + "\n" for row in read(path) if row["step"] <= step]
        write_text(path, "".join(kept))


def hardware_name() -> str:
    """The name of the hardware: the processor and its cores, or the accelerators."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    name = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} cores"


def plain(value: Any) -> Any:
    """A NumPy or JAX scalar as a Python number; None if it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
