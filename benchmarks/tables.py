"""Rows of the results' files as Markdown tables, for the pages of docs/.

    python -m benchmarks.tables

prints the README's, which its tests compare with the page.
"""

import fnmatch
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import (
    accelerators_tables,
    codes,
    figures,
    peers_loss,
    scale_figure,
    slow_network_figure,
)
from benchmarks import rows as rows_file
from benchmarks.rows import RESULTS
from benchmarks.studies import agreement, scaling, whole_run


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
        place = [_first(patterns, rows_file.name_of(row)) for row in rows]
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
            "code": lambda row: f"`{rows_file.name_of(row)}`",
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
    return peers_loss.table(rows, losses)


def _columns(rows: list[dict], cells: dict[str, Callable[[dict], str]]) -> str:
    lines = [list(cells), ["---"] * len(cells)]
    lines += [[cell(row) for cell in cells.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Wanted(NamedTuple):
    """A row of the README's table: what you want, what to take, and the source of its figures."""

    want: str
    take: str
    file: str  # of the results
    task: str
    steps: int
    method: str
    beside: str = "dense Adam"  # dense training with the same inner optimizer


README = (
    Wanted(
        "the loss of dense training, one line changed",
        "[`compressed_mean(quantize(8))`](docs/methods/compressed_mean.md)",
        *("convergence", "nano", 1000, "8-bit Adam"),
    ),
    Wanted(
        "the same with fewer bytes and less memory",
        "[`sharded_optimizer`](docs/methods/sharded_optimizer.md), 4 bits",
        *("convergence", "nano", 1000, "sharded Adam, G4D4"),
    ),
    Wanted(
        "pre-training with Adam, DeepSpeed's way",
        "[`zero_one_adam`](docs/methods/zero_one_adam.md)",
        *("convergence", "nano_bert", 3000, "0/1 Adam, warm-up, kappa 256"),
    ),
    Wanted(
        "fine-tuning over 100 Mbit/s",
        "[`cocktail_sgd`](docs/methods/cocktail_sgd.md), signs of an eighth",
        *("convergence", "nano_fine_tune", 3000, "CocktailSGD, signs of an eighth"),
    ),
    Wanted(
        "many thousand steps, an exchange every 16th",
        "[`local_steps`](docs/methods/local_steps.md), Muon inside, 2 bits",
        *("pico", "pico", 8000, "DiLoCo, Muon, 2 bits", "dense Muon"),
    ),
    Wanted(
        "the least bytes, an exchange every 106th step",
        "[`local_steps`](docs/methods/local_steps.md), Muon inside, 2 bits",
        *("pico", "pico", 8000, "DiLoCo, Muon, 2 bits, every 106th", "dense Muon"),
    ),
    Wanted(
        "large batches with LAMB",
        "[`slamb`](docs/methods/slamb.md)",
        *("convergence", "digits", 400, "SLAMB", "LAMB"),
    ),
)


def readme() -> str:
    """The rows as Markdown: bytes saved and mean loss, each against its dense baseline."""
    lines = ["| you want | take | fewer bytes | loss (dense) | seeds |", "|---|---|---|---|---|"]
    for row in README:
        summaries = figures.summarize(
            rows_file.read(RESULTS / f"{row.file}.json"), row.task, row.steps
        )
        found = {summary.method: summary for summary in summaries}
        dense, own = found[row.beside], found[row.method]
        fewer = dense.sent_bytes_per_step / own.sent_bytes_per_step
        mean = lambda summary: f"{statistics.fmean(summary.losses):#.3g}"
        loss = f"{mean(own)} ({mean(dense)})"
        factor = f"{fewer:.3g}" if fewer < 1000 else f"{fewer:,.0f}"
        lines.append(f"| {row.want} | {row.take} | {factor}x | {loss} | {len(own.losses)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[list[dict], str, int], str]] = {
    "convergence": _convergence,
    "pico": _convergence,
    "micro": scale_figure.table,
    "34m_linux": scale_figure.table,
    "slow_network": lambda rows, task, steps: slow_network_figure.table(rows),
    "slow_network_devices": _devices,
    "peers": _peers,
    "whole_run": lambda rows, task, steps: whole_run.table(rows),
    "scaling": lambda rows, task, steps: scaling.table(rows),
    "scaling_check": lambda rows, task, steps: scaling.check_table(rows),
    "update": lambda rows, task, steps: codes.table(rows),
    "memory": _memory,
    "agreement": lambda rows, task, steps: agreement.table(rows),
    "accelerators": lambda rows, task, steps: accelerators_tables.table(rows),
    "accelerators_measured": lambda rows, task, steps: accelerators_tables.measured_table(rows),
    "accelerators_targets": lambda rows, task, steps: accelerators_tables.targets_table(rows),
    "codec": _codec,
}


if __name__ == "__main__":
    print(readme())
