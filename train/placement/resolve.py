"""A config becomes a placement: the only place that asks which kind of run it is."""

from train.config import Config
from train.placement import on_hosts, replicated, sharded
from train.placement.base import Placement


def resolve(config: Config) -> Placement:
    """Evaluates the expressions of a config.

    Raises:
      ValueError: If an expression is not what its field needs, or fields exclude each other.
    """
    if config.in_shards:
        return on_hosts.resolve(config)
    return (replicated if config.qsdp is None else sharded).resolve(config)
