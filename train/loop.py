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
from train.config import AXIS_NAME, Config, schedule, to_json
from train.signals import stop_signals
from train.task import Task, make_task, num_parameters, report, state_shapes


@dataclasses.dataclass
class Progress:
    """What a run has counted so far; travels in the checkpoint's metadata."""

    step: int = 0  # optimizer steps done, skipped ones included
    sent_bytes: float = 0.0  # by one replica, since the first step
    rounds: int = 0  # steps in which anything was sent
    skipped: int = 0  # steps whose update was not finite
    # Of the steps since the last row: a stop between two rows must not change the next one.
    losses: list[float] = dataclasses.field(default_factory=list)


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
      KeyboardInterrupt: After a stop was asked for by Ctrl-C or SIGTERM, when all is saved.
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
        events = lambda row: None
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
            _require_equal(task, params, done.step)
            tree = {"params": params, "state": state}
            checkpoints.save(done.step, tree, _metadata(task, done))

        _train(task, params, state, done, write, save, show, asked_to_stop)
    rows = metrics.read(log)
    plots.loss_figure({config.name: rows}, folder / "loss.png")
    if done.step < config.steps:
        raise KeyboardInterrupt(f"stopped at step {done.step}; run the same command to go on")
    return rows


def _train(task: Task, params, state, done, write, save, show, asked_to_stop) -> None:
    """Steps until the end or until a stop is asked for; leaves a checkpoint behind."""
    config = task.config

    def due(every: int) -> bool:
        return done.step % every == 0 or done.step == config.steps

    if done.step == 0:
        write(_row(task, done) | {"val_loss": task.evaluate(params)})
    outs, seconds, saved = [], [], done.step
    while done.step < config.steps and not asked_to_stop():
        began = time.perf_counter()
        params, state, out = task.step(params, state, task.batch(done.step))
        outs.append(out)
        done.step += 1
        done.sent_bytes += task.sent_bytes
        done.rounds += task.sent_bytes > 0
        has_row = due(config.log_every) or due(config.eval_every) or due(config.checksum_every)
        # One step runs while the host prepares the next: waiting bounds how far it runs ahead.
        jax.block_until_ready(outs if has_row or due(config.checkpoint_every) else outs[-2:-1])
        seconds.append(time.perf_counter() - began)
        if has_row:
            _count(outs, done)
            row = _row(task, done) | {"step_seconds": sum(seconds) / len(seconds)}
            if due(config.checksum_every):
                row["checksum_spread"] = _require_equal(task, params, done.step)
            if due(config.eval_every):
                row["val_loss"] = task.evaluate(params)
            write(row)
            show(done.step, row["loss"])
            done.losses, seconds = [], []
        if due(config.checkpoint_every):
            _count(outs, done)
            save(params, state)
            saved = done.step
    if done.step > saved:
        _count(outs, done)
        save(params, state)


def _count(outs: list[dict], done: Progress) -> None:
    """Moves what steps have measured from the devices to the counts, and empties the list."""
    for out in outs:
        done.losses.append(float(jnp.mean(out["loss"])))
        done.skipped += int(out["skipped"])
    outs.clear()


def _row(task: Task, done: Progress) -> dict[str, Any]:
    """What is known without the parameters: loss is the mean over the steps since the last row."""
    optimizer, steps = task.config.optimizer, task.config.steps
    # The optimizer counts the updates that were applied, and the last of them had this rate.
    rate = schedule(optimizer, steps)(max(0, done.step - done.skipped - 1))
    loss = sum(done.losses) / len(done.losses) if done.losses else None
    return {
        "step": done.step,
        "loss": loss,
        "learning_rate": rate,
        "sent_bytes": done.sent_bytes,
        "rounds": done.rounds,
        "skipped": done.skipped,
    }


def _require_equal(task: Task, params, step: int) -> int:
    spread = int(jaxcomp.replica_spread(params, task.mesh, AXIS_NAME))
    if spread:
        raise RuntimeError(
            f"after step {step} the replicas' parameters are not equal (their checksums differ by "
            f"{spread}): this is a bug in the transformation {task.config.optimizer.update!r} or "
            "a fault of a device. Earlier checkpoints hold equal parameters: run again to go on "
            "from the last one."
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
    if saved["progress"]["step"] > task.config.steps:
        raise ValueError(
            f"{directory} was trained to step {saved['progress']['step']}, but steps="
            f"{task.config.steps}; write more --steps, or give another --name."
        )
    like = task.like
    if saved["num_replicas"] != task.mesh.size:
        like = {**like, "state": _like_saved(task, saved["num_replicas"])}
    tree, saved, _ = checkpoint.restore(directory, like)
    state = jaxcomp.resize(tree["state"], task.like["state"])
    return tree["params"], state, Progress(**saved["progress"])


def _like_saved(task: Task, num_replicas: int) -> Any:
    """The state of another number of replicas, on this run's mesh."""
    # What an owner keeps of a bucket depends on their number in its length too.
    resized = jax.tree.map(
        lambda x, old: jax.ShapeDtypeStruct(
            x.shape[:1] + old.shape[1:], x.dtype, sharding=x.sharding
        ),
        task.like["state"],
        state_shapes(task, num_replicas),
    )
    return checkpoint.like_replicas(resized, num_replicas, AXIS_NAME)


def _refuse_old_checkpoints(directory: Path) -> None:
    if (step := checkpoint.latest(directory)) is not None:
        raise ValueError(
            f"{directory} has a checkpoint of step {step}, which --no-resume would overwrite; "
            "write --resume, give another --name, or remove that folder."
        )
