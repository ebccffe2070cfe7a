"""The picture of a run: validation loss against steps, and against bytes sent; the style of all."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

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


def loss_figure(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: pathlib.Path) -> None:
    """Draws the validation loss of runs against steps and against bytes, side by side.

    A dotted line runs through the last loss of the first run, so that the others are read
    against it at equal bytes too; the last point of each run is marked.

    Args:
      runs: Rows of metrics by label, the baseline first. Rows with a `val_loss` are drawn;
        they need `step` and `sent_bytes`.
      path: The picture; its suffix says the format, as `.png` or `.svg`.

    Raises:
      ValueError: If a run has no row with a `val_loss`.
    """
    curves = {label: curve(label, rows) for label, rows in runs.items()}
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for index, (label, (steps, sent, losses)) in enumerate(curves.items()):
        style = {
            "color": COLORS[index % len(COLORS)],
            "marker": _MARKERS[index % len(_MARKERS)],
            "linestyle": ("-", "--", "-.")[index // len(COLORS) % 3],
            "linewidth": 1.6 if index else 4.0,  # the baseline shows below a curve that covers it
        }
        _draw(by_step, steps, losses, style, f"{label}: {losses[-1]:.3f}")
        # Nothing was sent at step 0: a logarithmic axis has no place for it.
        _draw(by_bytes, sent[sent > 0], losses[sent > 0], style, label)
    baseline = next(iter(curves.values()))[2][-1]
    for axes in (by_step, by_bytes):
        axes.axhline(baseline, color="#000000", linewidth=0.8, linestyle=":", zorder=0)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    by_step.set_xlabel("optimizer steps")
    by_step.set_ylabel("validation loss (nats)")
    by_bytes.set_xlabel("bytes sent by one replica (logarithmic)")
    if any(np.isfinite(losses[sent > 0]).any() for _, sent, losses in curves.values()):
        by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter(EngFormatter("B"))
    by_bytes.xaxis.set_minor_formatter(NullFormatter())
    by_step.legend(frameon=False, title="run: last loss", alignment="left")
    figure.savefig(path, dpi=150)


def curve(
    label: str, rows: Sequence[Mapping[str, Any]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
