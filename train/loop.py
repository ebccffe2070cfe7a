"""The training loop: batches in, metrics and checkpoints out."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxcomp.islands import Island
from jaxcomp.launch import agree, claims, distributed, peers, watchdog
from jaxcomp.launch.claims import Claim
from jaxcomp.launch.exits import Drained, Transient
from jaxcomp.launch.signals import stop_signals
from jaxcomp.replicas import protocol
from train import island, outputs, report, resume
from train.checkpoints import emergency, files, store
from train.config import Config
from train.config.optimizer import schedule
from train.placement import counts
from train.resume import Progress
from train.task import Task, make_task

# Errors of reading data or writing rows.
_FILE_ERRORS = OSError, ValueError, MemoryError, LookupError, TypeError


def run(config: Config) -> list[dict[str, Any]]:
    """Trains one run, or resumes it; all its files are in `runs_dir/name`.

    Every process of a run calls it. Process 0 writes everything except the other processes' parts
    of checkpoints.

    Args:
      config: The run.

    Returns:
      The rows of its `metrics.jsonl`, including earlier parts of the run; empty in all processes
      except the first.

    Raises:
      ValueError: If config, data, devices or checkpoint do not fit together, or into the memory.
      OSError: If something cannot be written.
      Transient: If the replicas' parameters differ, or another run writes in the folder.
      ConnectionError: If another process of the run is gone.
      KeyboardInterrupt: After a signal of `STOPS` to any of the processes, when all is saved; a
        `Drained` unless it was Ctrl-C.
    """
    folder = Path(config.runs_dir, config.name)
    # Signals are caught until the end, so that none interrupts the last save or the plot.
    with contextlib.ExitStack() as until_the_end:
        step, why = _train(config, folder, until_the_end)
        rows = outputs.finished(config.name, folder) if agree.is_first() else []
        if step < config.steps:
            kind = KeyboardInterrupt if why == peers.A_PERSON else Drained
            raise kind(f"stopped at step {step}; run the same command to go on")
        return rows


def _train(config: Config, folder: Path, until_the_end: contextlib.ExitStack) -> tuple[int, str]:
    """Trains from the current step; returns the step at which it ended, and why it stopped."""
    directory = folder / "checkpoints"
    with (
        watchdog.watch(config.watchdog_seconds, lambda: files.latest(directory)) as watch,
        _memory_named(),
        contextlib.ExitStack() as stack,
    ):
        watch.at(0, "the start", config.start_seconds)
        agree.require_shared(folder, instead="write another --runs-dir")
        # Before anything is compiled. A run that goes on from copies may have lost its source.
        if config.start_from is not None and not config.emergency_every:
            start_from = config.start_from
            agree.from_first(lambda: files.latest(directory) or resume.require_source(start_from))
        task = make_task(config)
        distributed.require_same({"data": task.examples.record["sha256"]})
        another = "write another --name or --runs-dir"
        claim = until_the_end.enter_context(claims.claimed(folder, instead=another))
        if agree.is_first():
            files.remove_partial(directory)
        seconds = config.watchdog_seconds, config.start_seconds
        copies_in = config.emergency_dir if config.emergency_every else None
        copies = stack.enter_context(emergency.opened(folder, claim, copies_in, *seconds))
        params, state, done = resume.begin(task, directory, copies)
        member = None
        if config.island is not None and done.step < config.steps:
            member = stack.enter_context(island.member_of(config, params))
            params = member.params
        # Before rows of a run whose checkpoints are out of reach, on a lost disk, are dropped.
        agree.from_first(lambda: files.require_writable(directory))
        keep, track, show = outputs.opened(stack, task, claim, folder, done)
        run = _Run(
            task=task,
            params=params,
            state=state,
            done=done,
            watch=watch,
            asked_to_stop=until_the_end.enter_context(stop_signals()),
            checkpoints=_checkpoints(stack, config.save_seconds, directory, claim),
            copies=copies,
            keep=keep,
            track=track,
            show=show,
            member=member,
        )
        if last := agree.from_first(lambda: outputs.written(folder)[-1:]):
            run.follow(last[0])
        run.train()
        return done.step, run.stopped


@contextlib.contextmanager
def _memory_named() -> Iterator[None]:
    """Raises a ValueError where JAX has found too little memory: a start again would end alike."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        if "out of memory" not in reason.lower():
            raise
        raise ValueError(
            f"the run needs more memory than a device has ({reason:.200}); write more --accumulate "
            "or a smaller model, and --report to see what a step needs."
        ) from error


def _checkpoints(stack: contextlib.ExitStack, seconds: int, directory: Path, claim: Claim):
    """Opens the directory, and closes it at the end unless other processes might not.

    After a third signal nobody waits for a save.
    """
    checkpoints = store.open_checkpoints(directory, seconds=seconds, claim=claim)

    def close(kind, error, trace):
        if kind is None or (kind is not KeyboardInterrupt and jax.process_count() == 1):
            checkpoints.close()

    stack.push(close)
    return checkpoints


