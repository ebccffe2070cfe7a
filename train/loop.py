"""The training loop: batches in, metrics and checkpoints out."""

import contextlib
import time
from pathlib import Path
from typing import Any

import jax

import jaxcomp
from jaxcomp.replicas.state import field
from train.checkpoints import files, resume, store
from train.config import Config
from train.config.as_json import to_json
from train.config.run import schedule
from train.output import metrics, plots, report
from train.plan import counts
from train.processes import agree, distributed, watchdog
from train.processes.signals import stop_signals
from train.task import Task, make_task, num_parameters


def run(config: Config) -> list[dict[str, Any]]:
    """Trains, or goes on training, one run; everything it makes lies in `runs_dir/name`.

    Every process of a run calls it. Process 0 writes all but its parts of checkpoints.

    Args:
      config: The run.

    Returns:
      The rows of its `metrics.jsonl`, those of earlier parts of the run included; none in
      processes other than the first.

    Raises:
      ValueError: For what does not fit together in config, text, devices or checkpoint.
      OSError: If something cannot be written.
      RuntimeError: If the replicas' parameters have gone apart.
      ConnectionError: If another process of the run is gone.
      KeyboardInterrupt: After a stop was asked for by Ctrl-C or SIGTERM, of any of the processes,
        when all is saved.
    """
    folder = Path(config.runs_dir, config.name)
    directory = folder / "checkpoints"
    latest = lambda: files.latest(directory)
    # Signals are caught until all is done: no stop cuts off the last save, or the picture.
    with contextlib.ExitStack() as until_the_end:
        with watchdog.watch(config.watchdog_seconds, latest) as watch:
            watch.at(0, "the start", config.start_seconds)
            agree.require_shared(folder)
            task = make_task(config)
            distributed.require_same({"data": task.examples.record["sha256"]})
            params, state, done = resume.begin(task, directory)
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                keep_row, show = _outputs(stack, task, folder, done)
                asked_to_stop = until_the_end.enter_context(stop_signals())
                checkpoints = _checkpoints(stack, config, directory)

                def save(params, state):
                    watch.at(done.step, "a save", config.start_seconds + config.save_seconds)
                    _require_equal(task, params, done.step)
                    tree = {"params": params, "state": state}
                    checkpoints.save(done.step, tree, resume.metadata(task, done))

                def write(row):
                    checkpoints.check()  # the next save may be far
                    keep_row(row)

                stop = lambda: watch.stop(done.step, asked_to_stop())
                _train(task, params, state, done, write, save, show, stop, watch.at)
        rows = []
        if agree.is_first():
            log = folder / "metrics.jsonl"
            rows = metrics.read(log) if log.is_file() else []  # its user may have removed it
            if any("val_loss" in row for row in rows):
                plots.loss_figure({config.name: rows}, folder / "loss.png")
        if done.step < config.steps:
            raise KeyboardInterrupt(f"stopped at step {done.step}; run the same command to go on")
        return rows


def _outputs(stack: contextlib.ExitStack, task: Task, folder: Path, done: resume.Progress):
    """What a run says of itself: functions for a row, and for progress. Only process 0 says it."""
    if not agree.is_first():
        return lambda row: None, lambda *_: None
    config, log = task.config, folder / "metrics.jsonl"
    metrics.keep_until(log, done.step if done.step else -1)
    metrics.write_text(folder / "report.txt", report.text(task) + "\n")
    metrics.write_text(folder / "config.json", _record(task))
    events = lambda row: None
    if config.tensorboard:
        events = stack.enter_context(metrics.tensorboard(folder / "events", done.step))

    def write(row):
        metrics.append(log, row)
        events(row)

    return write, stack.enter_context(metrics.progress(config.name, done.step, config.steps))


