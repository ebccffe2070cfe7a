"""What a compiled program does, from its scheduled text: kernels, and messages.

Kernels: loops count as often as they run, and of a conditional the branch that moves most. What a
fusion slices out of an operand counts as the slice, and what it updates in place as the update.
Each value of a scatter counts as a sector, which a GPU reads and writes. Arrays that a TPU keeps on
its chip do not count. Messages are no kernels.

Messages: the text is in the order in which the program runs. On GPUs nothing overlaps with a
message in a `while` or a `cond`, or with one that has no separate start and done.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from jax.sharding import Mesh

from jaxcomp.measure import hlo
from jaxcomp.measure.hlo import (
    axes_crossed,
    axes_of_groups,
    positions_of,
    replica_groups,
    source_target_pairs,
)

GUESSED_ROUNDS = 32
"""What a loop of unknown length counts as."""

COLLECTIVES = frozenset(
    "all-reduce all-gather all-to-all reduce-scatter collective-permute collective-broadcast "
    "ragged-all-to-all".split()
)
# What takes no kernel: names, views, marks, and what another line counts.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast reshape after-all partition-id replica-id "
    "optimization-barrier opt-barrier add-dependency async-update async-done copy-start "
    "slice-start fusion-done while conditional call async-start".split()
)
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone")
_PRODUCTS = ("dot", "convolution")
_LIBRARIES = ("cublas", "cudnn", "gemm")
_FUSIONS = ("fusion", "fusion-start")
_CALLS = ("while", "conditional", "call")
_VIEWS = ("bitcast", "reshape")
_SLICES = ("slice", "dynamic-slice", "gather")
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^{}]*\})?")
_SECTOR = 32  # bytes that a GPU moves for a value
# In the layout of a TPU's array: tiles, and a memory that is not the main one.
_ON_CHIP = re.compile(r"T\(.*S\([1-9]")


class Cost(NamedTuple):
    """Of one run of a computation.

    Attributes:
      moved: Bytes that kernels read from main memory and write to it.
      kernels: That run.
      loops: `while`s, each counted once.
      unknown_loops: Those of them whose length the program does not say.
      products: Matrix products of the gradient.
    """

    moved: int = 0
    kernels: int = 0
    loops: int = 0
    unknown_loops: int = 0
    products: int = 0


class Program:
    """A parsed program, with what its computations cost.

    Args:
      text: What `jax.stages.Compiled.as_text` returns.
    """

    def __init__(self, text: str):
        self.module = hlo.parse(text)
        self.of_computation = functools.cache(self._of_computation)
        self._read = functools.cache(lambda name: _shares_read(self.module.computations[name]))

    @property
    def cost(self) -> Cost:
        """Of the whole program."""
        return self.of_computation(self.module.entry)

    def rounds(self, computation: hlo.Computation, loop: hlo.Instruction) -> int | None:
        """How often a loop's body runs; None if the program does not say."""
        return hlo.trip_count(self.module, computation, loop)

    def inner(self, instruction: hlo.Instruction) -> list[hlo.Instruction]:
        """The lines of the computations that an instruction names."""
        return [line for _, _, name in hlo.called(instruction) for line in _lines(self, name)]

    def of_instruction(self, computation: hlo.Computation, instruction: hlo.Instruction) -> Cost:
        """Cost of one line, with what it calls."""
        op = instruction.op
        names = _bodies(instruction)
        if op == "while":
            return self._loop(self.rounds(computation, instruction), names[0])
        if op == "conditional":
            return max(map(self.of_computation, names))
        if op in ("call", "async-start"):
            return self.of_computation(names[0])
        if _is_free(instruction):
            return Cost()
        moved, product = self._moved(computation, instruction, names), self.is_product(instruction)
        return Cost(moved=moved, kernels=1, products=int(product))

    def is_product(self, instruction: hlo.Instruction) -> bool:
        """Whether a kernel is a matrix product of the gradient: what codes multiply is none."""
        if instruction.op in _FUSIONS:
            return any(map(_of_gradient, self.inner(instruction)))
        return _of_gradient(instruction)

    def _of_computation(self, name: str) -> Cost:
        computation = self.module.computations[name]
        return _sum(self.of_instruction(computation, line) for line in _lines(self, name))

    def _loop(self, rounds: int | None, body: str) -> Cost:
        once, times = self.of_computation(body), GUESSED_ROUNDS if rounds is None else rounds
        return Cost(
            moved=times * once.moved,
            kernels=times * (once.kernels + 1),  # the condition, too
            loops=1 + once.loops,
            unknown_loops=(rounds is None) + once.unknown_loops,
            products=times * once.products,
        )

    def _moved(self, computation, instruction, names) -> int:
        whole = [_type(computation, operand) for operand in instruction.operands]
        if instruction.op in (*_SLICES, "copy-done", "slice-done"):
            start = computation.instructions.get(instruction.operands[0])
            is_done = instruction.op.endswith("-done")
            source = _type(computation, start.operands[0]) if is_done else whole[0]
            return _between(instruction.type, source, instruction.type)
        if instruction.op == "dynamic-update-slice":
            return _between(whole[1], whole[1], instruction.type)
        sizes = [_main_bytes(of) for of in whole]
        if instruction.op not in _FUSIONS:
            once = dict(zip(instruction.operands, sizes, strict=True))
            return _main_bytes(instruction.type) + sum(once.values())
        fused = self.module.computations[names[0]]
        read = self._read(names[0])
        # The type of an asynchronous one has its operands, too.
        is_start = instruction.op == "fusion-start"
        made = fused.instructions[fused.root].type if is_start else instruction.type
        return _written(fused, made) + sum(
            round(size * read.get(place, 0.0)) for place, size in enumerate(sizes)
        )