@dataclasses.dataclass
class _Run:
    """The state of a run in training."""

    task: Task
    params: Any
    state: Any
    done: Progress
    watch: watchdog.Watch
    asked_to_stop: Callable[[], str]
    checkpoints: store.Checkpoints
    copies: emergency.Copies | None
    keep: Callable[[dict[str, Any]], None]  # records a row
    track: Callable[[dict[str, Any]], None]  # passes a row on to trackers
    show: Callable[[dict[str, Any]], None]  # shows a row on the terminal
    member: Island | None = None  # of a run of islands
    outs: list[dict] = dataclasses.field(default_factory=list)  # of steps not yet counted
    seconds: list[float] = dataclasses.field(default_factory=list)  # of steps since the last row
    owed: bool = False  # whether this step's row is due and not on disk
    saved: int = 0  # step of the last checkpoint, or of the last attempt at one
    batch: Any = None  # of the last step
    stopped: str = ""  # why it stops before the last step
    error: Exception | None = None  # in the next batch: the run saves, and raises it

    def follow(self, row: dict[str, Any]) -> None:
        """Goes on after the last row, which may be older or newer than the checkpoint's counts."""
        self.owed = row["step"] < self.done.step and self.row_is_due()
        if row["step"] == self.done.step:
            self.done.sent_bytes = row.get("sent_bytes", self.done.sent_bytes)
            self.done.losses = []

    def train(self) -> None:
        """Trains until the end, an agreed stop or a data error; then saves a checkpoint."""
        # Not the start of the run: that may be emergency copies, which end with the run.
        self.saved = agree.from_first(lambda: files.latest(self.checkpoints.directory)) or 0
        self.attempt(self.steps)
        if self.owed:  # if this fails again, the resumed run begins with it
            self.attempt(self.write_row)
        # Not in an except clause: Orbax saves nothing while an error is raised.
        if self.done.step > self.saved:
            self.save()
        if self.error is not None:
            raise self.error

    def attempt(self, function: Callable[[], None]) -> None:
        """Calls a function; keeps its error for the end, so that a run of one process saves."""
        try:
            function()
        except _FILE_ERRORS as error:
            if jax.process_count() > 1:
                raise
            self.error = error

    def steps(self) -> None:
        config, done = self.task.config, self.done
        if done.step == 0:
            self.write(self.row() | self.evaluated()[0])
        elif self.owed:
            self.write_row()
        while done.step < config.steps and not self.stops():
            if not self.step():
                continue
            if self.row_is_due():
                self.write_row()
            if self.copy_is_due():
                self.copy()
            if self.is_due(config.checkpoint_every):
                self.save()

    def stops(self) -> bool:
        reason = "" if self.error is None else "ERROR"
        self.stopped = self.watch.stop(self.done.step, self.asked_to_stop() or reason)
        return bool(self.stopped)

    def is_due(self, every: int) -> bool:
        return self.done.step % every == 0 or self.done.step == self.task.config.steps

    def row_is_due(self) -> bool:
        config = self.task.config
        return any(map(self.is_due, (config.log_every, config.eval_every, config.checksum_every)))

    def copy_is_due(self) -> bool:
        return self.copies is not None and self.done.step % self.task.config.emergency_every == 0

    def next_batch(self) -> Any:
        """The next step's batch; None once if it cannot be made, and then the last batch again.

        Other processes may already have begun the step: this one takes part, then all stop and
        save.
        """
        if self.error is None:
            try:
                self.batch = self.task.batch(self.done.step, self.done.examples)
            except _FILE_ERRORS as error:
                if self.batch is None:
                    raise
                self.error = error
                return None
        return self.batch

    def step(self) -> bool:
        """Makes a step; False if it did not begin because its batch cannot be made."""
        self.watch.at(self.done.step, "a step")
        began = time.perf_counter()
        if (batch := self.next_batch()) is None:
            return False
        self.params, self.state, out = self.task.step(self.params, self.state, batch)
        self.outs.append(out)
        self.done.step += 1
        self.done.examples += self.task.config.data.batch
        self.meet()
        is_counted = self.row_is_due() or self.is_due(self.task.config.checkpoint_every)
        is_counted |= self.copy_is_due()
        # One step runs while the host prepares the next; waiting bounds the host's lead.
        jax.block_until_ready(self.outs if is_counted else self.outs[-2:-1])
        self.seconds.append(time.perf_counter() - began)
        return True

    def meet(self) -> None:
        """Exchanges with other islands when it is time; the run ends at their consensus."""
        if self.member is None:
            return
        config, step = self.task.config, self.done.step
        # Leaving waits for a round, and then for the store.
        seconds = config.watchdog_seconds + 2 * self.member.patience
        self.watch.at(step, "a round of islands", seconds)
        with island.mistakes_named():
            self.params = self.member.step(self.params, tokens=config.data.batch)
            if step == config.steps:
                self.params = self.member.leave(self.params)
        self.watch.at(step, "a step")

    def count(self) -> None:
        """Moves the steps' measures from the devices to the counts."""
        task, done, outs = self.task, self.done, self.outs
        if outs:
            rounds = protocol.rounds(self.state)
            parts = {part: int(count) for part, count in rounds.items()}
            new = {part: count - done.parts.get(part, 0) for part, count in parts.items()}
            done.sent_bytes += counts.total_bytes(task.sent, new, len(outs))
            done.dense_bytes += report.dense_bytes(task) * len(outs)
            done.rounds += new.get("all", len(outs) * (task.sent_bytes > 0))
            done.parts = parts
            done.losses += task.mean_losses([out["loss"] for out in outs])
            done.skipped += sum(int(out["skipped"]) for out in outs)
            done.left_out = task.left_out(self.state)
        outs.clear()

    def row(self) -> dict[str, Any]:
        """A row without evaluation; the loss is the mean since the last row."""
        done, config = self.done, self.task.config
        # The optimizer counts applied updates, and the last of them had this rate.
        rate = schedule(config.optimizer, config.steps)(max(0, done.step - done.skipped - 1))
        return {
            "step": done.step,
            "examples": done.examples,
            "loss": sum(done.losses) / len(done.losses) if done.losses else None,
            "learning_rate": rate,
            "sent_bytes": done.sent_bytes,
            "dense_bytes": done.dense_bytes,
            "rounds": done.rounds,
            "skipped": done.skipped,
            "left_out": done.left_out,
            **({} if self.member is None else island.facts(self.member)),
        }

    def write_row(self) -> None:
        """Writes the row of this step; after an error it can be called again."""
        self.owed = True
        self.count()
        config, sent_bytes = self.task.config, self.done.sent_bytes
        measured, more = self.evaluated() if self.is_due(config.eval_every) else ({}, 0.0)
        row = self.row()
        if self.seconds:  # not in a row that an earlier start owes
            row["step_seconds"] = sum(self.seconds) / len(self.seconds)
        row["sent_bytes"] += more
        if self.is_due(config.checksum_every):
            row |= self.require_equal()
        row |= measured
        self.write(row)
        if "step_seconds" in row:  # the final mean is not part of a step's rate
            self.show(row | {"sent_bytes": sent_bytes})

    def write(self, row: dict[str, Any]) -> None:
        self.checkpoints.check()  # the next save may be far away
        self.keep(row)
        self.done.sent_bytes, self.done.losses = row["sent_bytes"], []
        self.seconds, self.owed = [], False
        self.track(row)

    def evaluated(self) -> tuple[dict[str, float], float]:
        """Validation, of the last step at what is deployed, and the bytes sent for that."""
        task, given, sent_bytes = self.task, (self.params, self.state), 0.0
        self.watch.at(self.done.step, "an evaluation", task.config.start_seconds)
        if self.done.step == task.config.steps:
            params, sent_bytes = task.deployed(*given)
            given = (params,)
        found = task.evaluate(*given)
        return {f"val_{name}": value for name, value in found.items()}, sent_bytes

    def copy(self) -> None:
        self.watch.at(self.done.step, "an emergency copy")
        self.count()
        self.require_equal()
        tree = {"params": self.params, "state": self.state}
        record = emergency.record(tree, resume.metadata(self.task, self.done))
        self.copies.keep(self.done.step, tree, record)

    def save(self) -> None:
        if self.copies is not None:
            self.copies.wait()  # otherwise the neighbour of a slow process might end first
        self.count()
        config, step = self.task.config, self.done.step
        self.saved = step
        self.watch.at(step, "a save", config.start_seconds + config.save_seconds)
        self.require_equal()
        tree = {"params": self.params, "state": self.state}
        self.checkpoints.save(step, tree, resume.metadata(self.task, self.done))

    def require_equal(self) -> dict[str, int]:
        """The spread of the parameters for a row; empty if none are replicated."""
        task, step = self.task, self.done.step
        if task.placement.replica_spread is None:
            return {}
        if difference := int(task.placement.replica_spread(self.params, task.mesh)):
            raise Transient(
                f"after step {step} the replicas' parameters are not equal (their checksums differ "
                f"by {difference}): this is a bug in the transformation "
                f"{task.config.optimizer.update!r} or a fault of a device. Earlier checkpoints "
                "hold equal parameters: run again to go on from the last one."
            )
        return {"checksum_spread": 0}
