"""The messages of a compiled program: where they start and end, and what overlaps with them.

The text is in the order in which the program runs. On GPUs nothing overlaps with a message in a
`while` or a `cond`, or with one that has no separate start and done.
"""

from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import Mesh

from benchmarks.accelerators_program import COLLECTIVES, Program
from jaxcomp.measure import hlo
from jaxcomp.measure.hlo import (
    axes_crossed,
    axes_of_groups,
    positions_of,
    replica_groups,
    source_target_pairs,
)

_START, _DONE = '"AsyncCollectiveStart"', '"AsyncCollectiveDone"'


class Message(NamedTuple):
    """A collective at one place of a program.

    Attributes:
      op: Such as `all-gather`.
      axes: The mesh axes that it crosses.
      computation: The name of its computation.
      start: Its place there; `done` is the place where its result is first available. They are
        equal if nothing can overlap.
      inside: Whether it is in a `while` or a `cond`.
      num_bytes: Bytes of its result.
    """

    op: str
    axes: tuple[str, ...]
    computation: str
    start: int
    done: int
    inside: bool
    num_bytes: int

    @property
    def asynchronous(self) -> bool:
        """Whether something may overlap with it."""
        return self.done > self.start


class Overlap(NamedTuple):
    """Matrix products of the gradient around the messages over some axis, as shares of all.

    Attributes:
      beside: Products between the start and the done of a message.
      span: Products between the first start and the last done of the entry computation.
      after_first: Products after the first start, asynchronous or not.
      bytes_asynchronous: Not of products: the share of all bytes in asynchronous messages.
    """

    beside: float
    span: float
    after_first: float
    bytes_asynchronous: float


def messages(program: Program, mesh: Mesh) -> list[Message]:
    """Lists all messages between devices of the mesh, in the program's order."""
    positions = positions_of("", mesh)
    axes_of = axes_of_groups(mesh, positions)
    found = _found(program, program.module.entry, False)
    placed = [
        Message(_op(line), _axes(line, axes_of, positions, mesh), *where) for line, where in found
    ]
    return [message for message in placed if message.axes]


def overlap(program: Program, crossing: list[Message]) -> Overlap:
    """The overlap of the schedule with some messages of a program; zeros without any product."""
    total = program.cost.products
    entry = program.module.entry
    if not total or not crossing:
        return Overlap(0.0, 0.0, 0.0, 0.0)
    weights = _weights(program, entry)
    own = [m for m in crossing if m.asynchronous and m.computation == entry]
    first, last = min((m.start for m in own), default=0), max((m.done for m in own), default=0)
    sends = {m.computation for m in crossing} - {entry}
    begun = [m.start for m in crossing if m.computation == entry]
    begun += [i for i, line in enumerate(_lines(program, entry)) if _reaches(program, line, sends)]
    return Overlap(
        _covered(program, entry, crossing) / total,
        sum(weights[first + 1 : last]) / total,
        sum(weights[min(begun) + 1 :]) / total,
        sum(m.num_bytes for m in crossing if m.asynchronous) / sum(m.num_bytes for m in crossing),
    )


def _found(program, name, inside) -> Iterator[tuple[hlo.Instruction, tuple]]:
    """Each message's line and place, including those of called computations."""
    lines = _lines(program, name)
    for place, line in enumerate(lines):
        sent = _sent_by(program, line)
        if sent is not None:
            done = _done(program, lines, place, sent)
            # What starts a message has a tuple of what goes and what comes.
            brings = lines[done] if sent.op.endswith("-start") else sent
            yield sent, (name, place, done, inside, hlo.num_bytes(brings.type))
        elif line.op in ("while", "conditional", "call"):
            for role, _, callee in hlo.called(line):
                if role != "condition":
                    yield from _found(program, callee, inside or line.op != "call")


def _sent_by(program: Program, line: hlo.Instruction) -> hlo.Instruction | None:
    """The collective that a line starts, or is."""
    if line.op.removesuffix("-start") in COLLECTIVES:
        return line
    if line.op not in ("async-start", "fusion"):
        return None
    inner = [
        one for computation in program.inner(line) for one in computation.instructions.values()
    ]
    starts = any(_START in one.attributes for one in inner)
    # The later pieces of a TPU's asynchronous collective are in fusions, too.
    sent = (one for one in inner if one.op in COLLECTIVES and (starts or hlo.chain(one) is None))
    return next(sent, None)


def _done(program, lines, place, sent) -> int:
    """Where a message is done; its own place if it is not asynchronous."""
    if '"is_sync":true' in sent.attributes:  # a pair all the same, on some versions
        return place
    names = {lines[place].name}
    for later in range(place + 1, len(lines)):
        line = lines[later]
        if line.op == "async-update" and not names.isdisjoint(line.operands):
            names.add(line.name)
        elif line.op.endswith("-done") and not names.isdisjoint(line.operands):
            return later
        elif line.op == "fusion" and hlo.chain(sent) and _ends(program, line, hlo.chain(sent)):
            return later
    return place


def _ends(program, line, chain) -> bool:
    inner = _called_lines(program, line)
    ends = any(_DONE in one.attributes for one in inner)
    return ends and any(hlo.chain(one) == chain for one in inner)


def _op(line: hlo.Instruction) -> str:
    return line.op.removesuffix("-start")


def _axes(line, axes_of, positions, mesh) -> tuple[str, ...]:
    if line.op.startswith("collective-permute"):
        return axes_crossed(source_target_pairs(line.attributes), positions, mesh)[0]
    groups = replica_groups(line.attributes, mesh.size)
    return axes_of.get(frozenset(map(frozenset, groups)), ("?",))


def _lines(program: Program, name: str) -> list[hlo.Instruction]:
    return list(program.module.computations[name].instructions.values())


def _called_lines(program: Program, line: hlo.Instruction) -> list[hlo.Instruction]:
    return [one for called in program.inner(line) for one in called.instructions.values()]


def _weights(program: Program, name: str) -> list[int]:
    """The products of each line of a computation, those of what it calls included."""
    computation = program.module.computations[name]
    lines = computation.instructions.values()
    return [program.of_instruction(computation, line).products for line in lines]


def _reaches(program: Program, line: hlo.Instruction, names: set[str]) -> bool:
    """Whether a line calls a computation of these names."""
    if line.op not in ("while", "conditional", "call") or not names:
        return False
    called = [name for role, _, name in hlo.called(line) if role != "condition"]
    return any(
        name in names or any(_reaches(program, one, names) for one in _lines(program, name))
        for name in called
    )


def _covered(program: Program, name: str, crossing: list[Message]) -> int:
    """Products that overlap with a message, in one run of a computation."""
    weights, lines = _weights(program, name), _lines(program, name)
    beside = set()
    for message in crossing:
        if message.computation == name:
            beside.update(range(message.start + 1, message.done))
    total = 0
    for place, (line, weight) in enumerate(zip(lines, weights, strict=True)):
        if place in beside or not weight:
            total += weight
        elif line.op in ("while", "conditional", "call"):
            names = [callee for role, _, callee in hlo.called(line) if role != "condition"]
            inner = max(_covered(program, callee, crossing) for callee in names)
            computation = program.module.computations[name]
            rounds = program.rounds(computation, line) if line.op == "while" else 1
            total += inner * (rounds or 0)
    return total
