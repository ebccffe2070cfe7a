"""Runs of the training program that take a moment: a tiny model, and a text of few words."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.launching import words
from train import loop
from train.config import Config, Data, Optimizer
from train.models.decoder import DecoderConfig
from train.task import Task, make_task

TINY = DecoderConfig(layers=1, width=16, heads=2, context=16)
EXACT_SGD = "chain(compressed_mean(identity(), axis_name), sgd(learning_rate))"


def tiny_config(
    folder: pathlib.Path,
    update: str = EXACT_SGD,
    rate: float = 1e-2,
    schedule: str = "cosine",
    batch: int = 8,
    **changes: Any,
) -> Config:
    """The config of a run of two replicas and four steps; its text and its runs are in a folder."""
    defaults = {
        "name": "run",
        "steps": 4,
        "replicas": 2,
        "optimizer": Optimizer(update, rate, 1, schedule),
        "model": TINY,
        "eval_batches": 1,
        "runs_dir": str(folder / "runs"),
    }
    if "data" not in changes:
        defaults["data"] = Data(path=words(folder / "text"), batch=batch)
    return Config(**defaults | changes)


def shared_tasks(size: int = 8, **alike: Any) -> Callable[[Config], Task]:
    """A `make_task` that compiles once for configs that differ in these fields alone."""
    compiled = functools.lru_cache(maxsize=size)(make_task)
    return lambda config: compiled(dataclasses.replace(config, **alike))._replace(config=config)


def trained(task: Task, steps: int) -> tuple[Any, Any]:
    """Parameters and state of a task after its first steps."""
    params, state = task.init()
    for step in range(steps):
        params, state, _ = task.step(params, state, task.batch(step))
    return params, state


@contextlib.contextmanager
def stopped_after(steps: int, message: str = "stopped at step") -> Iterator[None]:
    """Asks the run inside to stop after so many of its steps, as a signal does; it says so."""

    @contextlib.contextmanager
    def stop_signals():
        answers = iter([""] * steps + ["SIGTERM"])
        yield lambda: next(answers)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt, match=message):
        patch.setattr(loop, "stop_signals", stop_signals)
        yield


def unreadable_once(step=None, evaluations=()):
    """Makes the batch of a step fail the first time, or some evaluations."""

    def change(task):
        def batch(number, seen=None):
            batches.append(number)
            if number == step and batches.count(number) == 1:
                raise ValueError("a file cannot be read")
            return task.batch(number, seen)

        def evaluate(*given):
            evaluated.append(None)
            if len(evaluated) in evaluations:
                raise OSError("a file cannot be read")
            return task.evaluate(*given)

        return task._replace(batch=batch, evaluate=evaluate)

    batches, evaluated = [], []
    return change
