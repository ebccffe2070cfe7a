"""What compression costs against the size of the model, as a table and as a picture.

python -m benchmarks.scale_figure --runs pico:8000 micro:2000 3m:2000 34m_linux:2240
"""

import argparse
import pathlib
import statistics
from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from benchmarks.rows import RESULTS, markdown, read
from benchmarks.scale_sizes import METHODS, baseline_of
from train.output.plots import COLORS, label_ends, label_log

HEAD = ["method", "rate", "fewer bits", "loss", "dense, same inner optimizer", "seeds"]


def table(rows: list[dict], task: str, steps: int) -> str:
    """One line for each method and rate, in the order in which they first appear.

    A baseline's loss is the mean over those of the method's seeds that it has, at the same step: a
    run that was cut short is compared where it stopped. It is that of the same rate, where a
    baseline has it.

    Args:
      rows: Rows of one file.
      task: Whose rows.
      steps: Steps of these runs, a whole schedule.

    Returns:
      A Markdown table; "" without rows.
    """
    runs: dict[tuple[str, float], list[dict]] = {}
    for row in rows:
        if (row["task"], row["steps"]) == (task, steps):
            runs.setdefault((row["method"], row["learning_rate"]), []).append(row)
    lines = []
    for (_, rate), same in runs.items():
        name = same[0]["baseline"]
        of_any_rate = [
            row for (method, _), dense in runs.items() if method == name for row in dense
        ]
        lines.append(_line(same, runs.get((name, rate), of_any_rate)))
    return markdown(HEAD, lines) if lines else ""


def _line(same: list[dict], baseline: list[dict]) -> list:
    first, at = same[0], min(row.get("stopped_at", row["steps"]) for row in same)
    bits = first.get("bits_per_parameter")  # not counted yet on a GPU
    losses = [row["val_loss"] for row in same]
    seeds = [row["seed"] for row in same]
    dense = [loss_at(row, at) for row in baseline if row["seed"] in seeds]
    beside = "" if first["method"] == first["baseline"] else f"{first['baseline']}: {_mean(dense)}"
    stopped = f" at step {at:,}" if at < first["steps"] else ""
    rate = f"{first['learning_rate']:g}"
    fewer = f"{32 / bits:.3g}" if bits else "not counted"
    return [first["method"], rate, fewer, _mean(losses) + stopped, beside, len(seeds)]


def loss_at(row: dict, step: int) -> float | None:
    """The loss at a step, or at the last evaluation before it."""
    before = [loss for at, loss in row["curve"] if at <= step]
    return before[-1] if before else None


def _mean(losses: list[float | None]) -> str:
    if not losses:
        return "not measured"
    if None in losses:
        return "diverges"
    spread = f" ({min(losses):.2f} to {max(losses):.2f})" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.2f}{spread}"


NAMES = (
    *("4 bits", "CocktailSGD, no delay, 88x", "0/1 Adam"),
    *("CocktailSGD, no delay, 88x, rare rows", "DiLoCo, 4 bits"),
    *("DiLoCo, 4 bits, every 32nd", "MuLoCo"),
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
        rows = read(RESULTS / f"{name}.json")
        found.append(costs(rows, name, int(steps)))
    draw(found, RESULTS / "scale.png")


if __name__ == "__main__":
    main()
