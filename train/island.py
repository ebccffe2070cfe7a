"""A run that is one island of several: it joins the others over a bucket or a folder."""

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from typing import Any

from jaxcomp import islands
from train.config import Config, expression


def member_of(config: Config, params: Any) -> islands.Island:
    """Joins the run of islands that a config names.

    Args:
      config: The run; its name is the island's.
      params: The parameters to begin with, which the first island gives to all.

    Raises:
      ValueError: If `join` is no call, or as `jaxcomp.islands.join`.
      OSError: If the store refuses.
    """
    options = expression.evaluate(config.join, {**vars(islands), "join": dict})
    try:
        return islands.join(config.island, params, name=config.name, **options)
    except TypeError as error:
        raise ValueError(f"join={config.join!r}: {error}") from error


@contextlib.contextmanager
def mistakes_named() -> Iterator[None]:
    """Raises a ValueError where another island has taken the name over.

    A machine that started this one again would take it back, and so on without end.
    """
    try:
        yield
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # but JAX's, or `Transient`
            raise
        raise ValueError(str(error)) from error


def with_own_order(config: Config) -> Config:
    """The config with another order of the data, that of the island's name; else unchanged."""
    if config.island is None:
        return config
    seed = zlib.crc32(f"{config.seed} {config.name}".encode())
    return dataclasses.replace(config, seed=seed)


def facts(island: islands.Island) -> dict[str, int]:
    """What an island adds to a row of metrics."""
    return {
        "outer_steps": island.rounds,
        "members": len(island.last.members) if island.last else 0,
        "island_bytes": island.sent_bytes,
    }
