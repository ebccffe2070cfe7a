"""The picture of a run: losses against steps and bytes, and its learning rate; the style of all."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

Rows = Sequence[Mapping[str, Any]]

# Grey for the baseline, then Okabe and Ito's colours, which the colour-blind tell apart.
COLORS = ("#999999", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vP*"

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
"""Of pictures in notebooks, for `plt.rcParams.update`: readable where they are 700 pixels wide."""


def loss_figure(runs: Mapping[str, Rows], path: pathlib.Path) -> None:
    """Writes the picture of `drawn`.

    Args:
      runs: As of `drawn`.
      path: The picture; its suffix says the format, as `.png` or `.svg`.

    Raises:
      ValueError: If a run has no row with a `val_loss`.
    """
    drawn(runs).savefig(path, dpi=150)


def drawn(runs: Mapping[str, Rows]) -> Figure:
    """Draws runs: losses against steps and against bytes, side by side, and the learning rate.

    Validation losses are thick; the losses of training, each the mean since the row before, are
    thin behind them. A dotted line runs through the last loss of the first run, so that the others
    are read against it at equal bytes too; the last point of each run is marked.

    Args:
      runs: Rows of metrics by label, the baseline first. Rows with a `val_loss` are drawn; they
        need `step` and `sent_bytes`. `loss` and `learning_rate` are drawn of the rows that have
        them.

    Raises:
      ValueError: If a run has no row with a `val_loss`.
    """
    curves = {label: curve(label, rows) for label, rows in runs.items()}
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    panels = figure.subplot_mosaic([["steps", "bytes"], ["rate", "bytes"]], height_ratios=[3, 1])
    by_step, by_bytes, rate = panels["steps"], panels["bytes"], panels["rate"]
    rate.sharex(by_step)
    alone = len(curves) == 1
    for index, (label, (steps, sent, losses)) in enumerate(curves.items()):
        style = {
            "color": COLORS[(index + alone) % len(COLORS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": ("-", "--", "-.")[index // len(COLORS) % 3],
            # The baseline shows below a curve that covers it.
            "linewidth": 1.6 if index or alone else 4.0,
        }
        _thin(by_step, runs[label], "loss", style["color"])
        _thin(rate, runs[label], "learning_rate", style["color"])
        _draw(by_step, steps, losses, style, f"{label}: {losses[-1]:.3f}")
        # Nothing was sent at step 0: a logarithmic axis has no place for it.
        _draw(by_bytes, sent[sent > 0], losses[sent > 0], style, label)
    baseline = next(iter(curves.values()))[2][-1]
    for axes in (by_step, by_bytes):
        axes.axhline(baseline, color="#000000", linewidth=0.8, linestyle=":", zorder=0)
    for axes in panels.values():
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    by_step.set_ylabel("loss (nats)")
    by_step.tick_params(labelbottom=True)
    rate.set(xlabel="optimizer steps", ylabel="learning rate", ylim=(0, None))
    by_bytes.set(xlabel="bytes sent by one replica (logarithmic)", ylabel="validation loss (nats)")
    _label_bytes(by_bytes, np.concatenate([s[np.isfinite(y)] for _, s, y in curves.values()]))
    by_step.legend(frameon=False, title="run: last validation loss", alignment="left")
    return figure


def _label_bytes(axes: Axes, sent: np.ndarray) -> None:
    """A logarithmic axis with labels, also where it covers less than a power of ten."""
    sent = sent[sent > 0]
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    if not len(sent):
        return
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    ratio = sent.max() / sent.min()
    if ratio < 100:
        few = MaxNLocator(4) if ratio < 10 else LogLocator(subs=(1, 2, 5))
        axes.xaxis.set_major_locator(few)
        axes.xaxis.set_minor_locator(NullLocator())


def _thin(axes: Axes, rows: Rows, name: str, color: str) -> None:
    """Draws a column of the rows that have it."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=color, linewidth=1.0, alpha=0.6, zorder=1.5)


def curve(label: str, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    evaluated = [row for row in rows if "val_loss" in row]
    if not evaluated:
        raise ValueError(
            f"run {label!r} has no row with val_loss; train it until eval_every steps."
        )
    columns = ([row[name] for row in evaluated] for name in ("step", "sent_bytes", "val_loss"))
    steps, sent, losses = (np.array(column, np.float64) for column in columns)
    return steps, sent, losses


def _draw(axes: Axes, x: np.ndarray, y: np.ndarray, style: dict[str, Any], label: str) -> None:
    axes.plot(x, y, **style, label=label, markersize=6, markevery=[-1])


def label_ends(axes: Axes) -> None:
    """Writes each line's label behind its last point, in its colour, none over another.

    Call it when all lines are drawn and scales and limits are set. Lines without a label, or
    without a finite point, get none.

    Args:
      axes: Whose lines are labelled.
    """
    axes.autoscale_view()  # else limits are made when the picture is drawn
    height = axes.get_window_extent().height * 72 / axes.figure.dpi  # in points
    size = axes.xaxis.label.get_size()
    ends = []
    for line in axes.get_lines():
        points = axes.transData.transform(line.get_xydata())
        points = points[np.isfinite(points).all(axis=1)]
        if not line.get_label().startswith("_") and len(points):
            ends.append((*axes.transAxes.inverted().transform(points[-1])[::-1], line))
    middle, lines = -np.inf, 0
    for y, x, line in sorted(ends, key=lambda end: end[0]):
        lines, below = line.get_label().count("\n") + 1, lines
        middle = max(y, middle + 0.65 * (lines + below) * size / height)
        axes.text(
            x + 0.02,
            middle,
            line.get_label(),
            color=line.get_color(),
            size=size,
            va="center",
            transform=axes.transAxes,
        )
