"""Progress of a run: a bar on a terminal, lines elsewhere, which the launcher shows as a bar."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import tqdm

from jaxcomp.launch.exits import say
from jaxcomp.launch.progress import Line, bar
from train.output.metrics import Row
from train.output.units import size

_EVERY = 10.0  # seconds between lines


@contextlib.contextmanager
def progress(name: str, first: Row, steps: int) -> Iterator[Callable[[Row], None]]:
    """Shows a run's progress on stderr: a bar on a terminal, else a line every 10 seconds.

    Args:
      name: Name of the run.
      first: `step` and `sent_bytes` before this start, if it resumes a run.
      steps: Steps of the whole run.

    Yields:
      `show(row)`, for rows with `step`, `loss`, `step_seconds` and `sent_bytes`.
    """
    rates = _rates(first)
    if sys.stderr.isatty():
        with bar(name, first["step"], steps) as made:

            def show(row: Row) -> None:
                made.set_postfix_str(rates(row), refresh=False)
                made.update(row["step"] - made.n)

            yield show
    else:
        yield _lines(name, first["step"], steps, rates)


@contextlib.contextmanager
def counted(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows the progress of a long task on stderr: a bar, or a line every 10 seconds.

    Args:
      what: Description of the task.
      total: Amount of work; a task of less than a second shows nothing.

    Yields:
      `show(more)`, for this much more of the total.
    """
    if sys.stderr.isatty():
        with tqdm.tqdm(total=total, desc=what, unit="", unit_scale=True, delay=1.0) as made:
            yield made.update
        return
    done, shown = 0, time.monotonic()

    def show(more: int) -> None:
        nonlocal done, shown
        done += more
        if (now := time.monotonic()) - shown >= _EVERY:
            shown = now
            say(f"{what}: {100 * done // max(1, total)}%")

    yield show


def _rates(first: Row) -> Callable[[Row], str]:
    """Makes the text of a row: loss, seconds per step, bytes that a replica sends per second."""
    before = first

    def text(row: Row) -> str:
        nonlocal before
        seconds = (row["step"] - before["step"]) * row["step_seconds"]
        sent = row["sent_bytes"] - before["sent_bytes"]
        before = row
        rate = f", sends {size(sent / seconds)}/s" if sent and seconds else ""
        return f"loss {row['loss']:.3f}, {row['step_seconds']:.3f} s/step{rate}"

    return text


def _lines(name: str, first: int, steps: int, rates: Callable[[Row], str]) -> Callable[[Row], None]:
    start = shown = time.monotonic()

    def show(row: Row) -> None:
        nonlocal shown
        now, step, text = time.monotonic(), row["step"], rates(row)
        if now - shown < _EVERY and step < steps:
            return
        shown = now
        # Evaluations and saves recur, so they are part of the time left.
        left = tqdm.tqdm.format_interval((now - start) / max(1, step - first) * (steps - step))
        say(str(Line(name, step, steps, text, left)))

    return show
