"""The training loop: batches in, metrics and checkpoints out."""

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxcomp
from train import checkpoint, metrics, plots
from train.config import AXIS_NAME, Config, to_json
from train.signals import stop_signals
from train.task import Task, make_task, num_parameters, report


@dataclasses.dataclass
class Progress:
    """What a run has counted so far; travels in the checkpoint's metadata."""

    step: int = 0  # optimizer steps done, skipped ones included
    sent_bytes: float = 0.0  # by one replica, since the first step
    rounds: int = 0  # steps in which anything was sent
    skipped: int = 0  # steps whose update was not finite


def run(config: Config) -> list[dict[str, Any]]:
    """Trains, or goes on training, one run; everything it makes lies in `runs_dir/name`.

    Args:
      config: The run.

    Returns:
      The rows of its `metrics.jsonl`, those of earlier parts of the run included.

    Raises:
      ValueError: For what does not fit together in config, text, devices or checkpoint.
      OSError: If something cannot be written.
      RuntimeError: If the replicas' parameters have gone apart.
    """
    task = make_task(config)
    folder = Path(config.runs_dir, config.name)
    directory = folder / "checkpoints"
    params, state, done = _restore(task, directory) if config.resume else (None, None, None)
    if done is None:
        _refuse_old_checkpoints(directory)
        (params, state), done = task.init(), Progress()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "metrics.jsonl"
    metrics.keep_until(log, done.step if done.step else -1)
    metrics.write_text(folder / "report.txt", report(task) + "\n")
    metrics.write_text(folder / "config.json", _record(task))
    with contextlib.ExitStack() as stack:
        events = lambda row: None  # noqa: E731
        if config.tensorboard:
            events = stack.enter_context(metrics.tensorboard(folder / "events", done.step))
        checkpoints = checkpoint.open_checkpoints(directory)
        stack.callback(checkpoints.close)
        show = stack.enter_context(metrics.progress(config.name, done.step, config.steps))
        asked_to_stop = stack.enter_context(stop_signals())

        def write(row):
            metrics.append(log, row)
            events(row)

        def save(params, state):
            tree = {"params": params, "state": state}
            checkpoints.save(done.step, tree, _metadata(task, done))

        _train(task, params, state, done, write, save, show, asked_to_stop)
    rows = metrics.read(log)
    plots.loss_figure({config.name: rows}, folder / "loss.png")
    return rows


def _train(task: Task, params, state, done, write, save, show, asked_to_stop) -> None:
    """Steps until the end or until a stop is asked for; leaves a checkpoint behind."""
    config = task.config
    if done.step == 0:
        write(_row(task, done, None, val_loss=task.evaluate(params)))
    recent, began, saved = [], time.perf_counter(), done.step
    while done.step < config.steps and not asked_to_stop():
        params, state, out = task.step(params, state, task.batch(done.step))
        recent.append(out)
        # One step runs while the host prepares the next: waiting bounds how far it runs ahead.
        jax.block_until_ready(recent[-2:-1])
        done.step += 1
        done.sent_bytes += task.sent_bytes
        done.rounds += task.sent_bytes > 0
        last = done.step == config.steps
        extra = {}
        if done.step % config.checksum_every == 0 or last:
            extra["checksum_spread"] = _require_equal(task, params, done.step)
        if done.step % config.log_every == 0 or extra or last or done.step % config.eval_every == 0:
            loss, skipped = _read(recent)
            done.skipped += skipped
            seconds = (time.perf_counter() - began) / len(recent)
            if done.step % config.eval_every == 0 or last:
                extra["val_loss"] = task.evaluate(params)
            write(_row(task, done, loss, step_seconds=seconds, **extra))
            show(done.step, loss)
            recent, began = [], time.perf_counter()
        if done.step % config.checkpoint_every == 0 or last:
            save(params, state)
            saved = done.step
    if done.step > saved:
        done.skipped += _read(recent)[1] if recent else 0
        save(params, state)


def _row(task: Task, done: Progress, loss, **extra) -> dict[str, Any]:
    return {
        "step": done.step,
        "loss": loss,
        "sent_bytes": done.sent_bytes,
        "rounds": done.rounds,
        "skipped": done.skipped,
        **extra,
    }


def _read(recent: list[dict]) -> tuple[float, int]:
    """Mean loss over replicas and steps, and how many steps were skipped."""
    losses = jnp.stack([out["loss"] for out in recent])
    return float(jnp.mean(losses)), int(sum(out["skipped"] for out in recent))


def _require_equal(task: Task, params, step: int) -> int:
    spread = int(jaxcomp.replica_spread(params, task.mesh, AXIS_NAME))
    if spread:
        raise RuntimeError(
            f"after step {step} the replicas' parameters are not equal (their checksums differ by "
            f"{spread}): this is a bug in the transformation {task.config.optimizer.update!r} or "
            "a fault of a device. The last checkpoint was written before it was seen."
        )
    return spread


def _record(task: Task) -> str:
    plan = {
        "parameters": num_parameters(task),
        "replicas": task.mesh.size,
        "sent_bytes_per_step": task.sent_bytes,
        "exact": jaxcomp.report.exact_leaves(task.like["params"], task.like["state"]),
    }
    return metrics.run_record(to_json(task.config), task.corpus.record, plan)


def _metadata(task: Task, done: Progress) -> dict[str, Any]:
    return {
        "progress": dataclasses.asdict(done),
        "num_replicas": task.mesh.size,
        "data_sha256": task.corpus.record["sha256"],
        "config": json.loads(to_json(task.config)),
    }


def _restore(task: Task, directory: Path) -> tuple[Any, Any, Progress | None]:
    """Parameters, state and counts of the newest checkpoint, onto this run's replicas."""
    if checkpoint.latest(directory) is None:
        return None, None, None
    saved = checkpoint.read_metadata(directory)
    if saved["data_sha256"] != task.corpus.record["sha256"]:
        raise ValueError(
            f"{directory} was trained on other text (sha256 {saved['data_sha256'][:12]}...) than "
            f"this run reads ({task.corpus.record['sha256'][:12]}...); give the old text, or "
            "another --name, or --no-resume with that folder removed."
        )
    like = task.like
    if saved["num_replicas"] != task.mesh.size:
        old_like = checkpoint.like_replicas(like, saved["num_replicas"], AXIS_NAME)
        like = {**like, "state": old_like["state"]}
    tree, saved, _ = checkpoint.restore(directory, like)
    state = jaxcomp.resize(tree["state"], task.like["state"])
    return tree["params"], state, Progress(**saved["progress"])


def _refuse_old_checkpoints(directory: Path) -> None:
    if (step := checkpoint.latest(directory)) is not None:
        raise ValueError(
            f"{directory} has a checkpoint of step {step}, which --no-resume would overwrite; "
            "write --resume, give another --name, or remove that folder."
        )
