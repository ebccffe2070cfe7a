"""The rows of benchmarks.accelerators as a table and as a picture.

python -m benchmarks.accelerators_figure FILE.json PICTURE.svg
"""

import argparse
import json
import pathlib

from matplotlib.figure import Figure

from benchmarks import accelerators_measured
from benchmarks.accelerators_roofline import RATES
from benchmarks.accelerators_step import WITH_MOMENTUM
from train.output.plots import COLORS

_COLUMNS = ("device", "model", "mesh", "method")
_PROGRAM = [
    *_COLUMNS,
    "moved, copies",
    "kernels",
    "temp, copies",
    "accessed, times dense",
    "loops of unknown length",
    "messages",
    "asynchronous",
    "in loops or branches",
    "products beside them",
    "peak, GB",
    "compiled in, CPU s",
]
_PREDICTED = [*_COLUMNS, "MB a host sends", *(f"{rate}, ms" for rate in RATES), "unlimited, ms"]
DRAWN = ("dense", "q8", "q4", "sign", "top_k", "cocktail")
DRAWN_FROM = 10**8
"""Methods with a curve, all of whose steps are alike, and the parameters of the smallest model."""


def above_dense(rows: list[dict]) -> list[tuple[dict, dict | None]]:
    """Each row that was compiled, with the dense one of its device, model and mesh, if any.

    That of momentum SGD, which keeps one copy where Adam keeps two, for methods in front of it.
    """
    whole = [row for row in rows if "moved_copies" in row]
    place = lambda row: (row["device"], row["model"], row["mesh"])
    dense = {(*place(row), row["method"]): row for row in whole}
    of = lambda row: "dense_sgd" if row["method"] in WITH_MOMENTUM else "dense"
    return [(row, dense.get((*place(row), of(row)))) for row in whole]


def table(rows: list[dict]) -> str:
    """The rows as Markdown tables: programs, predicted steps, and what has been measured."""
    whole = above_dense(rows)
    tables = [
        _markdown(_PROGRAM, [_program(*pair) for pair in whole] + _failures(rows)),
        _markdown(_PREDICTED, [_predicted(row) for row, _ in whole]),
        accelerators_measured.table(rows),
    ]
    return "\n\n".join(text for text in tables if text)


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table; nothing without lines."""
    written = [head, ["---"] * len(head), *lines] if lines else []
    return "\n".join(f"| {' | '.join(line)} |" for line in written)


def _key(row: dict) -> list[str]:
    return [row[name] for name in _COLUMNS]


def _program(row: dict, dense: dict | None) -> list[str]:
    """The cells of a program: of what the dense step has too, the difference to it."""
    first = dense if row is not dense else None
    counts = row["messages"].values()
    temp = "memory", "temp_copies"
    return [
        *_key(row),
        _above(row["moved_copies"], first and first["moved_copies"], ".1f"),
        _above(row["kernels"], first and first["kernels"], ",d"),
        _above(_at(row, *temp), first and _at(first, *temp), ".1f"),
        _times(row["accessed_bytes"], first and first["accessed_bytes"]),
        f"{row['unknown_loops']}",
        f"{sum(kind['all'] for kind in counts)}",
        f"{sum(kind['async'] for kind in counts)}",
        f"{row['messages_inside']}",
        f"{row['products_beside']:.0%}",
        f"{_at(row, 'memory', 'peak_bytes') / 1e9:.2f}",
        f"{row['compile_cpu_seconds']:.0f}" if "compile_cpu_seconds" in row else "",
    ]


def _predicted(row: dict) -> list[str]:
    """A host's bytes, and what the roofline says of a step."""
    seconds = [row["predicted"][rate] for rate in (*RATES, "unlimited")]
    return _key(row) + [f"{row['nic_bytes'] / 1e6:,.2f}", *(f"{1e3 * s:,.0f}" for s in seconds)]


def _at(row: dict, outer: str, inner: str) -> float:
    return row[outer][inner]


def _above(value, dense, form: str) -> str:
    return format(value, form) if dense is None else f"{value - dense:+{form}}"


def _times(value, dense) -> str:
    return "" if not value or not dense else f"{value / dense:.2f}"


def _failures(rows: list[dict]) -> list[list[str]]:
    """Lines of the steps that could not be compiled, with the reason."""
    told = [(_key(row), " ".join(row["error"].split())) for row in rows if "error" in row]
    empty = [""] * (len(_PROGRAM) - len(_COLUMNS) - 1)
    return [[*key, f"not compiled: {error.replace('|', '/')}", *empty] for key, error in told]


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws the predicted step against a host's rate, a panel a device, model and mesh.

    Args:
      rows: Rows of `benchmarks.accelerators`; those with an error are left out, and so are small
        models, scanned ones beside unrolled ones, and meshes without a dense step.
      path: The picture; its suffix says the format.

    Raises:
      ValueError: If no row has a prediction.
    """
    panels: dict[tuple, list[dict]] = {}
    unrolled = {(row["device"], row["model"], row["mesh"]) for row in rows}
    for row, dense in above_dense(rows):
        twin = row["device"], row["model"].removesuffix("-scan"), row["mesh"]
        alone = twin[1] == row["model"] or twin not in unrolled
        if dense is not None and alone and row["parameters"] >= DRAWN_FROM:
            panels.setdefault((row["device"], row["model"], row["mesh"]), []).append(row)
    if not panels:
        raise ValueError(
            f"got no row of {DRAWN_FROM:,} parameters with a prediction and its dense step, need "
            "one; write python -m benchmarks.accelerators --methods dense q4"
        )
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * lines))
    figure.set_layout_engine("constrained")
    for number, (place, own) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, number)
        axes.set_title("{}, {}, {} devices".format(*place))
        _panel(axes, [row for row in own if row["method"] in DRAWN])
    figure.savefig(path, dpi=100)


def _panel(axes, rows: list[dict]) -> None:
    """A curve for each method, named at its start, where curves are apart."""
    rates = list(RATES.values())
    first = {row["method"]: row["predicted"][next(iter(RATES))] for row in rows}
    places = _apart(first)
    for row in rows:
        method = row["method"]
        color = COLORS[DRAWN.index(method) % len(COLORS)]
        seconds = [row["predicted"][rate] for rate in RATES]
        style = "--" if method == "dense" else "-"
        axes.loglog(rates, seconds, style, color=color, marker=".")
        at = (rates[0] / 1.15, places[method])
        axes.text(*at, method, color=color, fontsize=8, ha="right", va="center")
    axes.set_xlim(rates[0] / 8, rates[-1] * 1.3)
    axes.set_xlabel("bit/s of a host")
    axes.set_ylabel("predicted step (s)")
    axes.grid(alpha=0.25)


def _apart(values: dict[str, float], least: float = 1.35) -> dict[str, float]:
    """Places on a logarithmic axis near the values, each that many times the one below it."""
    places: dict[str, float] = {}
    below = 0.0
    for name in sorted(values, key=lambda name: values[name]):
        below = places[name] = max(values[name], least * below)
    return places


def main() -> None:
    """Reads a file's rows and draws them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    options = parser.parse_args()
    draw(json.loads(options.json.read_text()), options.picture)


if __name__ == "__main__":
    main()
