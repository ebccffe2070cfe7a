"""What the launcher takes from a config: logs, newest checkpoint, ways on with fewer processes."""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path

from jaxcomp.launch.program import Plan, Program
from train.checkpoints import files
from train.config.run import Config
from train.program import read


def plan(options: argparse.Namespace, args: Sequence[str]) -> Plan:
    """The plan for the run of a config.

    Raises:
      ValueError: If the config is invalid, or options conflict.
    """
    config, _ = read(list(args))
    if options.min_replicas is not None and not (options.restarts and config.replicas):
        raise ValueError("--min-replicas needs --restarts, and a config with a number of replicas.")
    folder = Path(config.runs_dir, config.name)
    return Plan(
        Path(options.logs or folder / "logs"),
        functools.partial(fewer, config),
        lambda: files.latest(folder / "checkpoints") or 0,
    )


def fewer(config: Config, processes: int, count: int, least: int) -> list[str] | None:
    """Fits replicas and accumulation to fewer processes, with the same global batch.

    A replica's microbatch does not grow, so that it still fits into memory.

    Args:
      config: The run, on `processes` processes.
      processes: Number of processes that it was made for.
      count: Number of processes now.
      least: Least replicas.

    Returns:
      Overrides of the config; None if the batch does not divide, there would be too few replicas,
      or `config.replicas` is 0.
    """
    if not config.replicas or config.replicas % processes:
        return None
    replicas = config.replicas // processes * count
    if replicas < least or replicas % config.fast or config.data.batch % replicas:
        return None
    share, parts_now = config.data.batch // replicas, config.accumulate * processes / count
    accumulate = next(
        parts for parts in range(1, share + 1) if parts >= parts_now and share % parts == 0
    )
    return ["--replicas", str(replicas), "--accumulate", str(accumulate)]


TRAIN = Program(
    module="train.launch",
    noun="config file",
    place="CONFIG",
    own="overrides of the config",
    counted="replicas",
    command=("python", "-m", "train"),
    plan=plan,
)
