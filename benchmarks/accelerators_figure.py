"""The rows of benchmarks.accelerators as a table and as a picture.

python -m benchmarks.accelerators_figure FILE.json PICTURE.svg
"""

import argparse
import json
import pathlib

from matplotlib.figure import Figure

from benchmarks.accelerators_roofline import RATES
from train.output.plots import COLORS

_COLUMNS = ("device", "model", "mesh", "method")


def above_dense(rows: list[dict]) -> list[tuple[dict, dict | None]]:
    """Each row that was compiled, with the dense one of its device, model and mesh, if any."""
    whole = [row for row in rows if "moved_copies" in row]
    place = lambda row: (row["device"], row["model"], row["mesh"])
    dense = {place(row): row for row in whole if row["method"] == "dense"}
    return [(row, dense.get(place(row))) for row in whole]


def table(rows: list[dict]) -> str:
    """The rows as Markdown; what moves, runs and is held is what the dense step does not."""
    head = [*_COLUMNS, "moved, copies", "kernels", "temp, copies", "accessed, times dense"]
    head += ["loops of unknown length", "messages (async)", "of these in loops"]
    head += ["products beside", "MB a host sends", *(f"predicted at {rate}" for rate in RATES)]
    head += ["predicted, no network", "compiled in"]
    lines = [head, ["---"] * len(head)]
    lines += [_cells(row, dense) for row, dense in above_dense(rows)]
    lines += [_failed(row, len(head)) for row in rows if "error" in row]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    run = [row for row in rows if "measured" in row]
    return "\n\n".join([text, *([_measured(run)] if run else [])])


def measured_cell(found: dict) -> str:
    """What running a step has shown, in words."""
    if "error" in found:
        return f"not measured: {found['error']}"
    seconds, predicted = found["seconds"], found["predicted_seconds"]
    return f"measured {1e3 * seconds:.2f} ms, predicted {1e3 * predicted:.2f} ms"


def _measured(rows: list[dict]) -> str:
    """Steps that were run, of few tokens and over no slow link, beside their prediction."""
    lines = [["device", "model", "devices", "method", "a step"], ["---"] * 5]
    lines += [[*(row[name] for name in _COLUMNS), measured_cell(row["measured"])] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict, dense: dict | None) -> list[str]:
    compared = dense is not None and row is not dense
    first = dense if compared else None
    count = sum(kind["all"] for kind in row["messages"].values())
    free = sum(kind["async"] for kind in row["messages"].values())
    return [
        *(row[name] for name in _COLUMNS),
        _above(row["moved_copies"], first and first["moved_copies"], ".1f"),
        _above(row["kernels"], first and first["kernels"], ",d"),
        _above(row["memory"]["temp_copies"], first and first["memory"]["temp_copies"], ".1f"),
        _times(row["accessed_bytes"], first and first["accessed_bytes"]),
        f"{row['unknown_loops']}",
        f"{count} ({free})",
        f"{row['messages_inside']}",
        f"{row['products_beside']:.0%}",
        f"{row['nic_bytes'] / 1e6:,.2f}",
        *(f"{1e3 * row['predicted'][rate]:,.1f} ms" for rate in RATES),
        f"{1e3 * row['predicted']['unlimited']:,.1f} ms",
        f"{row['compile_seconds']:.0f} s",
    ]


def _above(value, dense, form: str) -> str:
    return format(value, form) if dense is None else f"{value - dense:+{form}}"


def _times(value, dense) -> str:
    return "" if not value or not dense else f"{value / dense:.2f}"


def _failed(row: dict, width: int) -> list[str]:
    told = row["error"].replace("|", "/").replace("\n", " ")
    cells = [*(row[name] for name in _COLUMNS), f"not compiled: {told}"]
    return cells + [""] * (width - len(cells))


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws the predicted step against a host's rate, a panel a device, model and mesh.

    Args:
      rows: Of `benchmarks.accelerators`; those with an error are left out.
      path: The picture; its suffix says the format.

    Raises:
      ValueError: If no row has a prediction.
    """
    panels: dict[tuple, list[dict]] = {}
    for row, _ in above_dense(rows):
        panels.setdefault((row["device"], row["model"], row["mesh"]), []).append(row)
    if not panels:
        raise ValueError(
            "got no row with a prediction, need one; write python -m benchmarks.accelerators"
        )
    figure = Figure(figsize=(4.6 * min(3, len(panels)), 3.6 * -(-len(panels) // 3)))
    figure.set_layout_engine("constrained")
    columns = min(3, len(panels))
    for number, (place, own) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(-(-len(panels) // columns), columns, number)
        for index, row in enumerate(own):
            style = {"color": COLORS[index % len(COLORS)], "marker": "osD^vP*"[index % 7]}
            seconds = [row["predicted"][rate] for rate in RATES]
            axes.loglog(list(RATES.values()), seconds, label=row["method"], **style)
        axes.set_title("{}, {}, {} devices".format(*place))
        axes.set_xlabel("bit/s of a host")
        axes.set_ylabel("predicted step (s)")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Reads a file's rows and draws them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    options = parser.parse_args()
    draw(json.loads(options.json.read_text()), options.picture)


if __name__ == "__main__":
    main()