def _main_bytes(type_: str) -> int:
    """Bytes of the arrays in a type that are in main memory."""
    return sum(hlo.num_bytes(array) for array in _ARRAY.findall(type_) if _is_in_main(array))


def _is_in_main(type_: str) -> bool:
    return not _ON_CHIP.search(type_)


def _between(copied: str, source: str, target: str) -> int:
    """Bytes that a copy of type `copied` reads and writes in main memory."""
    return hlo.num_bytes(copied) * sum(map(_is_in_main, (source, target)))


def _sum(costs) -> Cost:
    return Cost(*map(sum, zip(*costs, strict=True))) if (costs := list(costs)) else Cost()


def _is_free(instruction: hlo.Instruction) -> bool:
    op = instruction.op
    base = op.removesuffix("-start").removesuffix("-done")
    if op == "custom-call":
        return any(f'"{name}"' in instruction.attributes for name in _FREE_CALLS)
    return op in _FREE or base in COLLECTIVES


def _of_gradient(instruction: hlo.Instruction) -> bool:
    """JAX names what it differentiates `jvp(...)`, and its transpose `transpose(jvp(...))`."""
    op, attributes = instruction.op, instruction.attributes
    library = op == "custom-call" and any(name in attributes for name in _LIBRARIES)
    return (op in _PRODUCTS or library) and "jvp(" in attributes


def _type(computation: hlo.Computation, name: str) -> str:
    found = computation.instructions.get(name)
    return "" if found is None else found.type


def _size(computation: hlo.Computation, name: str) -> int:
    return hlo.num_bytes(_type(computation, name))


def _shares_read(fused: hlo.Computation) -> dict[int, float]:
    """The share of each of its operands that a fusion reads, by the operand's number.

    A fusion computes what is asked of it, element by element: of what is sliced behind some
    arithmetic, the slice is read.
    """
    in_place = {line.name: line for line in _results(fused) if _is_update(line)}
    shares, read = {fused.root: 1.0}, {}
    for line in reversed(fused.instructions.values()):
        share = min(1.0, shares.get(line.name, 0.0))
        if line.op == "parameter":
            read[int(line.argument)] = share
            continue
        for operand in set(line.operands):
            part = 1.0
            if operand == line.operands[0] and line.op in _SLICES:
                part = hlo.num_bytes(line.type) / max(1, _size(fused, operand))
            elif operand == line.operands[0] and line.name in in_place:
                is_scatter = line.op == "scatter"
                part = _updated(fused, line) / hlo.num_bytes(line.type) if is_scatter else 0.0
            shares[operand] = shares.get(operand, 0.0) + share * part
    return read


def _written(fused: hlo.Computation, type_: str) -> int:
    """Bytes of main memory that a fusion writes of its results, whose types are `type_`."""
    # A custom call may make several results by itself, and updates none.
    pairs = zip(_ARRAY.findall(type_), _results(fused), strict=False)
    updates = [pair for pair in pairs if _is_update(pair[1]) and _is_in_main(pair[0])]
    stays = lambda array, line: hlo.num_bytes(array) - _updated(fused, line)
    return _main_bytes(type_) - sum(stays(*update) for update in updates)


def _results(fused: hlo.Computation) -> list[hlo.Instruction]:
    """What makes each of a fusion's results."""
    root = fused.instructions[fused.root]
    names = root.operands if root.op == "tuple" else [root.name]
    return [_behind_views(fused, fused.instructions[name]) for name in names]


def _is_update(result: hlo.Instruction) -> bool:
    """Whether a slice of the result is updated, and all else stays where it is."""
    return result.op in ("dynamic-update-slice", "scatter")


def _updated(fused: hlo.Computation, update: hlo.Instruction) -> int:
    """Bytes of the result that an update writes."""
    if update.op == "dynamic-update-slice":
        return _size(fused, update.operands[1])
    whole, values = hlo.num_bytes(update.type), _size(fused, update.operands[2])
    width = hlo.num_bytes(update.type.split("[")[0] + "[]")
    return min(whole, values * _SECTOR // width)


def _behind_views(fused: hlo.Computation, line: hlo.Instruction) -> hlo.Instruction:
    while line.op in _VIEWS:
        line = fused.instructions[line.operands[0]]
    return line


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
        elif line.op in _CALLS:
            for callee in _bodies(line):
                yield from _found(program, callee, inside or line.op != "call")


def _sent_by(program: Program, line: hlo.Instruction) -> hlo.Instruction | None:
    """The collective that a line starts, or is."""
    if line.op.removesuffix("-start") in COLLECTIVES:
        return line
    if line.op not in ("async-start", "fusion"):
        return None
    inner = program.inner(line)
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
    inner = program.inner(line)
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


def _bodies(line: hlo.Instruction) -> list[str]:
    """The computations that a line calls, but for the conditions of loops."""
    return [name for role, _, name in hlo.called(line) if role != "condition"]


def _weights(program: Program, name: str) -> list[int]:
    """The products of each line of a computation, those of what it calls included."""
    computation, lines = program.module.computations[name], _lines(program, name)
    return [program.of_instruction(computation, line).products for line in lines]


def _reaches(program: Program, line: hlo.Instruction, names: set[str]) -> bool:
    """Whether a line calls a computation of these names."""
    if line.op not in _CALLS or not names:
        return False
    return any(
        name in names or any(_reaches(program, one, names) for one in _lines(program, name))
        for name in _bodies(line)
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
        elif line.op in _CALLS:
            inner = max(_covered(program, callee, crossing) for callee in _bodies(line))
            computation = program.module.computations[name]
            rounds = program.rounds(computation, line) if line.op == "while" else 1
            total += inner * (rounds or 0)
    return total
