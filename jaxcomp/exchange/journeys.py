"""Journeys: exchanges that pause at each message, so that other work can run meanwhile.

A journey is a generator. It yields a `Hop` for each message, receives what that hop's collective
returns, and returns its result. Journeys that run together pause together; their pace decides
what a step computes meanwhile.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
from jax.flatten_util import ravel_pytree

from jaxcomp._printing import by_name
from jaxcomp.compressors.platforms import platform
from jaxcomp.replicas.types import varying_axes


class Hop(NamedTuple):
    """A message that is ready to send."""

    collective: Callable[[Any], Any]
    message: Any  # a tree of arrays, what `collective` takes
    is_sum: bool = False  # of its own entries: then sums over one axis may be joined


Journey = Generator[Hop, Any, Any]
# `(travel, messages) -> received`: called once for each hop, with the messages of all journeys and
# the function that sends them.
Pace = Callable[[Callable[[list[Any]], list[Any]], list[Any]], list[Any]]


@by_name
def at_once(travel: Callable[[list[Any]], list[Any]], messages: list[Any]) -> list[Any]:
    """The pace that computes nothing while messages are sent."""
    return travel(messages)


def completed(journeys: Sequence[Journey], pace: Pace = at_once) -> list[Any]:
    """Runs journeys hop by hop, and returns their results.

    All messages of one hop are built before the first of the next, and none depends on another, so
    a compiler can overlap the arithmetic of one bucket with the message of another.
    """
    results: list[Any] = [None] * len(journeys)
    arrived: dict[int, Any] = dict.fromkeys(range(len(journeys)))
    while arrived:
        hops = {}
        for index, value in arrived.items():
            try:
                hops[index] = journeys[index].send(value)
            except StopIteration as ended:
                results[index] = ended.value
        travel = functools.partial(_travelled, tuple(hops.values()))
        received = pace(travel, [hop.message for hop in hops.values()]) if hops else []
        arrived = dict(zip(hops, received, strict=True))
    return results


def _travelled(hops, messages):
    """What the collectives return. On CPUs sums of one type are one message.

    There nothing is computed while a message is sent, and links idle while a sum starts and ends.
    """
    pairs = list(zip(hops, messages, strict=True))
    sums = [message for hop, message in pairs if hop.is_sum]
    types = {(x.dtype, varying_axes(x)) for x in jax.tree.leaves(sums)}
    if platform() != "cpu" or len(types) != 1:
        return [hop.collective(message) for hop, message in pairs]
    concatenated, parts = ravel_pytree(sums)
    send_sum = next(hop.collective for hop in hops if hop.is_sum)
    totals = iter(parts(send_sum(concatenated)))
    return [next(totals) if hop.is_sum else hop.collective(message) for hop, message in pairs]


def alone(journey: Journey) -> Any:
    """Runs one journey, and returns its result."""
    return completed([journey])[0]


def received(journey: Journey) -> list[Any]:
    """Runs one journey, and returns what its collectives return."""
    arrived: list[Any] = []
    with contextlib.suppress(StopIteration):
        hop = next(journey)
        while True:
            arrived.append(hop.collective(hop.message))
            hop = journey.send(arrived[-1])
    return arrived


def resumed(journey: Journey, arrived: list[Any]) -> Any:
    """The result of a journey like the one that received this; sends nothing.

    What only built messages is not computed again: the compiler drops it.
    """
    try:
        next(journey)
        for value in arrived:
            journey.send(value)
    except StopIteration as ended:
        return ended.value
    raise ValueError(f"the journey has more than {len(arrived)} hops, so it is another one.")
