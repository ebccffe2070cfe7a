"""The command-line options of `--plan`."""

import argparse
import contextlib
import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Options:
    """The numbers that a plan needs; with `measure`, those that are None are measured."""

    measure: bool = False
    link_rate: float | None = None
    """Rate in bit/s of a replica's link, in each direction."""
    link_latency: float | None = None
    """Latency in seconds from one replica to another."""
    compute_seconds: float | None = None
    """Seconds of a step without any exchange."""
    codec_rate: float | None = None
    """Bytes of float32 parameters that are encoded and decoded per second."""


def parse(args: Sequence[str]) -> tuple[Options | None, list[str]]:
    """Takes the options of a plan out of a command line.

    Returns:
      The options, or None without `--plan`; and the remaining arguments.

    Raises:
      SystemExit: With the usage on stderr, if a value is not a positive number.
      ValueError: If there are options of a plan without `--plan`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m train CONFIG.py", add_help=False, allow_abbrev=False
    )
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--measure", action="store_true")
    numbers = [field.name for field in dataclasses.fields(Options) if field.name != "measure"]
    for name in numbers:
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, metavar="X")
    found, rest = parser.parse_known_args(args)
    values = vars(found)
    if not values.pop("plan"):
        rate = values.pop("link_rate")  # a run has one, too
        rest += [] if rate is None else ["--link-rate", str(rate)]
        if any(values.values()):
            given = next(name for name, value in values.items() if value)
            raise ValueError(f"--{given.replace('_', '-')} is for a plan; write --plan as well.")
        return None, rest
    if "--report" in rest:
        raise ValueError("--plan and --report cannot be combined; write one of them.")
    return Options(**values), rest


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r} must be a positive number, like 500e6")
