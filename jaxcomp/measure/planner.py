"""Predicts whether compression pays: the step time of each method, from measured parts.

A step takes the sum of gradient, codec and messages. If a method sends while it computes, a step
that sends takes the longer of gradient and messages instead. Nothing runs here:
`jaxcomp.measure.link_probe` and `step_probe` measure the parts, or you give them.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from jaxcomp._checks import require
from jaxcomp._printing import aligned


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of one collective as a function of its bytes: piecewise linear.

    A single slope does not fit links that let bursts pass and shape the rest. Below the first point
    the time is constant; beyond the last one the last line goes on.

    Attributes:
      sent_bytes: Bytes that leave one replica at each point, increasing; two or more.
      seconds: Seconds at each point, not decreasing; at least 0.
    """

    sent_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self):
        sizes, times = self.sent_bytes, self.seconds
        grow = all(a < b for a, b in itertools.pairwise(sizes))
        fall = any(a > b for a, b in itertools.pairwise(times))
        known = all(0 <= x < math.inf for x in (*sizes, *times))
        if len(sizes) < 2 or len(sizes) != len(times) or not grow or fall or not known:
            raise ValueError(
                f"sent_bytes={sizes} and seconds={times} are no cost; write two or more growing "
                "sizes and as many times that do not fall, all finite, or affine_cost(1e-3, 500e6)."
            )


def affine_cost(latency: float, rate: float) -> Cost:
    """The cost of a collective that takes `latency + 8 * sent_bytes / rate` seconds.

    Args:
      latency: Seconds of an empty collective, with all its rounds; at least 0.
      rate: Rate in bit/s at which bytes leave one replica, above 0; `math.inf` for no limit.

    Raises:
      ValueError: For a latency or a rate out of range.
    """
    if not 0 <= latency < math.inf:
        raise ValueError(f"latency={latency} is no time; write seconds, like 1e-3.")
    if not rate > 0:
        raise ValueError(f"rate={rate} carries nothing; write bit/s, like 500e6.")
    return Cost((0.0, 1e6), (latency, latency + 8e6 / rate))


def cost_seconds(cost: Cost, sent_bytes: float) -> float:
    """Seconds of one collective of this cost."""
    points = list(zip(cost.sent_bytes, cost.seconds, strict=True))
    if sent_bytes <= points[0][0]:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    (x, t), (x_next, t_next) = next((p for p in pairs if sent_bytes <= p[1][0]), pairs[-1])
    return t + (sent_bytes - x) * (t_next - t) / (x_next - x)


Link = Mapping[str, Cost]
"""Costs by HLO name, such as `all-reduce`. Other collectives are charged the highest of these."""


def uniform_link(rate: float, latency: float, num_replicas: int) -> dict[str, Cost]:
    """The costs of a network that only rate and latency limit.

    Args:
      rate: Rate in bit/s of each replica's link, in each direction.
      latency: Latency in seconds from one replica to another.
      num_replicas: R, at least 2.

    Returns:
      A `Link`: ring all-reduces of 2 (R-1) rounds, ring all-gathers of R-1, all-to-alls of one.

    Raises:
      ValueError: For fewer than two replicas, or a rate or latency out of range.
    """
    if num_replicas < 2:
        raise ValueError(
            f"num_replicas={num_replicas}: one replica has nobody to send to; write 2 or more."
        )
    rounds = {"all-reduce": 2 * (num_replicas - 1), "all-gather": num_replicas - 1, "all-to-all": 1}
    return {op: affine_cost(count * latency, rate) for op, count in rounds.items()}


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective of a method's step.

    Attributes:
      op: Its HLO name.
      sent_bytes: Bytes that leave one replica in one execution, as `report` counts them.
      times: Executions per step, averaged over a run: a fraction if rounds are skipped.
    """

    op: str
    sent_bytes: float
    times: float = 1.0


@dataclasses.dataclass(frozen=True)
class Method:
    """The additions of a method to a step.

    Attributes:
      name: Name of its row.
      messages: What it sends.
      codec_seconds: Seconds per step, averaged over a run, that its update takes longer than one
        without compression, without messages.
      memory_bytes: Bytes that a device holds for the update; 0 if unknown.
      changes: How it changes the algorithm, in a few words; "" for the exact mean.
      overlaps: Number of steps whose computation overlaps with its messages, before the step waits
        for the rest: 1 if a message is known before the gradient, as with a delay of one step.
    """

    name: str
    messages: tuple[Message, ...]
    codec_seconds: float = 0.0
    memory_bytes: int = 0
    changes: str = ""
    overlaps: float = 0.0


def over_bucket(
    message_bytes: float, num_islands: int, every: int, delay: int = 0, name: str = "islands"
) -> Method:
    """The exchange of `jaxcomp.islands`, on the link of each island; the store's has no limit.

    In a round an island writes its message and reads all others'. Each request waits for an answer:
    the message, a list, the members, and the others' messages.

    Args:
      message_bytes: Bytes of one island's difference.
      num_islands: R, at least 2.
      every: Steps between two rounds.
      delay: Steps from a message to the outer step, whose computation hides the round.
      name: Name of its row.

    Raises:
      ValueError: For numbers outside these ranges.
    """
    sent = 0 <= message_bytes < math.inf
    require(sent, "over_bucket", "bytes", "message_bytes=4e6", message_bytes=message_bytes)
    require(num_islands >= 2, "over_bucket", "at least 2", "num_islands=4", num_islands=num_islands)
    require(every >= 1, "over_bucket", "at least 1", "every=100", every=every)
    require(delay >= 0, "over_bucket", "at least 0", "delay=10", delay=delay)
    moved = Message("all-to-all", num_islands * message_bytes, 1 / every)
    waits = (Message("all-to-all", 0.0, 1 / every),) * (2 * (num_islands + 2) - 1)
    changes = f"{every} local steps, over a bucket"
    return Method(name, (moved, *waits), changes=changes, overlaps=float(delay))


@dataclasses.dataclass(frozen=True)
class Row:
    """A method with its predicted times, in seconds per step; see `Method` for the rest."""

    method: Method
    step_seconds: float
    network_seconds: float
    sent_bytes: float  # that leave one replica in a step, averaged over a run


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predictions of all methods, and the recommended one."""

    rows: tuple[Row, ...]  # in the order of the methods
    compute_seconds: float  # of a step without any exchange
    recommended: Row
    compress: bool  # False: the recommended method is the exact mean
    reason: str  # of the recommendation, in one line


