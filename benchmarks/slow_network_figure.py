"""The rows of benchmarks.slow_network as a table and as a plot.

python -m benchmarks.slow_network_figure FILE.json
"""

import argparse
import json
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.rows import markdown
from train.output.plots import COLORS, label_ends, label_log


def seconds(row: dict) -> float:
    """A step's time: the median, or the mean where steps differ by design."""
    return row["step_seconds"]["mean" if row["skips_rounds"] else "median"]


def by_method(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """The rows by method and rate, both in the order in which they come."""
    methods: dict[str, dict[str, dict]] = {}
    for row in rows:
        methods.setdefault(row["method"], {})[row["rate"]] = row
    return methods


def table(rows: list[dict]) -> str:
    """The rows as Markdown: milliseconds per step, and multiples of the first rate's time."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    lines = []
    for method, at in by_method(rows).items():
        first = next(iter(at.values()))
        ratio = first["nic_over_report"]
        cells = [
            f"{1e3 * seconds(at[rate]):.0f} ms ({seconds(at[rate]) / seconds(first):.2f})"
            if rate in at
            else ""
            for rate in rates
        ]
        agrees = "" if ratio is None else f"{ratio:.3f}"
        lines.append([method, f"{first['nic_bytes']['sent']:,.0f}", agrees, *cells])
    return markdown(["method", "bytes sent", "of the report's", *rates], lines)


def lines(axes: Axes, rows: list[dict], shown: Sequence[str]) -> None:
    """Draws seconds per step against the rate, with bars from quartile to quartile.

    Args:
      axes: Where to draw.
      rows: Rows of one file.
      shown: The methods, eight at most, in the order of their colours.
    """
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    methods = by_method(rows)
    all_times = []
    for method, color in zip(shown, COLORS, strict=False):
        at = {rate: methods[method][rate] for rate in rates if rate in methods[method]}
        times = [seconds(row) for row in at.values()]
        all_times += times
        if "no exchange" in method:
            axes.axhline(times[0], color=color, linestyle=":", linewidth=1.6)
            continue
        spread = [row["step_seconds"]["quartiles"] for row in at.values()]
        # If steps differ, the mean may be outside the quartiles.
        low = [max(0.0, time - first) for time, (first, _) in zip(times, spread, strict=True)]
        high = [max(0.0, last - time) for time, (_, last) in zip(times, spread, strict=True)]
        places = [rates.index(rate) for rate in at]
        axes.errorbar(places, times, yerr=[low, high], color=color, linestyle="", linewidth=1.2)
        style = "--" if method.startswith("PyTorch") else "-"
        axes.plot(places, times, style, color=color, marker="o", markersize=5, label=method)
    label_log(axes, "y", np.array(all_times), FuncFormatter(lambda time, _: f"{time:g} s"))
    axes.set_xticks(range(len(rates)), [written(rate) for rate in rates])
    axes.set_xlim(-0.2, len(rates) - 0.8)
    axes.set_xlabel("rate of every link, each direction")
    axes.set_ylabel("seconds a step (logarithmic)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def written(rate: str) -> str:
    """`100mbit` as it is written."""
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


# Eight at most; the table has all.
SHOWN = (
    "dense float32",
    "DiLoCo, 4 bits, every 32nd",
    "4 bits",
    "sharded Adam, 4 bits",
    "0/1 Adam, every 4th",
    "CocktailSGD, 1 bit of 1/8",
    "PyTorch DDP float32",
    "PyTorch PowerSGD 1",
)


def finding(rows: list[dict]) -> str:
    """The title: the speedup of the fastest step over the dense one's, at the slowest rate."""
    methods, slowest = by_method(rows), rows[-1]["rate"]
    dense = methods.get("dense float32", {}).get(slowest)
    at = {name: row[slowest] for name, row in methods.items() if slowest in row}
    if dense is None or len(at) < 2:
        return f"{rows[0]['hosts']} hosts"
    best = min(at, key=lambda name: seconds(at[name]))
    times = seconds(dense) / seconds(at[best])
    return f"At {written(slowest)} {best} is {times:.3g} times as fast as dense float32"


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws `lines` of eight methods at most."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    names = list(by_method(rows))
    lines(axes, rows, [name for name in SHOWN if name in names] or names[:8])
    first = rows[0]
    figure.supxlabel(
        f"{first['hosts']} hosts with {first['threads'].replace('a host', 'thread each')}, "
        f"{first['parameters'] / 1e6:.3g} M parameters; bars: quartiles",
        fontsize=9,
    )
    axes.set_title(finding(rows))
    label_ends(axes)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Reads rows, prints the table, and draws the plot into their folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", type=pathlib.Path)
    path = parser.parse_args().json
    rows = json.loads(path.read_text())
    draw(rows, path.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    main()
