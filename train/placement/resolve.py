"""Turns a config into a placement; the only place that depends on the kind of run."""

from train.config import Config
from train.placement import on_hosts, replicated, sharded
from train.placement.base import Placement


def resolve(config: Config) -> Placement:
    """Evaluates the expressions of a config.

    Raises:
      ValueError: If an expression does not fit its field, or fields conflict.
    """
    if config.in_shards:
        return on_hosts.resolve(config)
    return (replicated if config.qsdp is None else sharded).resolve(config)
