"""Rows of results in a JSON file, their tables, and timing of calls.

All files in benchmarks/results have one format. A file is a list of rows; a row is a flat dict. It
names what was measured, `method` or for a code alone `code`, and what tells it from other rows, as
`task`, `seed`, `steps`, `rate` and `hosts`. Then come the figures, whose names say their units, as
`step_seconds`, `sent_bytes_per_step`, `bits_per_parameter` and `val_loss`. Last comes `machine`:
where they were measured. Rows older than this have `name`, `versions` or `software`.
"""

import fcntl
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from train.output.metrics import hardware_name, write_text

RESULTS = pathlib.Path(__file__).parent / "results"


def machine() -> dict[str, str]:
    """What every row says of where it was measured, for programs that use JAX themselves."""
    return {"hardware": hardware_name(), "jax": jax.__version__}


def name_of(row: dict) -> str:
    """What a row measured: a method, or a code; a few rows name a config, or an update alone."""
    return next(row[key] for key in ("method", "code", "name", "config", "update") if key in row)


def bits_per_parameter(sent_bytes: float, parameters: int, replicas: int) -> float:
    """Bits of a step per direction of an all-reduce, of which a ring sends 2 (R-1)/R.

    Shards send three times (R-1)/R, which counts as two.
    """
    return sent_bytes * 8 / parameters / (2 * (replicas - 1) / replicas)


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


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table of Markdown: the heads of its columns, and the cells of each line."""
    written = [f"| {' | '.join(map(str, line))} |" for line in (head, *lines)]
    return "\n".join([written[0], "|---" * len(head) + "|", *written[1:]])


def interleaved(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Calls each once, then each in turn `repeats` times; the median seconds of each."""
    seconds = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
