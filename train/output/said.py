"""The outputs of a run: its report, its rows and its progress. Only process 0 writes them."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from jaxcomp.launch import agree
from jaxcomp.launch.claims import Claim
from train.checkpoints.resume import Progress
from train.config import Config
from train.config.as_json import to_json
from train.output import metrics, progress, report, trackers
from train.task import Task


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
    metrics.write_text(folder / "report.txt", report.text(task) + "\n")
    metrics.write_text(folder / "config.json", report.record(task))
    for note in report.notes(task):
        print(note, file=sys.stderr)
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


def finished(config: Config, folder: Path) -> list[dict[str, Any]]:
    """All rows of a run; plots them if some were evaluated."""
    log = folder / "metrics.jsonl"
    rows = metrics.read(log) if log.is_file() else []  # the user may have removed it
    if any("val_loss" in row for row in rows):
        from train.output import plots  # takes a second or two, which the start need not wait for

        plots.loss_figure({config.name: rows}, folder / "loss.png")
    return rows
