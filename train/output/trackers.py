"""Rows of metrics for TensorBoard, and for Weights & Biases."""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxcomp.launch.regular import named
from train import checks
from train.output import metrics


@contextlib.contextmanager
def tensorboard(folder: pathlib.Path, step: int) -> Iterator[Callable[[metrics.Row], None]]:
    """Opens TensorBoard's event files in a folder.

    Args:
      folder: Where the events go.
      step: The last step to keep, as in `keep_until`; TensorBoard hides later events.

    Yields:
      A function that writes the numbers of a row as scalars at its step; they are on disk when it
      returns.

    Raises:
      ValueError: If the extra is not installed.
      OSError: If it cannot be written.
    """
    checks.require_package("tensorboard=True", "tensorboardX", extra="tensorboard")
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar

    folder.mkdir(parents=True, exist_ok=True)
    # No SummaryWriter: its thread ends at a full disk, and the run would wait for it forever.
    with named(folder):
        events = EventsWriter(str(folder / "events"))
        start = SessionLog(status=SessionLog.START)
        events.write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(row: metrics.Row) -> None:
        now, number = time.time(), int(row["step"])
        with named(folder):
            for name, value in _numbers(row).items():
                events.write_event(Event(wall_time=now, step=number, summary=scalar(name, value)))
            events.flush()

    try:
        yield write
    finally:
        with contextlib.suppress(OSError):  # rows are on disk, but for one of which `write` told
            events.close()


@contextlib.contextmanager
def wandb(
    folder: pathlib.Path, config: dict[str, Any], step: int
) -> Iterator[Callable[[metrics.Row], None]]:
    """Opens a run of Weights & Biases; its environment variables give the project and the mode.

    Args:
      folder: Folder of the run: it gives the name in the project, and keeps the files and the run's
        identity for a resume.
      config: Settings to show.
      step: Steps before this start; 0 begins a new run.

    Yields:
      A function that logs the numbers of a row at its step.

    Raises:
      ValueError: If the extra is not installed, or nobody has logged in.
      ConnectionError: If the service does not answer.
    """
    checks.require_package("wandb=True", "wandb", extra="wandb")
    import wandb as client

    identity = folder / "wandb_id.txt"
    known = identity.read_text().strip() if step and identity.is_file() else None
    try:
        run = client.init(
            project=os.environ.get("WANDB_PROJECT", "jaxcomp"),
            name=folder.name,
            id=known,
            resume="allow",
            dir=str(folder),
            config=config,
        )
    except (client.errors.UsageError, client.errors.CommError) as error:
        kind = ConnectionError if isinstance(error, client.errors.CommError) else ValueError
        reason = str(error).rstrip(".")
        raise kind(f"wandb=True: {reason}; or write WANDB_MODE=offline.") from error
    metrics.write_text(identity, f"{run.id}\n")
    try:
        yield lambda row: run.log(_numbers(row), step=int(row["step"]))
    except BaseException:
        with contextlib.suppress(OSError):  # of the same disk: the run's own error says more
            run.finish()
        raise
    with named(folder / "wandb"):
        run.finish()


def _numbers(row: metrics.Row) -> dict[str, int | float]:
    """The finite numbers of a row, without its step."""
    values = {name: metrics.plain(value) for name, value in row.items() if name != "step"}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
