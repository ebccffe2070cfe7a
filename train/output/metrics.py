"""What a run leaves behind: its record, one row of metrics every few steps, and progress."""

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import tqdm

Row = Mapping[str, Any]
"""`step` and what was measured there: numbers, by name."""


def append(path: pathlib.Path, row: Row) -> None:
    """Appends a row to a JSON Lines file, in one write.

    Numbers that are not finite become null: JSON has no other word for them.

    Args:
      path: The file; made if it is not there.
      row: Numbers (Python's, NumPy's or JAX's scalars) and strings by name.
    """
    line = json.dumps({name: _plain(value) for name, value in row.items()}, allow_nan=False)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the rows of a JSON Lines file; null is None.

    A last line without its newline was cut off by a crash, and is left out.

    Raises:
      ValueError: If there is no such file, or another line is no JSON.
    """
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist; train the run first.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{str(path)!r}, line {number}, is no JSON: {line!r}.") from error
    return rows


def keep_until(path: pathlib.Path, step: int) -> None:
    """Drops the rows after a step, atomically, so that a resumed run repeats none.

    Args:
      path: The JSON Lines file; nothing happens if it is not there.
      step: The last step to keep, that of the restored checkpoint; -1 keeps none.
    """
    if path.is_file():
        kept = [json.dumps(row) + "\n" for row in read(path) if row["step"] <= step]
        write_text(path, "".join(kept))


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file's text atomically: a crash leaves the old file or the new one."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


@contextlib.contextmanager
def tensorboard(folder: pathlib.Path, step: int) -> Iterator[Callable[[Row], None]]:
    """Opens TensorBoard's event files in a folder; they are complete once it is closed.

    Args:
      folder: Where the events go.
      step: The last step to keep, as in `keep_until`; TensorBoard hides later events.

    Yields:
      A function that writes the numbers of a row as scalars at its step.

    Raises:
      ValueError: If the extra is not installed.
    """
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "tensorboard=True needs the package tensorboardX; "
            "run pip install -e '.[tensorboard]' in the checkout."
        )
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder), purge_step=step + 1, flush_secs=10) as writer:

        def write(row: Row) -> None:
            scalars = {name: _plain(value) for name, value in row.items() if name != "step"}
            for name, value in scalars.items():
                if isinstance(value, int | float):
                    writer.add_scalar(name, value, int(row["step"]))

        yield write


def run_record(config_json: str, data: Row, plan: Any) -> str:
    """Writes down what a run depends on, as JSON text.

    Args:
      config_json: The resolved configuration, of `as_json.to_json`.
      data: The record of the corpus.
      plan: What travels compressed and what exact; plain values.

    Returns:
      JSON with keys config, versions, hardware, data and plan.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    record = {
        "config": json.loads(config_json),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": hardware_name(),
        "data": dict(data),
        "plan": plan,
    }
    return json.dumps(record, indent=2)


def hardware_name() -> str:
    """Names what computes: the processor and its cores, or the accelerators."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    name = platform.processor() or platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            break
    return f"{name}, {os.cpu_count()} cores"


# Without tqdm's own rate, of which compilation, evaluations and saves are a part.
_BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"


@contextlib.contextmanager
def progress(name: str, first: int, steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """Shows a run's progress on stderr: a bar on a terminal, else a line every 10 seconds.

    Args:
      name: Of the run.
      first: Steps that were done before, by the run that this one resumes.
      steps: Steps of the whole run.

    Yields:
      `show(step, loss, step_seconds)`: `step` steps are done, the others are of the last row.
    """
    if sys.stderr.isatty():
        with tqdm.tqdm(total=steps, initial=first, desc=name, bar_format=_BAR) as bar:

            def show(step: int, loss: float, step_seconds: float) -> None:
                bar.set_postfix_str(f"loss {loss:.3f}, {step_seconds:.3f} s/step", refresh=False)
                bar.update(step - bar.n)

            yield show
    else:
        yield _lines(name, first, steps)


def _lines(name: str, first: int, steps: int, every: float = 10.0) -> Callable[..., None]:
    start = shown = time.monotonic()

    def show(step: int, loss: float, step_seconds: float) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < every and step < steps:
            return
        shown = now
        # Evaluations and saves come again: they are a part of what is left.
        left = tqdm.tqdm.format_interval((now - start) / max(1, step - first) * (steps - step))
        print(
            f"{name}: step {step}/{steps}, loss {loss:.3f}, {step_seconds:.3f} s/step, {left} left",
            file=sys.stderr,
            flush=True,
        )

    return show


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
