"""The rows of benchmarks.fine_tune_network as tables and as a picture.

python -m benchmarks.fine_tune_figure [FILE.json]
"""

import argparse
import json
import pathlib

from matplotlib.figure import Figure

from benchmarks.fine_tune_network import LORA, REPORTED, RESULTS
from train.output.plots import COLORS, label_ends

DENSE = "dense Adam"
NEAR = 0.01
"""Nats above dense Adam's last loss at which methods are compared."""


def at_rates(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """The rows over networks by rate and method, in the order in which they come."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["rate"] != "none":
            found.setdefault(row["rate"], {})[row["method"]] = row
    return found


def seconds_to(row: dict, loss: float) -> float | None:
    """Seconds of training until a curve reaches a loss, interpolated linearly."""
    points = [(seconds, value) for _, seconds, _, value in row["curve"]]
    for (before, high), (after, low) in zip(points, points[1:], strict=False):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def table(rows: list[dict]) -> str:
    """Markdown: each method's learning rate, bytes, loss, and seconds at each network rate."""
    found = at_rates(rows)
    heads = [f"{_written(rate)}: step | to dense Adam's loss + {NEAR}" for rate in found]
    lines = [f"| method | learning rate | bytes a step | loss | {' | '.join(heads)} |"]
    lines.append("|---" * (4 + 2 * len(found)) + "|")
    for method, first in next(iter(found.values())).items():
        steps = first["curve"][-1][0]
        cells = [method, f"{first['learning_rate']:g}", f"{first['curve'][-1][2] / steps:,.0f}"]
        cells.append(f"{first['val_loss']:.3f}")
        for at in found.values():
            reached = seconds_to(at[method], at[DENSE]["val_loss"] + NEAR)
            cells.append(f"{at[method]['curve'][-1][1] / steps:.2f} s")
            cells.append("never" if reached is None else f"{reached:.0f} s")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_lora(rows: list[dict]) -> str:
    """Markdown: the losses with all weights and with LoRA."""
    lines = ["| trained | parameters | bytes a step | learning rate | loss |", "|---" * 5 + "|"]
    for row in rows:
        if row["method"] in LORA and row["seed"] == REPORTED:
            sent = row["curve"][-1][2] / row["curve"][-1][0]
            lines.append(
                f"| {row['method']} | {row['trained']:,} | {sent:,.0f} | {row['learning_rate']:g} "
                f"| {row['val_loss']:.3f} |"
            )
    return "\n".join(lines)


def finding(rows: list[dict]) -> str:
    """The title: the first method near dense Adam's loss at the slowest rate, with its speedup."""
    at = next(iter(at_rates(rows).values()))
    rate, loss = _written(at[DENSE]["rate"]), at[DENSE]["val_loss"] + NEAR
    reached = {name: seconds_to(row, loss) for name, row in at.items()}
    dense = reached.pop(DENSE)
    sooner = {name: seconds for name, seconds in reached.items() if seconds}
    if not sooner:
        return f"At {rate} nothing comes within {NEAR} of the loss of {DENSE}"
    best = min(sooner, key=sooner.__getitem__)
    times = dense / sooner[best]
    return f"At {rate} {best} comes within {NEAR} of {DENSE}'s loss {times:.2g} times sooner"


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Loss against seconds of training, a panel for each rate."""
    found = at_rates(rows)
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (rate, methods) in zip(panels, found.items(), strict=True):
        for (method, row), color in zip(methods.items(), COLORS, strict=False):
            _, seconds, _, losses = zip(*row["curve"], strict=True)
            axes.plot(seconds, losses, color=color, label=method, marker=".", linewidth=1.8)
        axes.set_title(_written(rate), fontsize=11)
        axes.set_xlabel("seconds of training")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss of held-out text (nats per token)")
    figure.suptitle(finding(rows))
    for axes in panels:
        label_ends(axes)
    figure.savefig(path, dpi=120)


def _written(rate: str) -> str:
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def main() -> None:
    """Prints the tables, and draws the plot into the rows' folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", type=pathlib.Path, nargs="?", default=RESULTS)
    path = parser.parse_args().json
    rows = json.loads(path.read_text())
    print(table(rows), table_of_lora(rows), sep="\n\n")
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
