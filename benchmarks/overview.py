"""The README's plot and table, from the results' files.

    python -m benchmarks.overview

prints the table, and draws `results/overview.png` and `results/overview_narrow.png`.
"""

import json
import pathlib
import statistics
from typing import NamedTuple

from matplotlib.figure import Figure

from benchmarks import figures, slow_network_figure, tradeoff
from train.output.plots import label_ends

RESULTS = pathlib.Path(__file__).parent / "results"

# The methods of the plot, each with the same colour in both panels; six at most.
TIMES = {
    "dense": "dense float32",
    "4 bits": "sharded Adam, 4 bits",
    "0/1 Adam": "0/1 Adam, every 4th",
    "CocktailSGD": "CocktailSGD, signs of an eighth",
}
LOSSES = {
    "dense": "dense Adam",
    "4 bits": "sharded Adam, 4 bits",
    "0/1 Adam": "0/1 Adam",
    "CocktailSGD": "CocktailSGD, no delay, 88x",
    "Muon, every 16th": "DiLoCo, Muon, 2 bits",
    "Muon, every 106th": "DiLoCo, Muon, 2 bits, every 106th",
}


class Row(NamedTuple):
    """A row of the README's table: what you want, what to take, and the source of its figures."""

    want: str
    take: str
    file: str  # of the results
    task: str
    steps: int
    method: str
    beside: str = "dense Adam"  # dense training with the same inner optimizer


ROWS = (
    Row(
        "the loss of dense training, one line changed",
        "[`compressed_mean(quantize(8))`](docs/methods/compressed_mean.md)",
        *("convergence", "nano", 1000, "8-bit Adam"),
    ),
    Row(
        "the same with fewer bytes and less memory",
        "[`sharded_optimizer`](docs/methods/sharded_optimizer.md), 4 bits",
        *("convergence", "nano", 1000, "sharded Adam, G4D4"),
    ),
    Row(
        "pre-training with Adam, DeepSpeed's way",
        "[`zero_one_adam`](docs/methods/zero_one_adam.md)",
        *("convergence", "nano_bert", 3000, "0/1 Adam, warm-up, kappa 256"),
    ),
    Row(
        "fine-tuning over 100 Mbit/s",
        "[`cocktail_sgd`](docs/methods/cocktail_sgd.md), signs of an eighth",
        *("convergence", "nano_fine_tune", 3000, "CocktailSGD, signs of an eighth"),
    ),
    Row(
        "many thousand steps, an exchange every 16th",
        "[`local_steps`](docs/methods/local_steps.md), Muon inside, 2 bits",
        *("pico", "pico", 8000, "DiLoCo, Muon, 2 bits", "dense Muon"),
    ),
    Row(
        "the least bytes, an exchange every 106th step",
        "[`local_steps`](docs/methods/local_steps.md), Muon inside, 2 bits",
        *("pico", "pico", 8000, "DiLoCo, Muon, 2 bits, every 106th", "dense Muon"),
    ),
    Row(
        "large batches with LAMB",
        "[`slamb`](docs/methods/slamb.md)",
        *("convergence", "digits", 400, "SLAMB", "LAMB"),
    ),
)


def read(name: str) -> list[dict]:
    """The rows of one results' file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table() -> str:
    """The rows as Markdown: bytes saved and mean loss, each against its dense baseline."""
    lines = ["| you want | take | fewer bytes | loss (dense) | seeds |", "|---|---|---|---|---|"]
    for row in ROWS:
        summaries = figures.summarize(read(row.file), row.task, row.steps)
        found = {summary.method: summary for summary in summaries}
        dense, own = found[row.beside], found[row.method]
        fewer = dense.sent_bytes_per_step / own.sent_bytes_per_step
        mean = lambda summary: f"{statistics.fmean(summary.losses):#.3g}"
        loss = f"{mean(own)} ({mean(dense)})"
        factor = f"{fewer:.3g}" if fewer < 1000 else f"{fewer:,.0f}"
        lines.append(f"| {row.want} | {row.take} | {factor}x | {loss} | {len(own.losses)} |")
    return "\n".join(lines)


def draw(path: pathlib.Path, narrow: bool) -> None:
    """Draws both panels: seconds a step against the rate, and loss against bits.

    Args:
      path: Path of the picture.
      narrow: Whether one panel is above the other, for narrow screens.
    """
    shape, size = ((2, 1), (5, 8)) if narrow else ((1, 2), (12, 4.4))
    figure = Figure(figsize=size, layout="constrained")
    time, loss = figure.subplots(*shape)
    short = {name: label for label, name in TIMES.items()}
    rows = [row | {"method": short.get(row["method"], "")} for row in read("slow_network")]
    slow_network_figure.lines(time, rows, list(TIMES))
    time.set_title(slow_network_figure.finding([row for row in rows if row["method"]], "dense"))
    time.set_xlabel("rate of every link")
    label_ends(time)

    short = {name: label for label, name in LOSSES.items()}
    summaries = figures.summarize(read("pico"), "pico", 8000)
    summaries = [s._replace(method=short[s.method]) for s in summaries if s.method in short]
    tradeoff.points(loss, summaries, list(LOSSES))
    loss.set_title(tradeoff.finding(summaries))
    loss.set_xlabel("bits per parameter, step and direction")
    loss.set_ylabel("validation loss (nats per byte)")
    label_ends(loss)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Prints the table and draws both forms of the plot."""
    for suffix, narrow in (("", False), ("_narrow", True)):
        draw(RESULTS / f"overview{suffix}.png", narrow)
    print(table())


if __name__ == "__main__":
    main()
