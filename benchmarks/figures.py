"""`python -m benchmarks.figures`: the convergence rows as a picture and as a table."""

import argparse
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from train.output.plots import COLORS, label_ends, label_log


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
        "| method | learning rate | bits | MB/step | validation loss | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for s in summaries:
        spread = f" ({min(s.losses):.3f} to {max(s.losses):.3f})" if len(s.losses) > 1 else ""
        lines.append(
            f"| {s.method} | {s.learning_rate:g} | {s.bits_per_parameter:.3g} "
            f"| {s.sent_bytes_per_step / 1e6:.3g} "
            f"| {statistics.fmean(s.losses):.3f}{spread} | {len(s.losses)} |"
        )
    return "\n".join(lines)


# The curves of a picture, which eight colours tell apart; the tables have all methods.
SHOWN = (
    "dense Adam",
    "sharded Adam, G4D4",
    "0/1 Adam, warm-up, variances of 8 bits",
    "1-bit Adam, 250 dense steps",
    "CocktailSGD, no delay, 10x",
    "CocktailSGD, no delay, 88x",
    "CocktailSGD, signs of an eighth",
    "top_k Adam",
)


def draw(summaries: list[Summary], path: pathlib.Path, shown: Sequence[str] = SHOWN) -> None:
    """Validation loss against steps and against bytes, a band from the best to the worst seed.

    Args:
      summaries: Summaries of one task, the baseline first.
      path: Path of the picture.
      shown: The methods that are drawn where there are more than eight.
    """
    all_names = [summary.method for summary in summaries]
    few = all_names[: len(COLORS)]
    names = few if few == all_names else [name for name in shown if name in all_names] or few
    summaries = [summary for summary in summaries if summary.method in names]
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    sent = []
    for summary, color in zip(summaries, COLORS, strict=False):
        # Step 0 has sent nothing: a logarithmic axis has no place for it.
        points = [[point for point in curve if point[0]] for curve in summary.curves]
        steps = [point[0] for point in points[0]]
        values = list(zip(*[[p[1] for p in curve] for curve in points], strict=True))
        sent.append([step * summary.sent_bytes_per_step for step in steps])
        for axes, x in ((by_step, steps), (by_bytes, sent[-1])):
            middle = [statistics.fmean(v) for v in values]
            axes.plot(x, middle, color=color, label=summary.method, marker=".", linewidth=1.8)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    losses = [loss for s in summaries for loss in s.losses]
    highest = max(point[1] for s in summaries for curve in s.curves for point in curve if point[0])
    by_step.set_ylim(min(losses) - 0.05, min(min(losses) + 1.2, highest + 0.05))
    by_step.set_xlabel("optimizer steps")
    by_step.set_ylabel("validation loss (nats per byte)")
    by_bytes.set_xlabel("sent by one replica (logarithmic)")
    label_log(by_bytes, "x", np.concatenate(sent), EngFormatter("B"))
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title(summaries))
    label_ends(by_step)
    figure.savefig(path, dpi=120)


def title(summaries: list[Summary]) -> str:
    """The title: the baseline's loss, and the lowest loss with a tenth of its bytes or less."""
    dense = summaries[0]
    fewer = lambda s: dense.sent_bytes_per_step / s.sent_bytes_per_step
    few = [s for s in summaries if s.sent_bytes_per_step and fewer(s) >= 10]
    text = f"{dense.method} ends at {statistics.fmean(dense.losses):.3g}"
    if few:
        best = min(few, key=lambda s: statistics.fmean(s.losses))
        loss = statistics.fmean(best.losses)
        text += f"; {best.method} at {loss:.3g} with {fewer(best):.3g} times fewer bytes"
    return text


def main() -> None:
    """Reads the rows, prints the table, and draws the plot into their folder."""
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
