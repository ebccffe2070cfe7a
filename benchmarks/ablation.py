"""Plots the effect of a method's parameters on its loss, from the rows of benchmarks.convergence.

    python -m benchmarks.ablation --of slamb            # large batches of digits
    python -m benchmarks.ablation --of zero_one_adam    # fine-tuning
    python -m benchmarks.ablation --of cocktail_sgd     # fine-tuning
    python -m benchmarks.ablation --of qsdp             # fine-tuning

The plot is in the folder of the rows, with a panel for each parameter. Seeds agree in fine-tuning;
after 300 steps from scratch they do not (the loss at 8 bits was 0.35 above that at 4).
"""

import argparse
import json
import pathlib
import statistics
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from benchmarks.figures import Summary, summarize


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
                "groups": "CocktailSGD, a tenth, groups of 4",
                "1 of 64": "CocktailSGD, signs of the largest of 64",
                "1 bit of 1/8": "CocktailSGD, signs of an eighth",
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


def draw(summaries: list[Summary], ablation: Ablation, path: pathlib.Path) -> None:
    """The last loss of every seed as a point, their mean as a line, bytes under the values.

    The dense method's mean is the dashed line.
    """
    by_method = {summary.method: summary for summary in summaries}
    count = len(ablation.panels)
    rows = -(-count // 3)
    size = {"figsize": (14, 3.8 * rows), "sharey": True, "squeeze": False}
    figure, grid = plt.subplots(rows, -(-count // rows), **size)
    panels = grid.flat[:count]
    for axes, (quantity, methods) in zip(panels, ablation.panels.items(), strict=True):
        if ablation.dense in by_method:
            dense = statistics.fmean(by_method[ablation.dense].losses)
            axes.axhline(dense, color="C7", linestyle="--", linewidth=1)
        shown = {v: by_method[name] for v, name in methods.items() if name in by_method}
        for place, summary in enumerate(shown.values()):
            axes.plot([place] * len(summary.losses), summary.losses, "o", color="C0", alpha=0.6)
        means = [statistics.fmean(summary.losses) for summary in shown.values()]
        axes.plot(means, "-", color="C0", linewidth=1)
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
    figure.suptitle("under each value: kB a step", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Reads the rows and draws the plot into their folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/convergence.json")
    )
    parser.add_argument("--of", default="slamb", choices=ABLATIONS)
    args = parser.parse_args()
    ablation = ABLATIONS[args.of]
    summaries = summarize(json.loads(args.json.read_text()), ablation.task, ablation.steps)
    picture = args.json.with_name(f"ablation_{args.of}.png")
    draw(summaries, ablation, picture)
    print(picture)


if __name__ == "__main__":
    main()
