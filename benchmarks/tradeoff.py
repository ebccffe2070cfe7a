"""Plots the last loss of each method against the bits that it sends.

python -m benchmarks.tradeoff [--task nano] [--steps 1000]
"""

import argparse
import json
import pathlib
import statistics

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.figures import Summary, summarize
from train.output.plots import COLORS, label_ends, label_log

RESULTS = pathlib.Path(__file__).parent / "results"


def mean(summary: Summary) -> float:
    """The mean last loss over seeds."""
    return statistics.fmean(summary.losses)


def front(summaries: list[Summary]) -> list[Summary]:
    """The Pareto front, from the fewest bits on."""
    best: list[Summary] = []
    for summary in sorted(summaries, key=lambda s: (s.bits_per_parameter, mean(s))):
        if not best or mean(summary) < mean(best[-1]):
            best.append(summary)
    return best


def finding(summaries: list[Summary]) -> str:
    """The title: the method with the fewest bits at the baseline's loss, or the closest one."""
    dense, *others = summaries
    equal = [s for s in others if mean(s) <= max(dense.losses)]
    least = min(equal or others, key=lambda s: s.bits_per_parameter)
    fewer = dense.bits_per_parameter / least.bits_per_parameter
    loss = f"as {dense.method}" if equal else f"{mean(least):.2f}, {dense.method} {mean(dense):.2f}"
    return f"{least.method}: {fewer:.3g} times fewer bits, loss {loss}"


def points(axes: Axes, summaries: list[Summary], named: list[str]) -> None:
    """Draws a point for each method, at the mean of its seeds, with a bar from best to worst.

    Args:
      axes: Where to draw.
      summaries: Summaries of one task, the baseline first; its range of seeds is shaded.
      named: The methods, eight at most, that get a colour and a name; others are small dots.
    """
    first = summaries[0].losses
    axes.axhspan(min(first), max(first), color=COLORS[0], alpha=0.2, linewidth=0)
    color_of = dict(zip(named, COLORS, strict=False))
    best = front(summaries)
    corners = [s.bits_per_parameter for s in best], [mean(s) for s in best]
    axes.step(*corners, where="post", color="#000000", linewidth=0.8, linestyle=":", zorder=1)
    for summary in summaries:
        bits, middle = summary.bits_per_parameter, mean(summary)
        color = color_of.get(summary.method)
        label = summary.method if color else None
        style = {"marker": "o", "markersize": 8 if color else 3, "linestyle": ""}
        axes.plot(bits, middle, color=color or "#BBBBBB", label=label, **style)
        if color:
            axes.vlines(bits, min(summary.losses), max(summary.losses), color, linewidth=1.5)
    label_log(
        axes,
        "x",
        np.array([s.bits_per_parameter for s in summaries]),
        FuncFormatter(lambda bits, _: f"{bits:g}"),
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw(summaries: list[Summary], most: float, path: pathlib.Path) -> None:
    """Draws `points`, with names for the baseline and the front.

    Args:
      summaries: Summaries of one task, the baseline first.
      most: Loss above which methods are left out.
      path: Path of the picture.
    """
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    shown = [summaries[0], *(s for s in summaries[1:] if mean(s) <= most)]
    best = [s.method for s in front(shown) if s is not shown[0]]
    points(axes, shown, [shown[0].method, *best[-7:]])
    axes.set_xlabel("bits sent per parameter, step and direction (logarithmic)")
    axes.set_ylabel("last validation loss (nats per byte)")
    axes.set_title(finding(shown) if len(shown) > 1 else shown[0].method)
    figure.supxlabel(
        "grey band and bars: all seeds; dotted: no method has less loss with as few bits",
        fontsize=9,
    )
    label_ends(axes)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Reads the rows and plots them in `results/tradeoff_TASK.png`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS / "convergence.json")
    parser.add_argument("--task", default="nano")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--most", type=float, default=1.6, help="greatest loss shown")
    args = parser.parse_args()
    summaries = summarize(json.loads(args.json.read_text()), args.task, args.steps)
    picture = args.json.with_name(f"tradeoff_{args.task}.png")
    draw(summaries, args.most, picture)
    print(picture)


if __name__ == "__main__":
    main()
