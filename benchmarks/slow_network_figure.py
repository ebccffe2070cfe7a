"""The rows of benchmarks.slow_network as a table and as a picture.

python -m benchmarks.slow_network_figure FILE.json
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


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
    """The rows as Markdown: milliseconds a step, and how often its time at the first rate."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    lines = [
        f"| method | bytes sent | of the report's | {' | '.join(rates)} |",
        "|---" * (3 + len(rates)) + "|",
    ]
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
        lines.append(
            f"| {method} | {first['nic_bytes']['sent']:,.0f} | {agrees} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws seconds a step against the rate, with bars from quartile to quartile."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 6))
    colors = plt.get_cmap("tab20").colors
    for (method, at), color in zip(by_method(rows).items(), colors * 9, strict=False):
        peer = method.startswith("PyTorch")
        style = {"color": color, "linestyle": "--" if peer else "-", "linewidth": 1.6}
        times = [seconds(row) for row in at.values()]
        if "no exchange" in method:
            axes.axhline(times[0], label=method, **style | {"linestyle": ":"})
            continue
        spread = [row["step_seconds"]["quartiles"] for row in at.values()]
        # A mean, where steps differ, may lie outside the quartiles.
        low = [max(0.0, time - first) for time, (first, _) in zip(times, spread, strict=True)]
        high = [max(0.0, last - time) for time, (_, last) in zip(times, spread, strict=True)]
        positions = [rates.index(rate) for rate in at]
        axes.errorbar(positions, times, yerr=[low, high], label=method, marker="o", **style)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rates)), rates)
    axes.set_xlabel("rate of every link, each direction")
    axes.set_ylabel("seconds a step")
    first = rows[0]
    axes.set_title(
        f"{first['hosts']} hosts with {first['threads'].replace('a host', 'thread each')}, "
        f"{first['parameters']:,} parameters",
        fontsize=10,
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Reads rows, prints the table, draws the picture beside them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("json", type=pathlib.Path)
    path = parser.parse_args().json
    rows = json.loads(path.read_text())
    draw(rows, path.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    main()
