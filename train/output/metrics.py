"""What a run leaves behind: its record, and one row of metrics every few steps."""

import importlib.metadata
import json
import math
import os
import pathlib
import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax

Row = Mapping[str, Any]
"""`step` and what was measured there: numbers, by name."""


def append(path: pathlib.Path, row: Row, require: Callable[[], None] = lambda: None) -> None:
    """Appends a row to a JSON Lines file, in one write.

    Numbers that are not finite become null: JSON has no other word for them.

    Args:
      path: The file; made if it is not there.
      row: Numbers (Python's, NumPy's or JAX's scalars) and strings by name.
      require: Raises an error if this process must not write there any more.
    """
    line = json.dumps({name: plain(value) for name, value in row.items()}, allow_nan=False)
    with path.open("a", encoding="utf-8") as file:
        # Only now: who takes over puts another file here, and this one is then nobody's.
        require()
        file.write(line + "\n")


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows of a JSON Lines file; null is None.

    A last line without its newline was cut off by a crash, and is left out.

    Raises:
      ValueError: If there is no such file, or another line is no JSON.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; train the run first.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(path)!r}, line {number}, is no JSON: {line!r}.") from error
    return rows


def keep_until(path: pathlib.Path, step: int) -> None:
    """Drops the rows after a step, atomically, so that a resumed run repeats none.

    Args:
      path: The JSON Lines file; nothing happens if it is not there.
      step: The last step to keep, that of the restored checkpoint; -1 keeps none.
    """
    if path.is_file():
        kept = [json.dumps(row) + "\n" for row in read(path) if row["step"] <= step]
        write_text(path, "".join(kept))


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file's text atomically: a crash leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a crash, or a link that somebody has put there
    with part.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def run_record(config_json: str, data: Row, plan: Any) -> str:
    """Writes down what a run depends on, as JSON text.

    Args:
      config_json: The resolved configuration, of `as_json.to_json`.
      data: The record of the corpus.
      plan: What travels compressed and what exact; plain values.

    Returns:
      JSON with keys config, versions, hardware, data and plan.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    record = {
        "config": json.loads(config_json),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": hardware_name(),
        "data": dict(data),
        "plan": plan,
    }
    return json.dumps(record, indent=2)


def hardware_name() -> str:
    """Names what computes: the processor and its cores, or the accelerators."""
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
    """A scalar of NumPy or JAX as Python's; None if it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
