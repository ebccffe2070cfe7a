"""The fair rule for learning rates: as many trials for every method, on a seed that is no row.

A method's first trials are the centre of its dense baseline, half and twice that; the baseline is
dense training with the same inner optimizer, which is tuned alike. While the best trial is at an
edge, the next rate beyond it is tried, five trials at most. A trial is a run of a quarter of the
size's steps, with its own whole schedule, on seed 0. Trials are rows of a file beside the rows'.
"""

import argparse
from collections.abc import Callable, Mapping

from benchmarks import rows as rows_file
from benchmarks.methods import Method
from benchmarks.scale_methods import baseline_of
from benchmarks.scale_sizes import SIZES

SEED, MOST = 0, 5


def steps_of(size: str) -> int:
    """Steps of a trial."""
    return SIZES[size].steps // 4


def tune(size: str, method: Method, make: Callable[..., dict]) -> None:
    """Makes a method's missing trials.

    Args:
      size: A key of `SIZES`.
      method: The method, whose baseline has a centre there.
      make: `(steps=, learning_rate=) -> row`; a run that was cut short ends the trials.
    """
    centre, losses = SIZES[size].centres[baseline_of(method)], {}
    rates = [centre, centre / 2, centre * 2]
    while rates:
        row = make(steps=steps_of(size), learning_rate=rates.pop(0))
        if "stopped_at" in row:
            return
        losses[row["learning_rate"]] = row["val_loss"]
        if not rates and len(losses) < MOST:
            rates = beyond(losses)


def beyond(losses: Mapping[float, float | None]) -> list[float]:
    """The next rate, if the best one is the lowest or the highest of all."""
    rate = lowest(losses)
    return [rate / 2] * (rate == min(losses)) + [rate * 2] * (rate == max(losses))


def lowest(losses: Mapping[float, float | None]) -> float:
    """The rate of the lowest loss; None, of a run that diverged, is the highest."""
    return min(losses, key=lambda rate: float("inf") if losses[rate] is None else losses[rate])


def best(args: argparse.Namespace, name: str, known: Mapping[str, Method]) -> float:
    """The best rate of a method's trials; for a size without centres, the table's.

    Raises:
      ValueError: If there are no trials.
    """
    if not SIZES[args.size].centres:
        return known[name].rates[0]
    key = {"task": args.size, "method": name, "seed": SEED, "steps": steps_of(args.size)}
    rows = [row for row in rows_file.read(args.trials) if key.items() <= row.items()]
    losses = {row["learning_rate"]: row["val_loss"] for row in rows if "stopped_at" not in row}
    if len(losses) < 3:
        raise ValueError(
            f"{args.trials} has {len(losses)} trials of {name!r} in {key['steps']} steps; needs 3: "
            "add --tune first, or name a rate, --rate 3e-3."
        )
    return lowest(losses)
