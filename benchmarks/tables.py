"""Rows of the results' files as Markdown tables, for the pages of docs/."""

import fnmatch
import json
import pathlib
from collections.abc import Callable

from benchmarks import (
    accelerators_figure,
    accelerators_measured,
    accelerators_targets,
    agreement,
    figures,
    peers_table,
    scale_table,
    scaling,
    scaling_check,
    slow_network_figure,
    update,
    whole_run,
)

RESULTS = pathlib.Path(__file__).parent / "results"


def table(name: str, patterns: list[str], task: str = "nano", steps: int = 1000) -> str:
    """The rows of one file, those of the first pattern first.

    Args:
      name: A key of `TABLES`, mostly the stem of a file.
      patterns: Patterns of `fnmatch`, on methods' names; of none, all rows.
      task: Task of the convergence rows.
      steps: Steps of the convergence rows.

    Returns:
      The table; without rows, a sentence that says so.
    """
    rows = json.loads(path_of(name).read_text())
    if patterns:
        place = [_first(patterns, row.get("method", row.get("name"))) for row in rows]
        order = sorted((p, index) for index, p in enumerate(place) if p is not None)
        rows = [rows[index] for _, index in order]
    text = TABLES[name](rows, task, steps) if rows else ""
    return text or f"Not measured yet: `benchmarks/results/{path_of(name).name}` has no such row."


def path_of(name: str) -> pathlib.Path:
    """The file of a table's rows."""
    return RESULTS / f"{name.removesuffix('_targets').removesuffix('_measured')}.json"


def _first(patterns: list[str], name: str) -> int | None:
    return next((i for i, p in enumerate(patterns) if fnmatch.fnmatchcase(name, p)), None)


def _convergence(rows, task, steps) -> str:
    summaries = figures.summarize(rows, task, steps)
    return figures.table(summaries) if summaries else ""


def _memory(rows, task, steps) -> str:
    return _columns(
        rows,
        {
            "method": lambda row: f"`{row['method']}`",
            "replicas": lambda row: str(row["replicas"]),
            "copies of the gradient": lambda row: f"{row['gradients']:.1f}",
        },
    )


def _codec(rows, task, steps) -> str:
    return _columns(
        # The last rows compare two codes with each other.
        [row for row in rows if "copy_seconds" in row],
        {
            "code": lambda row: f"`{row['name']}`",
            "times a copy's time": lambda row: f"{row['ratio']:.1f}",
        },
    )


def _devices(rows, task, steps) -> str:
    """What an interface sends, of hosts of one device and of several."""
    sent = lambda row: row["nic_bytes"]["sent"]
    one = {row["method"]: sent(row) for row in rows if row["devices"] == 1}
    name = lambda row: row["method"].rpartition(", ")[0]
    return _columns(
        [row for row in rows if name(row) in one],
        {
            "method": name,
            "devices": lambda row: str(row["devices"]),
            "bytes a step": lambda row: f"{sent(row):,.0f}",
            "of one device's": lambda row: f"{sent(row) / one[name(row)]:.3f}",
        },
    )


def _peers(rows, task, steps) -> str:
    """Times of the file's rows, and the losses of the file next to it."""
    losses = json.loads(path_of("peers_loss").read_text())
    return peers_table.table(rows, losses)


def _columns(rows: list[dict], cells: dict[str, Callable[[dict], str]]) -> str:
    lines = [list(cells), ["---"] * len(cells)]
    lines += [[cell(row) for cell in cells.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[list[dict], str, int], str]] = {
    "convergence": _convergence,
    "pico": _convergence,
    "micro": scale_table.table,
    "34m_linux": scale_table.table,
    "slow_network": lambda rows, task, steps: slow_network_figure.table(rows),
    "slow_network_devices": _devices,
    "peers": _peers,
    "whole_run": lambda rows, task, steps: whole_run.table(rows),
    "scaling": lambda rows, task, steps: scaling.table(rows),
    "scaling_check": lambda rows, task, steps: scaling_check.table(rows),
    "update": lambda rows, task, steps: update.table(rows),
    "memory": _memory,
    "agreement": lambda rows, task, steps: agreement.table(rows),
    "accelerators": lambda rows, task, steps: accelerators_figure.table(rows),
    "accelerators_measured": lambda rows, task, steps: accelerators_measured.table(rows),
    "accelerators_targets": lambda rows, task, steps: accelerators_targets.table(rows),
    "codec": _codec,
}
