"""The summary at the end of a run: time, bytes, losses, and the paths of its files."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train import checks
from train.checkpoints import files
from train.config import Config
from train.models.objectives import OBJECTIVES
from train.output.units import duration, size

Rows = Sequence[Mapping[str, Any]]


def text(config: Config, rows: Rows) -> str:
    """Sums up a run from the files in its folder; includes parts before a resume.

    Args:
      config: The run.
      rows: Its metrics, from `train.loop.run`; at least one row is evaluated.

    Returns:
      Lines: the last loss, then time and bytes, and last the path of the plot.
    """
    folder, unit = Path(config.runs_dir, config.name), OBJECTIVES[config.objective].unit
    unit = "token" if getattr(config.data, "tokenizer", None) else unit
    plan = checks.json_object(folder / "config.json", plan=dict[str, Any])["plan"]
    checkpoint = files.latest(folder / "checkpoints")
    dense = plan.get("dense_bytes_per_step", 0)
    training, validation = (_nats(_last(rows, name)) for name in ("loss", "val_loss"))
    facts = {
        "time": _time(config, rows),
        "sent": _sent(rows, dense),
        "saved": _saved(config, rows, dense),
        "losses": f"training {training}, validation {validation}",
        "checkpoint": "" if checkpoint is None else f"{folder / 'checkpoints' / str(checkpoint)}",
    }
    return "\n".join(
        [
            f"{folder}: step {rows[-1]['step']}, validation loss "
            f"{_nats(_last(rows, 'val_loss'), unit)}{_accuracy(rows)}",
            *(f"  {name:<12}{fact}" for name, fact in facts.items() if fact),
            f"{folder}/loss.png",
        ]
    )


def step_seconds(rows: Rows) -> float:
    """Seconds of all steps of a run, without evaluations and saves."""
    return sum(
        (row["step"] - before["step"]) * row["step_seconds"]
        for before, row in itertools.pairwise(rows)
        if "step_seconds" in row
    )


def _time(config: Config, rows: Rows) -> str:
    steps, seconds = rows[-1]["step"], step_seconds(rows)
    if not seconds:
        return ""
    rate = steps * config.data.batch / seconds
    shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    each = f"{steps:,} steps of {duration(seconds / steps)}"
    return f"{duration(seconds)} in {each}, {shown} examples/s"


def _sent(rows: Rows, dense: float) -> str:
    sent, whole = rows[-1]["sent_bytes"], rows[-1]["step"] * dense
    if not sent or not whole:
        return ""
    ratio = whole / sent
    against = f"{ratio:.3g}x fewer than" if ratio > 1.05 else f"{100 * sent / whole:.0f}% of"
    return f"{size(sent)} by each replica, {against} dense float32, {size(whole)}"


def _saved(config: Config, rows: Rows, dense: float) -> str:
    if config.link_rate is None or not dense:
        return ""
    bytes_of_both = rows[-1]["sent_bytes"], rows[-1]["step"] * dense
    sent, whole = (8 * count / config.link_rate for count in bytes_of_both)
    return (
        f"{duration(whole - sent)} at {config.link_rate / 1e6:,.4g} Mbit/s: "
        f"{duration(sent)} of sending, not {duration(whole)}, unless computing hides it"
    )


def _last(rows: Rows, name: str) -> Any:
    return next((row[name] for row in reversed(rows) if name in row), None)


def _nats(loss: float | None, unit: str = "") -> str:
    if loss is None:
        return "not finite"
    return f"{loss:.4f} nats per {unit}" if unit else f"{loss:.4f}"


def _accuracy(rows: Rows) -> str:
    accuracy = _last(rows, "val_accuracy")
    return "" if accuracy is None else f", accuracy {accuracy:.4f}"
