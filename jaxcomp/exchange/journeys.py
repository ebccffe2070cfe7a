"""Exchanges as journeys, which stop where a message travels: there others may go on.

A journey is a generator. It yields a `Hop` wherever it sends, is sent what that hop's collective
returns, and returns its result. Journeys that run together stop together; their pace decides
what a step computes meanwhile.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from jaxcomp._printing import by_name


class Hop(NamedTuple):
    """A message that is ready to leave."""

    collective: Callable[[Any], Any]
    message: Any  # a tree of arrays, what `collective` takes


Journey = Generator[Hop, Any, Any]
# `(travel, messages) -> received`: called once for each hop, with the messages of all journeys and
# what sends them.
Pace = Callable[[Callable[[list[Any]], list[Any]], list[Any]], list[Any]]


@by_name
def at_once(travel: Callable[[list[Any]], list[Any]], messages: list[Any]) -> list[Any]:
    """The pace of journeys that nothing waits beside."""
    return travel(messages)


def completed(journeys: Sequence[Journey], pace: Pace = at_once) -> list[Any]:
    """Runs journeys hop by hop, and returns their results.

    All messages of one hop are made before the first of the next, and none depends on another:
    a compiler finds the arithmetic of one bucket to put beside the message of another.
    """
    results: list[Any] = [None] * len(journeys)
    arrived: dict[int, Any] = dict.fromkeys(range(len(journeys)))
    while arrived:
        hops = {}
        for index, value in arrived.items():
            try:
                hops[index] = journeys[index].send(value)
            except StopIteration as home:
                results[index] = home.value
        travel = functools.partial(_travelled, tuple(hops.values()))
        received = pace(travel, [hop.message for hop in hops.values()]) if hops else []
        arrived = dict(zip(hops, received, strict=True))
    return results


def _travelled(hops, messages):
    return [hop.collective(message) for hop, message in zip(hops, messages, strict=True)]


def alone(journey: Journey) -> Any:
    """Runs one journey, and returns its result."""
    return completed([journey])[0]