def network_seconds(messages: Sequence[Message], link: Link) -> float:
    """Seconds per step that messages take, one at a time."""

    def seconds(message):
        costs = [link[message.op]] if message.op in link else link.values()
        return max(cost_seconds(cost, message.sent_bytes) for cost in costs)

    return sum(message.times * seconds(message) for message in messages)


def plan(
    methods: Sequence[Method], link: Link, compute_seconds: float, tolerance: float = 0.05
) -> Plan:
    """Predicts the step time of every method, and recommends one, or not to compress.

    It recommends the first method that is within `tolerance` of the fastest: methods that change
    the algorithm less come first, and a small gain is no reason to take a later one.

    Args:
      methods: Methods with different names; those that change least first. One must be without
        `changes`.
      link: The network between the replicas.
      compute_seconds: Seconds of a step without any exchange: gradient and update.
      tolerance: Accepted slowdown as a share of the fastest step, at least 0.

    Raises:
      ValueError: If there is no exact method, names repeat, or a number is out of range.

    References:
      The model of latency and rate: Thakur et al., Optimization of Collective Communication
      Operations in MPICH, 2005, Section 3; bytes are read from the program, not modelled.
      Compression rarely pays in data centres: Agarwal et al., `On the Utility of Gradient
      Compression in Distributed Training Systems <https://arxiv.org/abs/2103.00543>`_, 2022.
    """
    if not 0 <= compute_seconds < math.inf:
        raise ValueError(f"compute_seconds={compute_seconds} is no time; write seconds, like 0.5.")
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance} must be at least 0; write 0.05.")
    if not link:
        raise ValueError("the link has no costs; write uniform_link(500e6, 1e-3, num_replicas).")
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"names of methods repeat: {names}; give each its own.")
    if all(method.changes for method in methods):
        raise ValueError(
            f"none of {names} is exact, so there is no baseline; add the dense "
            "mean, a Method with changes=''."
        )
    rows = tuple(_row(method, link, compute_seconds) for method in methods)
    for row in rows:
        known = 0 <= row.step_seconds < math.inf
        needs, write = "finite times and bytes of each method", "codec_seconds=0.0"
        require(known, "plan", needs, write, method=row.method.name, step_seconds=row.step_seconds)
    fastest = min(row.step_seconds for row in rows)
    recommended = next(row for row in rows if row.step_seconds <= (1 + tolerance) * fastest)
    compress = bool(recommended.method.changes)
    reason = _reason(rows, recommended, fastest)
    return Plan(rows, compute_seconds, recommended, compress, reason)


def _row(method: Method, link: Link, compute_seconds: float) -> Row:
    network = network_seconds(method.messages, link)
    busy = compute_seconds + _waiting(method, link, compute_seconds)
    sent = sum(m.times * m.sent_bytes for m in method.messages)
    return Row(method, busy + method.codec_seconds, network, sent)


def _waiting(method: Method, link: Link, compute_seconds: float) -> float:
    """Seconds per step of waiting for messages, averaged over a run.

    Messages that are sent equally often are assumed to be sent in the same steps.
    """
    waiting = 0.0
    for times in {min(m.times, 1.0) for m in method.messages if m.times > 0}:
        together = [m for m in method.messages if min(m.times, 1.0) == times]
        step_seconds = network_seconds(together, link) / times
        waiting += times * max(0.0, step_seconds - method.overlaps * compute_seconds)
    return waiting


def _reason(rows: Sequence[Row], recommended: Row, fastest: float) -> str:
    dense = min((r for r in rows if not r.method.changes), key=lambda r: r.step_seconds)
    share = dense.network_seconds / dense.step_seconds if dense.step_seconds else 0.0
    share_text = f"the network takes {share:.0%} of a step with {dense.method.name}"
    if not recommended.method.changes:
        gain = 1 - fastest / dense.step_seconds if dense.step_seconds else 0.0
        return f"do not compress: {share_text}, and the best code would save {gain:.0%} of the step"
    gain = dense.step_seconds / recommended.step_seconds
    return f"{recommended.method.name}: {share_text}; this is {gain:.2f} times as fast"


def table(planned: Plan) -> str:
    """Formats a plan as text: a line per method, then the recommendation."""
    head = "method", "step", "of it network", "codec", "bytes sent", "memory", "changes"
    lines = [head, *map(_cells, planned.rows)]
    alone = f"without an exchange a step takes {_milliseconds(planned.compute_seconds)}"
    return "\n".join([*aligned(lines, numbers=range(1, 6)), alone, planned.reason])


def _cells(row: Row) -> tuple[str, ...]:
    method = row.method
    seconds = row.step_seconds, row.network_seconds, method.codec_seconds
    memory = f"{method.memory_bytes / 2**20:,.0f} MiB" if method.memory_bytes else ""
    sent = f"{row.sent_bytes:,.0f}"
    return method.name, *map(_milliseconds, seconds), sent, memory, method.changes or "nothing"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"
