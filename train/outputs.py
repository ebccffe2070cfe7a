"""The outputs of a run: report, rows, progress, plot, and the summary at its end.

Only process 0 writes them.
"""

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcomp.launch import agree
from jaxcomp.launch.claims import Claim
from jaxcomp.launch.exits import say
from train import report
from train.checkpoints import files
from train.config import Config
from train.config.facts import to_json
from train.models.objectives import OBJECTIVES
from train.output import metrics, progress, trackers
from train.output.units import duration, size
from train.resume import Progress
from train.task import Task

Rows = Sequence[Mapping[str, Any]]


def opened(stack: contextlib.ExitStack, task: Task, claim: Claim, folder: Path, done: Progress):
    """Opens the outputs of a run, until the end of a stack.

    Args:
      stack: Closes them.
      task: The run.
      claim: Claim to its folder.
      folder: The run's folder.
      done: Where the run resumes; rows of later steps are dropped.

    Returns:
      Three functions of a row: one records it, one passes it on to trackers, and one shows it as
      progress.
    """
    if not agree.is_first():
        return (lambda row: None,) * 3
    claim.require()
    config, log = task.config, folder / "metrics.jsonl"
    metrics.keep_until(log, done.step if done.step else -1)
    # The steps of a run that is done were made with the settings on record.
    if done.step < config.steps or not (folder / "config.json").is_file():
        metrics.write_text(folder / "report.txt", report.text(task) + "\n")
        metrics.write_text(folder / "config.json", report.record(task))
    for note in report.notes(task):
        say(note)
    writers = []
    if config.tensorboard:
        writers.append(stack.enter_context(trackers.tensorboard(folder / "events", done.step)))
    if config.wandb:
        settings = json.loads(to_json(config))
        writers.append(stack.enter_context(trackers.wandb(folder, settings, done.step)))

    def track(row):
        for write in writers:
            write(row)

    first = {"step": done.step, "sent_bytes": done.sent_bytes}
    show = stack.enter_context(progress.progress(config.name, first, config.steps))
    return lambda row: metrics.append(log, row, claim.require), track, show


def written(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run; none where the user has removed them."""
    log = folder / "metrics.jsonl"
    return metrics.read(log) if log.is_file() else []


def finished(name: str, folder: Path) -> list[dict[str, Any]]:
    """All rows of a run; plots them if some were evaluated."""
    rows = written(folder)
    if any("val_loss" in row for row in rows):
        from train.output import plots  # takes a second or two, which the start need not wait for

        plots.loss_figure({name: rows}, folder / "loss.png")
    return rows


def summary(config: Config, rows: Rows) -> str:
    """Sums up a run from the files in its folder; includes parts before a resume.

    Args:
      config: The run.
      rows: Its metrics, from `train.loop.run`; at least one row is evaluated.

    Returns:
      Lines: the last loss, then time and bytes, and last the path of the plot.
    """
    folder, unit = Path(config.runs_dir, config.name), OBJECTIVES[config.objective].unit
    unit = "token" if getattr(config.data, "tokenizer", None) else unit
    checkpoint = files.latest(folder / "checkpoints")
    sent, whole = rows[-1]["sent_bytes"], rows[-1]["dense_bytes"]
    training, validation = (_nats(_last(rows, name)) for name in ("loss", "val_loss"))
    facts = {
        "time": _time(rows),
        "sent": _sent(sent, whole),
        "saved": _saved(config.link_rate, sent, whole),
        "skipped": _skipped(rows[-1]),
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


def _time(rows: Rows) -> str:
    """The time of steps, without evaluations and saves."""
    # Of the rows that are there and have a time: the user may have removed earlier ones, and a row
    # that an earlier start owed has none.
    timed = [pair for pair in itertools.pairwise(rows) if "step_seconds" in pair[1]]
    steps, seen = (sum(row[x] - before[x] for before, row in timed) for x in ("step", "examples"))
    seconds = sum((row["step"] - before["step"]) * row["step_seconds"] for before, row in timed)
    if not seconds:
        return ""
    rate = seen / seconds
    shown = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    each = f"{steps:,} steps of {duration(seconds / steps)}"
    return f"{duration(seconds)} in {each}, {shown} examples/s"


def _sent(sent: float, whole: float) -> str:
    if not sent or not whole:
        return ""
    ratio = whole / sent
    against = f"{ratio:.3g}x fewer than" if ratio > 1.05 else f"{100 * sent / whole:.0f}% of"
    return f"{size(sent)} by each replica, {against} dense float32, {size(whole)}"


def _saved(rate: float | None, sent: float, whole: float) -> str:
    if rate is None or not whole:
        return ""
    sent, whole = 8 * sent / rate, 8 * whole / rate
    return (
        f"{duration(whole - sent)} at {rate / 1e6:,.4g} Mbit/s: "
        f"sending takes {duration(sent)} instead of {duration(whole)}, if nothing hides it"
    )


def _skipped(last: Mapping[str, Any]) -> str:
    whole, alone = last["skipped"], last["left_out"]
    parts = [f"{whole:,} of {last['step']:,} steps"] if whole else []
    parts += [f"{alone:,} steps of single replicas"] if alone else []
    return f"{' and '.join(parts)}: their updates were not finite" if parts else ""


def _last(rows: Rows, name: str) -> Any:
    return next((row[name] for row in reversed(rows) if name in row), None)


def _nats(loss: float | None, unit: str = "") -> str:
    if loss is None:
        return "not finite"
    return f"{loss:.4f} nats per {unit}" if unit else f"{loss:.4f}"


def _accuracy(rows: Rows) -> str:
    accuracy = _last(rows, "val_accuracy")
    return "" if accuracy is None else f", accuracy {accuracy:.4f}"
