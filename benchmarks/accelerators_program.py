"""What the kernels of a compiled program read, write and count to, from its scheduled text.

Loops count as often as they run, and of a conditional the branch that moves most. What a fusion
slices out of an operand counts as the slice, and what it updates in place as the update. Arrays
that a TPU keeps on its chip do not count. Messages are no kernels: `accelerators_messages` reads
them.
"""

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxcomp.measure import hlo

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
    "slice-start while conditional call async-start".split()
)
_FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone")
_PRODUCTS = ("dot", "convolution")
_LIBRARIES = ("cublas", "cudnn", "gemm")
_VIEWS = ("bitcast", "reshape")
_SLICES = ("slice", "dynamic-slice", "gather")
_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^{}]*\})?")
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

    def inner(self, instruction: hlo.Instruction) -> Iterator[hlo.Computation]:
        """The computations that an instruction names."""
        for _, _, name in hlo.called(instruction):
            yield self.module.computations[name]

    def of_instruction(self, computation: hlo.Computation, instruction: hlo.Instruction) -> Cost:
        """Cost of one line, with what it calls."""
        op = instruction.op
        names = [name for role, _, name in hlo.called(instruction) if role != "condition"]
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
        if instruction.op == "fusion":
            inner = self.inner(instruction)
            return any(_of_gradient(one) for c in inner for one in c.instructions.values())
        return _of_gradient(instruction)

    def _of_computation(self, name: str) -> Cost:
        computation = self.module.computations[name]
        lines = computation.instructions.values()
        return _sum(self.of_instruction(computation, line) for line in lines)

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
        if instruction.op != "fusion":
            once = dict(zip(instruction.operands, sizes, strict=True))
            return _main_bytes(instruction.type) + sum(once.values())
        fused = self.module.computations[names[0]]
        read = self._read(names[0])
        return _written(fused, instruction.type) + sum(
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
    in_place = {line.name for line in _results(fused) if _is_update(line)}
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
                part = 0.0
            shares[operand] = shares.get(operand, 0.0) + share * part
    return read


def _written(fused: hlo.Computation, type_: str) -> int:
    """Bytes of main memory that a fusion writes of its results, whose types are `type_`."""
    # A custom call may make several results by itself, and updates none.
    pairs = zip(_ARRAY.findall(type_), _results(fused), strict=False)
    updates = [pair for pair in pairs if _is_update(pair[1]) and _is_in_main(pair[0])]
    stays = lambda array, line: hlo.num_bytes(array) - _size(fused, line.operands[1])
    return _main_bytes(type_) - sum(stays(*update) for update in updates)


def _results(fused: hlo.Computation) -> list[hlo.Instruction]:
    """What makes each of a fusion's results."""
    root = fused.instructions[fused.root]
    names = root.operands if root.op == "tuple" else [root.name]
    return [_behind_views(fused, fused.instructions[name]) for name in names]


def _is_update(result: hlo.Instruction) -> bool:
    """Whether a slice of the result is updated, and all else stays where it is."""
    return result.op == "dynamic-update-slice"


def _behind_views(fused: hlo.Computation, line: hlo.Instruction) -> hlo.Instruction:
    while line.op in _VIEWS:
        line = fused.instructions[line.operands[0]]
    return line