def _checkpoints(stack: contextlib.ExitStack, config: Config, directory: Path):
    """Opens the directory, and closes it at the end unless others might not come to that.

    After a third signal nobody waits for a save.
    """
    checkpoints = store.open_checkpoints(directory, seconds=config.save_seconds)

    def close(kind, error, trace):
        if kind is None or (kind is not KeyboardInterrupt and jax.process_count() == 1):
            checkpoints.close()

    stack.push(close)
    return checkpoints


def _train(task: Task, params, state, done, write, save, show, stop, at) -> None:
    """Steps until the end or until a stop is agreed on; leaves a checkpoint behind."""
    config = task.config

    def due(every: int) -> bool:
        return done.step % every == 0 or done.step == config.steps

    def evaluated() -> dict[str, float]:
        at(done.step, "an evaluation", config.start_seconds)
        return {f"val_{name}": float(value) for name, value in task.evaluate(params).items()}

    if done.step == 0:
        write(_row(task, done) | evaluated())
    outs, seconds, saved = [], [], done.step
    while done.step < config.steps and not stop():
        at(done.step, "a step")
        began = time.perf_counter()
        params, state, out = task.step(params, state, task.batch(done.step))
        outs.append(out)
        done.step += 1
        has_row = due(config.log_every) or due(config.eval_every) or due(config.checksum_every)
        # One step runs while the host prepares the next: waiting bounds how far it runs ahead.
        jax.block_until_ready(outs if has_row or due(config.checkpoint_every) else outs[-2:-1])
        seconds.append(time.perf_counter() - began)
        if has_row:
            _count(task, outs, state, done)
            row = _row(task, done) | {"step_seconds": sum(seconds) / len(seconds)}
            if due(config.checksum_every) and task.placement.spread is not None:
                row["checksum_spread"] = _require_equal(task, params, done.step)
            if due(config.eval_every):
                row |= evaluated()
            write(row)
            show(done.step, row["loss"], row["step_seconds"])
            done.losses, seconds = [], []
        if due(config.checkpoint_every):
            _count(task, outs, state, done)
            save(params, state)
            saved = done.step
    if done.step > saved:
        _count(task, outs, state, done)
        save(params, state)


def _count(task: Task, outs: list[dict], state: Any, done: resume.Progress) -> None:
    """Moves what steps have measured from the devices to the counts, and empties the list."""
    if outs:
        parts = field(state, "rounds") or {}
        parts = {part: int(count) for part, count in parts.items()}
        new = {part: count - done.parts.get(part, 0) for part, count in parts.items()}
        done.sent_bytes += counts.total_bytes(task.sent, new, len(outs))
        done.rounds += new.get("all", len(outs) * (task.sent_bytes > 0))
        done.parts = parts
        done.losses += task.mean_losses([out["loss"] for out in outs])
        done.skipped += sum(int(out["skipped"]) for out in outs)
        done.left_out = task.left_out(state)
    outs.clear()


def _row(task: Task, done: resume.Progress) -> dict[str, Any]:
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
        "left_out": done.left_out,
    }


def _require_equal(task: Task, params, step: int) -> int:
    if task.placement.spread is None:  # nothing is held twice that could be compared
        return 0
    spread = int(task.placement.spread(params, task.mesh))
    if spread:
        raise RuntimeError(
            f"after step {step} the replicas' parameters are not equal (their checksums differ by "
            f"{spread}): this is a bug in the transformation {task.config.optimizer.update!r} or "
            "a fault of a device. Earlier checkpoints hold equal parameters: run again to go on "
            "from the last one."
        )
    return spread


def _record(task: Task) -> str:
    facts = {
        "parameters": num_parameters(task),
        "replicas": task.mesh.size,
        "sent_bytes_per_step": task.sent_bytes,
        "sent_bytes_by_part": task.sent,
        "rounds": task.rounds,
        "exact": jaxcomp.report.exact_leaves(task.like["params"], task.like["state"]),
    }
    return metrics.run_record(to_json(task.config), task.examples.record, facts)
