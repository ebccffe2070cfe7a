"""Plots of runs: losses against steps and bytes, and the learning rate; the common style."""

import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import (
    EngFormatter,
    Formatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from jaxcomp.launch.regular import named

Rows = Sequence[Mapping[str, Any]]

# Grey for the baseline, then Okabe and Ito's colours, which colour-blind people can tell apart.
COLORS = tuple("#999999 #0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split())
_MARKERS = "osD^vP*X"

STYLE = {
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "figure.figsize": (7.0, 3.8),
    "font.size": 11.0,
    "grid.alpha": 0.25,
    "lines.linewidth": 2.0,
    "savefig.dpi": 100,
}
"""For `plt.rcParams.update` in notebooks: plots are readable at a width of 700 pixels."""


def loss_figure(runs: Mapping[str, Rows], path: pathlib.Path) -> None:
    """Writes the plot of `drawn`.

    Args:
      runs: As for `drawn`.
      path: The file; its suffix gives the format, such as `.png` or `.svg`.

    Raises:
      ValueError: If a run has no row with a `val_loss`.
      OSError: If it cannot be written.
    """
    with warnings.catch_warnings(), named(path):
        warnings.filterwarnings("ignore", "Glyph")  # the font lacks a letter of a run's name
        drawn(runs).savefig(path, dpi=150)


def drawn(runs: Mapping[str, Rows]) -> Figure:
    """Plots runs: losses against steps and against bytes, side by side, and the learning rate.

    Validation losses are thick lines; training losses, each the mean since the previous row, are
    thin. A dotted line marks the last loss of the first run, to compare others with it at equal
    bytes too. Each curve has its name and last loss at its end.

    Args:
      runs: Rows of metrics by label, the baseline first. Rows with a `val_loss` also need `step`
        and `sent_bytes`. `loss` and `learning_rate` are plotted from the rows that have them.

    Raises:
      ValueError: If a run has no row with a `val_loss`.
    """
    curves = {label: curve(label, rows) for label, rows in runs.items()}
    figure = Figure(figsize=(11, 5.4), layout="constrained")
    panels = figure.subplot_mosaic([["steps", "bytes"], ["rate", "bytes"]], height_ratios=[3, 1])
    by_step, by_bytes, rate = panels["steps"], panels["bytes"], panels["rate"]
    rate.sharex(by_step)
    by_bytes.sharey(by_step)
    alone = len(curves) == 1
    for index, (label, (steps, sent, losses)) in enumerate(curves.items()):
        style: dict[str, Any] = {
            "color": COLORS[(index + alone) % len(COLORS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": ("-", "--", "-.")[index // len(COLORS) % 3],
            # A thick baseline shows below a curve that covers it.
            "linewidth": 1.6 if index or alone else 4.0,
        }
        thin = {"color": style["color"], "label": "training" if alone else "_"}
        _thin(by_step, runs[label], "step", "loss", **thin)
        _thin(by_bytes, runs[label], "sent_bytes", "loss", **thin)
        _thin(rate, runs[label], "step", "learning_rate", **thin)
        short = label if len(label) <= 24 else f"...{label[-21:]}"  # the end of a path says more
        name = f"{'validation' if alone else short}\n{losses[-1]:.3f}"
        style |= {"label": name, "markersize": 6, "markevery": [-1]}
        by_step.plot(steps, losses, **style)
        # Nothing was sent at step 0, and a logarithmic axis has no zero.
        by_bytes.plot(sent[sent > 0], losses[sent > 0], **style)
    baseline = next(iter(curves.values()))[2][-1]
    for axes in (by_step, by_bytes):
        axes.axhline(baseline, color="#000000", linewidth=0.8, linestyle=":", zorder=0)
        axes.set_ylabel("loss (nats)")
    for axes in panels.values():
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    by_step.tick_params(labelbottom=True)
    rate.set(xlabel="optimizer steps", ylabel="learning rate", ylim=(0, None))
    by_bytes.set_xlabel("bytes sent by one replica (logarithmic)")
    drawn_bytes = np.concatenate([s[np.isfinite(y)] for _, s, y in curves.values()])
    label_log(by_bytes, "x", drawn_bytes, EngFormatter("B"))
    figure.suptitle(_finding(curves), parse_math=False)
    for axes in (by_step, by_bytes):
        label_ends(axes)
    return figure


def _finding(curves: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]) -> str:
    """The title: what the plot shows."""
    (first, (steps, sent, losses)), *others = curves.items()
    if not others:
        sent_text = f", {EngFormatter('B', places=0)(sent[-1])} sent" if sent[-1] else ""
        return f"{first}: validation loss {losses[-1]:.3f} after {steps[-1]:,.0f} steps{sent_text}"
    lines = []
    for label, (_, other_sent, other) in others[:2]:
        fewer = sent[-1] / other_sent[-1] if other_sent[-1] else 0.0
        times = f" with {fewer:.3g} times fewer bytes" if fewer > 1 else ""
        lines.append(f"{label}: loss {other[-1]:.3f}{times}; {first}: {losses[-1]:.3f}")
    return "\n".join(lines)


def label_log(axes: Axes, which: str, values: np.ndarray, formatter: Formatter) -> None:
    """Makes an axis logarithmic, with tick labels for any range: decades, or a part of one.

    Args:
      axes: The axes.
      which: `x` or `y`.
      values: The values along it; those that are not positive are ignored.
      formatter: Formatter of the labels.
    """
    axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
    limits = axes.dataLim.get_points()[:, "xy".index(which)]  # curves may go on beyond the values
    values = np.concatenate([values, limits])
    values = values[np.isfinite(values) & (values > 0)]
    if len(values):
        axes.set(**{f"{which}scale": "log"})
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(formatter)
    if len(values) and (times := values.max() / values.min()) < 1000:
        subs = (1, 2, 5) if times < 40 else (1, 3)
        axis.set_major_locator(MaxNLocator(4) if times < 10 else LogLocator(subs=subs))
        axis.set_minor_locator(NullLocator())


def _thin(axes: Axes, rows: Rows, x: str, y: str, **style: Any) -> None:
    """Plots a column from the rows that have it."""
    points = [(row[x], row[y]) for row in rows if row.get(y) is not None and x in row]
    if x == "sent_bytes":
        points = [point for point in points if point[0] > 0]  # as for validation losses
    if points:
        axes.plot(*zip(*points, strict=True), **style, linewidth=1.0, alpha=0.6, zorder=1.5)


def curve(label: str, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    evaluated = [row for row in rows if "val_loss" in row]
    if not evaluated:
        raise ValueError(
            f"run {label!r} has no row with val_loss; train it until eval_every steps."
        )
    columns = ([row[name] for row in evaluated] for name in ("step", "sent_bytes", "val_loss"))
    steps, sent, losses = (np.array(column, np.float64) for column in columns)
    return steps, sent, losses


def label_ends(axes: Axes) -> None:
    """Writes each line's label after its last point, in a darker tone, without overlaps.

    Call it when all lines are drawn and scales and limits are set. Lines without a label, or
    without a finite point, get none.

    Args:
      axes: The axes with the lines.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # otherwise limits are set only on drawing
    size, placed = axes.xaxis.label.get_size(), []
    ends = []
    for line in axes.get_lines():
        points = axes.transData.transform(line.get_xydata())
        points = points[np.isfinite(points).all(axis=1)]
        if not line.get_label().startswith("_") and len(points):
            ends.append((*axes.transAxes.inverted().transform(points[-1])[::-1], line))
    for y, x, line in sorted(ends, key=lambda end: end[0]):
        dark = np.array(to_rgb(line.get_color())) * 0.75  # light colours are hard to read
        text = axes.text(x + 0.02, y, line.get_label(), size=size, color=dark, va="center")
        text.set(transform=axes.transAxes, path_effects=[withStroke(linewidth=4, foreground="w")])
        text.set_parse_math(False)  # a name with two dollars is no formula
        box = text.get_window_extent()
        for other in placed:  # from the lowest to the highest
            if box.overlaps(other):
                y += (other.y1 - box.y0 + 1) / axes.get_window_extent().height
                text.set_y(y)
                box = text.get_window_extent()
        placed.append(box)
