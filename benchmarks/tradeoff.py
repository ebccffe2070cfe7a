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
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    first = summaries[0].losses
    axes.axhspan(min(first), max(first), color="#999999", alpha=0.3, linewidth=0)
    mean = lambda summary: statistics.fmean(summary.losses)
    shown = sorted((s for s in summaries if mean(s) <= most), key=mean)
    for place, summary in enumerate(shown):
        loss = mean(summary)
        color = "#000000" if summary is summaries[0] else "#0072B2"
        # Names of neighbours stand on different sides, and none beyond the edge.
        side = -1 if place % 2 or summary.bits_per_parameter > 16 else 1
        axes.vlines(summary.bits_per_parameter, min(summary.losses), max(summary.losses), color)
        axes.plot(summary.bits_per_parameter, loss, "o", color=color, markersize=5)
        axes.annotate(
            f"{summary.method} ({len(summary.losses)})",
            (summary.bits_per_parameter, loss),
            xytext=(6 * side, 3),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            fontsize=8,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlim(left=min(summary.bits_per_parameter for summary in shown) / 6)  # names' place
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
