"""Rows of the results' files as Markdown tables, in the README and in the pages of docs/.

    python -m benchmarks.tables

writes each table again, between the two comments that stand around it on its page:

    <!-- table: convergence
    :task: nano
    0/1 Adam*
    dense Adam
    -->
    <!-- end of table -->

The first word is a key of `TABLES`. `:task:` and `:steps:` choose rows of convergence. The other
lines are patterns of methods' names; of none, all rows.
"""

import fnmatch
import json
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import (
    accelerators_tables,
    codes,
    figures,
    peers_loss,
    scale_figure,
    slow_network_figure,
)
from benchmarks import rows as rows_file
from benchmarks.rows import RESULTS, markdown
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


def pages() -> list[pathlib.Path]:
    """The README, and the pages of docs/."""
    root = RESULTS.parent.parent
    docs = [page for page in sorted((root / "docs").rglob("*.md")) if "_build" not in page.parts]
    return [root / "README.md", *docs]


def filled(page: str) -> str:
    """A page's text, with what its results' files now say in each of its tables."""
    return _MARKED.sub(_fill, page)


_MARKED = re.compile(r"(<!-- table: (\w+)(.*?)-->\n).*?(<!-- end of table -->)", re.DOTALL)


def _fill(marked: re.Match) -> str:
    head, name, asked, end = marked.groups()
    lines = [line for line in asked.splitlines() if line.strip()]
    options: dict[str, Any] = dict(re.findall(r"^:(\w+): (.*)$", asked, re.MULTILINE))
    if "steps" in options:
        options["steps"] = int(options["steps"])
    text = table(name, [line for line in lines if line[0] != ":"], **options)
    return f"{head}\n{text}\n\n{end}"


def path_of(name: str) -> pathlib.Path:
    """The file of a table's rows."""
    return RESULTS / f"{_FILES.get(name, name)}.json"


# The files of tables that are not the only one of theirs.
_FILES = {
    "accelerators_targets": "accelerators",
    "accelerators_measured": "accelerators",
    "scaling_hosts": "accelerators",
    "readme": "micro",
}


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
    return markdown(list(cells), [[cell(row) for cell in cells.values()] for row in rows])


# The README's rows: a method of `micro.json`, and its call as a reader may write it.
README = {
    "4 bits": ('compressed_mean(quantize(4), "replica")', "compressed_mean"),
    "0/1 Adam": (
        'zero_one_adam(rate, "replica", sync_at=schedules.halving(rate, 2000, after=200), '
        "warmup_steps=200, variance_compressor=quantize(8))",
        "zero_one_adam",
    ),
    "CocktailSGD, no delay, 88x, Muon": (
        'cocktail_sgd(muon(rate, others=rare_rows(adam(rate), "replica")), "replica", '
        "delayed=False)",
        "cocktail_sgd",
    ),
    "MuLoCo": ('muloco(rate, "replica")', "local_steps"),
}


def _readme(rows, task, steps) -> str:
    """The rows of `README`: bytes saved and mean loss, each beside its own dense baseline."""
    found = {summary.method: summary for summary in figures.summarize(rows, "micro", 2000)}
    baseline = {row["method"]: row["baseline"] for row in rows}
    lines = []
    for method, (call, page) in README.items():
        own, dense = found[method], found[baseline[method]]
        fewer = dense.sent_bytes_per_step / own.sent_bytes_per_step
        loss, beside = (f"{statistics.fmean(summary.losses):.2f}" for summary in (own, dense))
        link = f"[`{call}`](docs/methods/{page}.md)"
        beside += f", {dense.method.removeprefix('dense ')}"
        lines.append([link, f"{fewer:.3g}x", loss, beside, len(own.losses)])
    return markdown(["call", "fewer bytes", "loss", "dense", "seeds"], lines)


TABLES: dict[str, Callable[[list[dict], str, int], str]] = {
    "convergence": _convergence,
    "pico": _convergence,
    "micro": scale_figure.table,
    "micro_fine_tune": scale_figure.table,
    "micro_fine_tune_rates": scale_figure.table,
    "micro_long": scale_figure.table,
    "micro_batch_64": scale_figure.table,
    "micro_b2_95": scale_figure.table,
    "3m": scale_figure.table,
    "micro_dense_start": scale_figure.table,
    "readme": _readme,
    "34m_linux": scale_figure.table,
    "slow_network": lambda rows, task, steps: slow_network_figure.table(rows),
    "slow_network_devices": _devices,
    "peers": _peers,
    "whole_run": lambda rows, task, steps: whole_run.table(rows),
    "scaling": lambda rows, task, steps: scaling.table(rows),
    "scaling_check": lambda rows, task, steps: scaling.check_table(rows),
    "scaling_hosts": lambda rows, task, steps: scaling.hosts_table(rows),
    "scaling_published": lambda rows, task, steps: scaling.published_table(rows),
    "update": lambda rows, task, steps: codes.table(rows),
    "memory": _memory,
    "moved": lambda rows, task, steps: codes.moved_table(rows),
    "agreement": lambda rows, task, steps: agreement.table(rows),
    "accelerators": lambda rows, task, steps: accelerators_tables.table(rows),
    "accelerators_measured": lambda rows, task, steps: accelerators_tables.measured_table(rows),
    "accelerators_targets": lambda rows, task, steps: accelerators_tables.targets_table(rows),
    "codec": _codec,
}


if __name__ == "__main__":
    for page in pages():
        old = page.read_text()
        if (new := filled(old)) != old:
            page.write_text(new)
            print(f"wrote the tables of {page}")
