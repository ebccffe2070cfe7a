"""`python -m benchmarks.figures`: the convergence rows as a picture and as a table."""

import argparse
import json
import pathlib
import statistics
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class Summary(NamedTuple):
    """One method at its best learning rate."""

    method: str
    learning_rate: float
    losses: list[float]  # final validation losses, one a seed
    bits_per_parameter: float
    sent_bytes_per_step: float
    curves: list[list[list[float]]]  # one a seed, of [step, validation loss]


def summarize(rows: list[dict], task: str, steps: int) -> list[Summary]:
    """Picks each method's rate, in the order in which methods first appear.

    Of the rates that most seeds were run at, the one of the lowest mean.
    """
    runs: dict[str, dict[float, list[dict]]] = {}
    for row in rows:
        # A run that went to NaN has no loss.
        if (row["task"], row["steps"]) == (task, steps) and row["val_loss"] is not None:
            runs.setdefault(row["method"], {}).setdefault(row["learning_rate"], []).append(row)
    mean = lambda same: statistics.fmean(row["val_loss"] for row in same)
    summaries = []
    for method, by_rate in runs.items():
        same = min(by_rate.values(), key=lambda same: (-len(same), mean(same)))
        summaries.append(
            Summary(
                method,
                same[0]["learning_rate"],
                [row["val_loss"] for row in same],
                same[0]["bits_per_parameter"],
                same[0]["sent_bytes_per_step"],
                [row["curve"] for row in same],
            )
        )
    return summaries


def table(summaries: list[Summary]) -> str:
    """The methods as a Markdown table; bits are per parameter and direction of an all-reduce."""
    lines = [
        "| method | rate | bits/parameter | bytes/step | validation loss | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for s in summaries:
        spread = f" ({min(s.losses):.4f} to {max(s.losses):.4f})" if len(s.losses) > 1 else ""
        lines.append(
            f"| {s.method} | {s.learning_rate:g} | {s.bits_per_parameter:.2f} "
            f"| {s.sent_bytes_per_step:,.0f} "
            f"| {statistics.fmean(s.losses):.4f}{spread} | {len(s.losses)} |"
        )
    return "\n".join(lines)


def draw(summaries: list[Summary], path: pathlib.Path) -> None:
    """Validation loss against steps and against bytes, a band from the best to the worst seed."""
    columns = -(-len(summaries) // 25)  # of the legend
    figure = plt.figure(figsize=(11 + 3 * columns, 4.5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    colors = plt.get_cmap("tab20").colors
    for number, summary in enumerate(summaries):
        color = colors[number % len(colors)]
        again = ("-", ":", "-.")[number // len(colors) % 3]  # the same color for another method
        style = "--" if "momentum" in summary.method else again
        # Step 0 has sent nothing: a logarithmic axis has no place for it.
        steps = [point[0] for point in summary.curves[0][1:]]
        values = list(zip(*[[p[1] for p in curve[1:]] for curve in summary.curves], strict=True))
        middle = [statistics.fmean(v) for v in values]
        for axes, x in (
            (by_step, steps),
            (by_bytes, [step * summary.sent_bytes_per_step / 1e6 for step in steps]),
        ):
            axes.plot(x, middle, style, color=color, label=summary.method, linewidth=1.8)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    losses = [loss for s in summaries for loss in s.losses]
    highest = max(point[1] for s in summaries for curve in s.curves for point in curve[1:])
    by_step.set_ylim(min(losses) - 0.05, min(min(losses) + 2, 3.5, highest + 0.05))
    by_step.set_xlabel("optimizer steps")
    by_step.set_ylabel("validation loss (nats per byte)")
    by_bytes.set_xlabel("sent by one replica (MB)")
    by_bytes.set_xscale("log")
    handles, names = by_step.get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, loc="outside right upper", ncols=columns)
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Reads the rows, prints the table, draws the picture beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/convergence.json")
    )
    parser.add_argument("--task", default="nano")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    summaries = summarize(json.loads(args.json.read_text()), args.task, args.steps)
    suffix = "" if args.task == "nano" else f"_{args.task}"
    picture = args.json.with_name(f"{args.json.stem}{suffix}.png")
    draw(summaries, picture)
    print(f"{table(summaries)}\n\n{picture}")


if __name__ == "__main__":
    main()
