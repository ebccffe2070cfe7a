"""Plots what compression costs against the size of the model.

python -m benchmarks.scale_figure --runs pico:8000 micro:1000 34m_linux:2240
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.scale_methods import METHODS, baseline_of
from benchmarks.scale_table import loss_at
from train.output.plots import COLORS, label_ends, label_log

RESULTS = pathlib.Path(__file__).parent / "results"
NAMES = (
    *("4 bits", "CocktailSGD, no delay, 88x", "0/1 Adam"),
    *("DiLoCo, 4 bits", "DiLoCo, 4 bits, every 32nd", "MuLoCo"),
)


def costs(rows: list[dict], task: str, steps: int) -> dict[str, tuple[float, float]]:
    """Parameters, and loss above the method's dense baseline on the same seeds, by method."""
    rows = [row for row in rows if (row["task"], row["steps"]) == (task, steps)]
    runs: dict[str, list[dict]] = {}
    for row in rows:
        runs.setdefault(row["method"], []).append(row)
    found = {}
    for name, same in runs.items():
        beside = runs.get(same[0].get("baseline") or baseline_of(METHODS[name]), [])
        dense = {row["seed"]: row for row in beside}
        pairs = [
            (row["val_loss"], loss_at(dense[row["seed"]], row.get("stopped_at", steps)))
            for row in same
            if row["seed"] in dense
        ]
        if pairs and name not in (row["method"] for row in beside):
            above = [float("inf") if loss is None else loss - least for loss, least in pairs]
            found[name] = (parameters(same[0]), statistics.fmean(above))
    return found


def parameters(row: dict) -> float:
    """Parameters of a row's model; older rows tell them by their bytes."""
    ring = 2 * (row["replicas"] - 1) / row["replicas"]
    if "parameters" in row:
        return row["parameters"]
    return row["sent_bytes_per_step"] * 8 / row["bits_per_parameter"] / ring


def draw(found: Iterable[dict[str, tuple[float, float]]], path: pathlib.Path) -> None:
    """Draws a line for each of `NAMES`, from the smallest size to the largest."""
    found = list(found)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color=COLORS[0], linewidth=1.5)
    for name, color in zip(NAMES, COLORS[1:], strict=False):
        points = sorted(costs[name] for costs in found if name in costs)
        if points:
            sizes, above = np.array(points).T
            style = {"color": color, "label": name, "marker": "o"}
            axes.plot(sizes, above, **style)
    sizes = np.array([size for costs in found for size, _ in costs.values()])
    label_log(axes, "x", sizes, EngFormatter())
    axes.set_xlabel("parameters (logarithmic)")
    axes.set_ylabel("validation loss above dense training\nwith the same inner optimizer (nats)")
    axes.set_title("What compression costs, by size")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Reads the rows of some sizes, and draws `results/scale.png`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", nargs="+", required=True, metavar="SIZE:STEPS")
    found = []
    for run in parser.parse_args().runs:
        name, _, steps = run.partition(":")
        rows = json.loads((RESULTS / f"{name}.json").read_text())
        found.append(costs(rows, name, int(steps)))
    draw(found, RESULTS / "scale.png")


if __name__ == "__main__":
    main()
