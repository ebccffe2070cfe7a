"""The rows of `benchmarks.convergence` and `benchmarks.scale` as pictures, and as a table.

    python -m benchmarks.figures [--task nano_fine_tune --steps 3000]
    python -m benchmarks.figures tradeoff [--task pico --steps 8000 --json FILE]
    python -m benchmarks.figures ablation --of slamb            # large batches of digits
    python -m benchmarks.figures ablation --of zero_one_adam    # fine-tuning; cocktail_sgd, qsdp
    python -m benchmarks.figures overview

Curves are losses against steps and bytes, a trade-off last losses against bits. An ablation has a
panel for each parameter of a method. Seeds agree in fine-tuning; after 300 steps from scratch they
do not (the loss at 8 bits was 0.35 above that at 4). `overview` is the README's picture.
"""

import argparse
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter

from benchmarks import slow_network_figure
from benchmarks.rows import RESULTS, markdown, read
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
    lines = []
    for s in summaries:
        spread = f" ({min(s.losses):.3f} to {max(s.losses):.3f})" if len(s.losses) > 1 else ""
        rate, bits = f"{s.learning_rate:g}", f"{s.bits_per_parameter:.3g}"
        megabytes, loss = f"{s.sent_bytes_per_step / 1e6:.3g}", f"{mean(s):.3f}{spread}"
        lines.append([s.method, rate, bits, megabytes, loss, len(s.losses)])
    head = ["method", "learning rate", "bits", "MB/step", "validation loss", "seeds"]
    return markdown(head, lines)


