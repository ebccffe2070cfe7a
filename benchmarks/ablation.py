"""`python -m benchmarks.ablation`: SLAMB's quantities, a panel each, from convergence's rows."""

import argparse
import json
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.figures import Summary, summarize

# Quantity -> its value -> the method of benchmarks/methods.py; "SLAMB" is in all of them.
PANELS = {
    "decay of the freshness, b3": {
        "0.9": "SLAMB, b3 0.9",
        "0.99": "SLAMB",
        "0.999": "SLAMB, b3 0.999",
        "1": "SLAMB, no rescaling",
    },
    "steps between parameter averages": {
        "5": "SLAMB, every 5",
        "25": "SLAMB",
        "100": "SLAMB, every 100",
    },
    "density": {
        "0.01": "SLAMB, density 0.01",
        "0.05": "SLAMB, density 0.05",
        "0.1": "SLAMB",
        "0.25": "SLAMB, density 0.25",
    },
    "form": {"quadratic": "SLAMB", "linear": "SLAMB, linear", "8 bits": "SLAMB, 8 bits"},
}


def draw(summaries: list[Summary], path: pathlib.Path) -> None:
    """The last loss of every seed as a point, their mean as a line, bytes under the values."""
    by_method = {summary.method: summary for summary in summaries}
    figure, panels = plt.subplots(1, len(PANELS), figsize=(14, 3.8), sharey=True)
    for axes, (quantity, methods) in zip(panels, PANELS.items(), strict=True):
        shown = {v: by_method[name] for v, name in methods.items() if name in by_method}
        for place, summary in enumerate(shown.values()):
            axes.plot([place] * len(summary.losses), summary.losses, "o", color="C0", alpha=0.6)
        means = [statistics.fmean(summary.losses) for summary in shown.values()]
        axes.plot(means, "-", color="C0", linewidth=1)
        labels = [f"{v}\n{s.sent_bytes_per_step / 1e3:,.0f} kB" for v, s in shown.items()]
        axes.set_xticks(range(len(shown)), labels)
        axes.set_xlabel(quantity)
        axes.grid(alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].set_ylabel("validation loss")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Reads the rows and draws the picture beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/convergence.json")
    )
    parser.add_argument("--task", default="digits")
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    summaries = summarize(json.loads(args.json.read_text()), args.task, args.steps)
    picture = args.json.with_name(f"ablation_{args.task}.png")
    draw(summaries, picture)
    print(picture)


if __name__ == "__main__":
    main()
