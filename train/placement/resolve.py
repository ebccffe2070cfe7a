"""Turns a config into a placement; the only place that depends on the kind of run."""

from train.config import Config
from train.placement import replicated, sharded
from train.placement.base import Placement


def resolve(config: Config) -> Placement:
    """Evaluates the expressions of a config.

    Raises:
      ValueError: If an expression does not fit its field, or fields conflict.
    """
    return (replicated if config.qsdp is None else sharded).resolve(config)
