"""Draws the last loss of each method against the bits that it sends.

python -m benchmarks.tradeoff [--task nano] [--steps 1000]
"""

import argparse
import json
import pathlib
import statistics

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.figures import Summary, summarize


def draw(summaries: list[Summary], most: float, path: pathlib.Path) -> None:
    """Draws a point a method, at the mean of its seeds, with a line from the best to the worst.

    Args:
      summaries: Of one task; the first one's range of seeds is shaded.
      most: Loss above which methods are left out.
      path: Of the picture.
    """
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    first = summaries[0].losses
    axes.axhspan(min(first), max(first), color="#999999", alpha=0.3, linewidth=0)
    mean = lambda summary: statistics.fmean(summary.losses)
    shown = sorted((s for s in summaries if mean(s) <= most), key=mean)
    for number, summary in enumerate(shown, 1):
        color = "#000000" if summary is summaries[0] else "#0072B2"
        bits, name = summary.bits_per_parameter, f"{summary.method} ({len(summary.losses)})"
        axes.vlines(bits, min(summary.losses), max(summary.losses), color, alpha=0.4)
        # Names beside points would cover each other: a number is the point, and explained.
        mark = {"marker": f"${number}$", "markersize": 3 + 4 * len(str(number)), "linestyle": ""}
        axes.plot(bits, mean(summary), color=color, label=name, **mark)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda bits, _: f"{bits:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("bits sent per parameter, step and direction (logarithmic)")
    axes.set_ylabel("last validation loss (nats per byte)")
    axes.set_title(f"in brackets the number of seeds; grey: the seeds of {summaries[0].method}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Reads the rows and draws them into `results/tradeoff_TASK.png`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results = pathlib.Path(__file__).parent / "results"
    parser.add_argument("--json", type=pathlib.Path, default=results / "convergence.json")
    parser.add_argument("--task", default="nano")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--most", type=float, default=1.6, help="loss of the last one shown")
    args = parser.parse_args()
    summaries = summarize(json.loads(args.json.read_text()), args.task, args.steps)
    picture = args.json.with_name(f"tradeoff_{args.task}.png")
    draw(summaries, args.most, picture)
    print(picture)


if __name__ == "__main__":
    main()