# The curves of a picture, which eight colours tell apart; the tables have all methods.
SHOWN = (
    "dense Adam",
    "sharded Adam, G4D4",
    "0/1 Adam, warm-up, variances of 8 bits",
    "1-bit Adam, 250 dense steps",
    "CocktailSGD, no delay, 10x",
    "CocktailSGD, no delay, 88x",
    "CocktailSGD, 1 bit of 1/8",
    "top_k Adam",
)
SHOWN_OF_MICRO = (
    *("dense Adam", "4 bits", "0/1 Adam", "dense Muon", "MuLoCo"),
    "SLAMB, mean variance, 8 bits",
    *("CocktailSGD, no delay, 88x, rare rows", "CocktailSGD, no delay, 88x, Muon"),
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
    by_step.set_ylabel("validation loss (nats)")
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
    text = f"{dense.method} ends at {mean(dense):.3g}"
    if few:
        best = min(few, key=mean)
        text += f"; {best.method} at {mean(best):.3g} with {fewer(best):.3g} times fewer bytes"
    return text


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
    """The title: the method with the fewest bits at the baseline's loss, or with the fewest.

    Beside Muon the baseline is dense Muon: the loss of Adam is easy to reach.
    """
    dense, *others = summaries
    equal = [s for s in others if mean(s) <= max(dense.losses)]
    least = min(equal or others, key=lambda s: s.bits_per_parameter)
    fewer = dense.bits_per_parameter / least.bits_per_parameter
    muon = [s for s in others if s.method == "dense Muon" and "Muon" in least.method]
    (own,) = muon or [dense]
    both = f"{mean(least):.2f}, {own.method} {mean(own):.2f}"
    loss = f"as {own.method}" if mean(least) <= max(own.losses) else both
    return f"{least.method}: {fewer:.3g} times fewer bits, loss {loss}"


def points(axes: Axes, summaries: list[Summary], named: list[str]) -> None:
    """Draws a point for each named method, at the mean of its seeds, with a bar from best to worst.

    Args:
      axes: Where to draw.
      summaries: Summaries of one task, the baseline first; its range of seeds is shaded.
      named: The methods to draw, eight at most.
    """
    first = summaries[0].losses
    axes.axhspan(min(first), max(first), color=COLORS[0], alpha=0.2, linewidth=0)
    color_of = dict(zip(named, COLORS, strict=False))
    summaries = [summary for summary in summaries if summary.method in color_of]
    for summary in summaries:
        bits, color = summary.bits_per_parameter, color_of[summary.method]
        style = {"marker": "o", "markersize": 8, "linestyle": "", "label": summary.method}
        axes.plot(bits, mean(summary), color=color, **style)
        axes.vlines(bits, min(summary.losses), max(summary.losses), color, linewidth=1.5)
    label_log(
        axes,
        "x",
        np.array([s.bits_per_parameter for s in summaries]),
        FuncFormatter(lambda bits, _: f"{bits:g}"),
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_tradeoff(summaries: list[Summary], most: float, path: pathlib.Path) -> None:
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
        "methods that no other beats in both loss and bits; grey band and bars: all seeds",
        fontsize=9,
    )
    label_ends(axes)
    figure.savefig(path, dpi=120)


class Ablation(NamedTuple):
    """The panels of one plot."""

    task: str
    steps: int  # of the runs
    dense: str  # the baseline method
    # parameter -> its value -> the method in benchmarks/methods.py
    panels: dict[str, dict[str, str]]


ABLATIONS = {
    "slamb": Ablation(
        "digits",
        400,
        "LAMB",
        {
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
            "form": {
                "quadratic": "SLAMB",
                "linear": "SLAMB, linear",
                "masked": "SLAMB, masked",
                "8 bits": "SLAMB, 8 bits",
            },
        },
    ),
    "zero_one_adam": Ablation(
        "nano_fine_tune",
        300,
        "dense Adam",
        {
            "steps between rounds, H (kappa 16)": {
                str(h): f"0/1 Adam, H {h}, kappa 16" for h in (1, 4, 16, 64)
            },
            "kappa of the variance (H 4)": {
                str(k): f"0/1 Adam, H 4, kappa {k}" for k in (1, 4, 16, 64)
            },
        },
    ),
    "cocktail_sgd": Ablation(
        "nano_fine_tune",
        300,
        "dense Adam",
        {
            "stage alone, at about the bytes of all three": {
                "random": "CocktailSGD, random only",
                "top-K": "CocktailSGD, top-K only",
                "quantization": "CocktailSGD, quantization only",
                "all three": "CocktailSGD",
                "groups": "CocktailSGD, 1/10, groups of 4",
                "1 of 64": "CocktailSGD, 1 bit of the largest of 64",
                "1 bit of 1/8": "CocktailSGD, 1 bit of 1/8",
            },
            "times fewer bytes than float16": {
                "1/2": "CocktailSGD, no compression",
                "10": "CocktailSGD, 10x",
                "32": "CocktailSGD, 32x",
                "88": "CocktailSGD",
                "140": "CocktailSGD, 140x",
                "281": "CocktailSGD, 281x",
            },
        },
    ),
    "qsdp": Ablation(
        "nano_fine_tune",
        300,
        "dense Adam",
        {
            "bits of weights, uniform": {str(b): f"QSDP W{b}G8" for b in (8, 6, 5, 4, 3)},
            "bits of weights, learned": {str(b): f"QSDP W{b}G8, learned" for b in (6, 5, 4, 3)},
            "weights of 4 bits": {
                "uniform": "QSDP W4G8",
                "rotated": "QSDP W4G8, rotated",
                "learned": "QSDP W4G8, learned",
                "both": "QSDP W4G8, rotated, learned",
                "blocks\nof 32": "QSDP W4G8, blocks of 32",
                "these,\nrotated": "QSDP W4G8, rotated, blocks of 32",
            },
            "bits of gradients, weights of 8": {
                "8": "QSDP W8G8",
                "6": "QSDP W8G6",
                "4": "QSDP W8G4",
                "4,\nlearned": "QSDP W8G4, learned",
                "4,\nrotated": "QSDP W8G4, rotated",
            },
            "bits of differences, gradients of 4": {
                str(b): f"sharded Adam, G4D{b}" for b in (8, 4, 2, 1)
            },
            "4 bits, both": {
                "uniform": "QSDP W4G4",
                "learned": "QSDP W4G4, learned",
                "rotated,\nlearned": "QSDP W4G4, rotated, learned",
                "differences": "sharded Adam, G4D4",
            },
        },
    ),
}


def draw_ablation(summaries: list[Summary], ablation: Ablation, path: pathlib.Path) -> None:
    """The last loss of every seed as a point, their mean as a line, bytes under the values.

    The dense method's mean is the dashed line.
    """
    by_method = {summary.method: summary for summary in summaries}
    count = len(ablation.panels)
    rows = -(-count // 3)
    figure = Figure(figsize=(14, 3.8 * rows))
    grid = figure.subplots(rows, -(-count // rows), sharey=True, squeeze=False)
    panels = grid.flat[:count]
    for axes, (quantity, methods) in zip(panels, ablation.panels.items(), strict=True):
        if ablation.dense in by_method:
            dense = mean(by_method[ablation.dense])
            axes.axhline(dense, color="C7", linestyle="--", linewidth=1)
        shown = {v: by_method[name] for v, name in methods.items() if name in by_method}
        for place, summary in enumerate(shown.values()):
            axes.plot([place] * len(summary.losses), summary.losses, "o", color="C0", alpha=0.6)
        axes.plot(list(map(mean, shown.values())), "-", color="C0", linewidth=1)
        labels = [f"{v}\n{s.sent_bytes_per_step / 1e3:,.0f}" for v, s in shown.items()]
        axes.set_xticks(range(len(shown)), labels)
        axes.set_xlabel(quantity)
        axes.grid(alpha=0.3)
    panels[0].set_yscale("log")
    plain = FuncFormatter(lambda loss, _: f"{loss:g}")
    panels[0].yaxis.set_major_formatter(plain)
    panels[0].yaxis.set_minor_formatter(plain)
    panels[0].set_ylabel("validation loss")
    for axes in grid.flat[count:]:
        axes.axis("off")
    about = f"{ablation.task}, {ablation.steps:,} steps: each point is a seed, lines are means"
    figure.suptitle(f"{about}, dashed: {ablation.dense}. Under each value: kB a step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# Name on the plot -> method of `slow_network.json`, and of `micro.json`: the first ones are of one
# kind and have one colour in both panels. "4 bits" is the README's own loop.
OVERVIEW_TIMES = {
    "dense": "dense float32",
    "4 bits": "4 bits",
    "0/1 Adam, every 4th": "0/1 Adam, every 4th",
    "CocktailSGD": "CocktailSGD",
}
OVERVIEW_LOSSES = {
    "dense Adam": "dense Adam",
    "4 bits": "4 bits",
    "0/1 Adam": "0/1 Adam",
    "CocktailSGD, Muon": "CocktailSGD, no delay, 88x, Muon",
    "MuLoCo": "MuLoCo",
    "dense Muon": "dense Muon",
}


def draw_overview(path: pathlib.Path, narrow: bool) -> None:
    """Draws both panels: seconds a step against the rate, and loss against bits.

    Args:
      path: Path of the picture.
      narrow: Whether one panel is above the other, for narrow screens.
    """
    shape, size = ((2, 1), (5, 8)) if narrow else ((1, 2), (12, 4.4))
    figure = Figure(figsize=size, layout="constrained")
    time, loss = figure.subplots(*shape)
    short = {name: label for label, name in OVERVIEW_TIMES.items()}
    rows = [
        row | {"method": short.get(row["method"], "")}
        for row in read(RESULTS / "slow_network.json")
    ]
    slow_network_figure.lines(time, rows, list(OVERVIEW_TIMES))
    time.set_title("Seconds a step, on four hosts")
    time.set_xlabel("rate of every link")
    label_ends(time)

    short = {name: label for label, name in OVERVIEW_LOSSES.items()}
    summaries = summarize(read(RESULTS / "micro.json"), "micro", 2000)
    summaries = [s._replace(method=short[s.method]) for s in summaries if s.method in short]
    points(loss, summaries, list(OVERVIEW_LOSSES))
    loss.set_title("Loss against bits, with a vocabulary of 8,192")
    loss.set_xlabel("bits per parameter, step and direction")
    loss.set_ylabel("validation loss (nats per token)")
    label_ends(loss)
    figure.savefig(path, dpi=150)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    kinds = ("curves", "tradeoff", "ablation", "overview")
    parser.add_argument("kind", nargs="?", default="curves", choices=kinds)
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS / "convergence.json")
    parser.add_argument("--task", default="nano")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--most", type=float, default=1.6, help="tradeoff: greatest loss shown")
    parser.add_argument("--of", default="slamb", choices=ABLATIONS, help="ablation: which")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the rows, prints the table of curves, and draws the picture into their folder."""
    args = parsed(argv)
    if args.kind == "overview":
        for suffix, narrow in (("", False), ("_narrow", True)):
            draw_overview(RESULTS / f"overview{suffix}.png", narrow)
        return
    rows = read(args.json)
    if args.kind == "ablation":
        ablation, picture = ABLATIONS[args.of], args.json.with_name(f"ablation_{args.of}.png")
        draw_ablation(summarize(rows, ablation.task, ablation.steps), ablation, picture)
    elif args.kind == "tradeoff":
        picture = args.json.with_name(f"tradeoff_{args.task}.png")
        draw_tradeoff(summarize(rows, args.task, args.steps), args.most, picture)
    else:
        suffix = "" if args.task == "nano" else f"_{args.task}"
        picture = args.json.with_name(f"{args.json.stem}{suffix}.png")
        summaries = summarize(rows, args.task, args.steps)
        draw(summaries, picture, SHOWN_OF_MICRO if args.task == "micro" else SHOWN)
        print(f"{table(summaries)}\n")
    print(picture)


if __name__ == "__main__":
    main()
