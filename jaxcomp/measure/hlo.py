"""Reads the text of a compiled XLA program: what runs, where and how often.

It parses the HLO that `jaxcomp.report` needs, as XLA prints it on CPU, GPU and TPU for JAX 0.10
to 0.12: operands with or without inline types, asynchronous pairs in long and in short form.

Groups of devices come as lists `{{0,1},{2,3}}`, as iota tiles `[2,2]<=[4]` and, since JAX 0.12, as
axes of a mesh, `mesh['data'=2,'fsdp'=2] {'fsdp'}`. Numbers are positions in the program's device
assignment.
"""

import itertools
import math
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


class Instruction(NamedTuple):
    """One line of a computation: `%name = type op(operands), attributes`."""

    name: str
    type: str
    op: str
    argument: str  # the text in the parentheses
    attributes: str

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it takes."""
        return re.findall(r"%([\w.\-]+)", self.argument)


class Computation(NamedTuple):
    """The instructions of one computation by name, and the name of its root."""

    instructions: dict[str, Instruction]
    root: str


class Module(NamedTuple):
    """A whole program."""

    entry: str
    computations: dict[str, Computation]
    num_replicas: int
    num_partitions: int


class Execution(NamedTuple):
    """An instruction at a place where it runs.

    A branch is the name of a conditional, a space, and the name of its branch.
    """

    instruction: Instruction
    computation: Computation  # that contains it and its operands
    # Executions per run of the program, if all branches are taken; None: unknown.
    count: int | None  # type: ignore[assignment]
    branch: tuple[str, ...]  # branches around it, outermost first


_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT\s+)?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|(?:true|false|branch|called)_computations?)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_LIST = r"\{\{.*?\}\}|\{\}"
_IOTA = r"\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
_MESH = r"mesh\[[^\]]*\](?:, ?device_ids=\(.*?\))? ?\{.*?\}"
# Longer loops whose length XLA does not state count as unknown.
_MAX_SIMULATED_TRIPS = 10_000


def parse(text: str) -> Module:
    """Parses the text of `jax.stages.Compiled.as_text`: one instruction per line, names after `%`.

    Raises:
      ValueError: If the text has no entry computation.
    """
    entry, computations, current = None, {}, ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = header[2]
            entry = current if header[1] else entry
            computations[current] = Computation({}, "")
        elif current and (match := _INSTRUCTION.match(line)):
            root, name, type_, op, rest = match.groups()
            end = _closing(rest)
            instruction = Instruction(name, type_, op, rest[:end], rest[end + 1 :])
            computations[current].instructions[name] = instruction
            if root:
                computations[current] = computations[current]._replace(root=name)
    if entry is None:
        raise ValueError(
            f"got text without an ENTRY computation ({text[:60]!r} ...), need a compiled "
            "program's HLO; write jax.jit(f).lower(...).compile().as_text()"
        )
    first = text.split("\n", 1)[0]
    counts = [re.search(rf"\b{key}=(\d+)", first) for key in ("replica_count", "num_partitions")]
    return Module(entry, computations, *(int(count[1]) if count else 1 for count in counts))


def executions(module: Module) -> Iterator[Execution]:
    """Yields what the entry computation reaches, once for each place, callers first.

    Raises:
      ValueError: If the text names something that it does not contain, or a computation calls
        itself.
    """
    try:
        yield from _walk(module, module.entry, 1, ())
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the text of the program does not hold together ({error!r:.200}); need all of what "
            "jax.jit(f).lower(...).compile().as_text() returns"
        ) from error


def num_bytes(type_: str) -> int:
    """The bytes of a printed type, `f32[8,4]{1,0}`, or of a tuple, `(f32[8], u8[4])`.

    A type narrower than a byte takes a byte, unless its layout packs it, as in `s4[8]{0:E(4)}`.
    """
    total = 0
    for dtype, dims, layout in _SHAPE.findall(type_):
        width = re.search(r"\d+", dtype)
        packed = re.search(r"E\((\d+)\)", layout)
        bits = int(packed[1]) if packed else max(8, int(width[0])) if width else 8
        total += math.ceil(math.prod(map(int, re.findall(r"\d+", dims))) * bits / 8)
    return total


def shapes(type_: str) -> list[str]:
    """The arrays in a type, without layouts: `["f32[8,4]", "u8[4]"]`."""
    return [f"{dtype}[{dims}]" for dtype, dims, _ in _SHAPE.findall(type_)]


def called(instruction: Instruction) -> list[tuple[str, int, str]]:
    """`(role, index, name)` for each computation that an instruction calls."""
    return [
        (role, index, name)
        for role, names in _CALLED.findall(instruction.attributes)
        for index, name in enumerate(re.findall(r"[\w.\-]+", names))
    ]


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of a `while`: as XLA states, or from running the loop's integers, as for TPUs.

    None if neither works, because the length depends on data.
    """
    known = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    parts = {role: name for role, _, name in called(loop)}
    state = _evaluate(module, computation, loop.operands[0], (), {})
    for trips in range(_MAX_SIMULATED_TRIPS):
        proceed = _run(module, parts["condition"], [state])
        if proceed is None:
            return None
        if not proceed:
            return trips
        state = _run(module, parts["body"], [state])
    return None


def chain(instruction: Instruction) -> str | None:
    """The common name of a collective's pieces on TPUs, where it is printed several times; or None.

    An asynchronous collective is repeated in each fusion that overlaps with it, from start to done.
    """
    match = re.search(r'\bchain_id="(\w+)"', instruction.attributes)
    channel = re.search(r"\bchannel_id=(\d+)", instruction.attributes)
    return f"{instruction.op} {channel and channel[1]} {match[1]}" if match else None


def _closing(text: str) -> int:
    """The index of the parenthesis that closes the one opened just before `text`."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index
    return len(text)


def _walk(module, name, count, branch) -> Iterator[Execution]:
    computation = module.computations[name]
    for instruction in computation.instructions.values():
        yield Execution(instruction, computation, count, branch)
        if instruction.op in ("async-update", "async-done"):
            continue  # They name the computation that their async-start calls.
        for role, index, callee in called(instruction):
            times = _times(module, computation, instruction, role)
            inner = None if count is None or times is None else count * times
            choice = {"branch_computations": f"branch {index}"}.get(role, role.split("_")[0])
            conditional = instruction.op == "conditional"
            path = branch + ((f"{instruction.name} {choice}",) if conditional else ())
            yield from _walk(module, callee, inner, path)


def _times(module, computation, instruction, role) -> int | None:
    """How often one execution of `instruction` runs what it calls."""
    if instruction.op == "while":
        trips = trip_count(module, computation, instruction)
        # The condition runs once more than the body.
        return trips if trips is None else trips + (role == "condition")
    return 1 if instruction.op in ("call", "fusion", "async-start", "conditional") else None


def _run(module: Module, name: str, arguments: Sequence[Any]) -> Any:
    computation = module.computations[name]
    return _evaluate(module, computation, computation.root, arguments, {})


def _evaluate(module, computation, name, arguments, seen) -> Any:
    """Computes an integer, or a list for a tuple; None if it cannot be known."""
    if name in seen:
        return seen[name]
    instruction = computation.instructions[name]
    op, text, value = instruction.op, instruction.argument, None
    if not re.match(r"\(|(pred|[su]\d+)\[\]", instruction.type):
        return None
    if op == "parameter":
        value = arguments[int(text)] if int(text) < len(arguments) else None
    elif op == "constant":
        value = int(text == "true") if text in ("true", "false") else int(text)
    elif op in ("tuple", "get-tuple-element", "copy", "add", "compare", "fusion", "call"):
        operands = [
            _evaluate(module, computation, operand, arguments, seen)
            for operand in instruction.operands
        ]
        value = _apply(module, instruction, operands)
    seen[name] = value
    return value


def _apply(module: Module, instruction: Instruction, operands: list[Any]) -> Any:
    op, attributes = instruction.op, instruction.attributes
    if op == "tuple":
        return operands
    if op in ("fusion", "call"):
        return _run(module, called(instruction)[0][2], operands)
    if None in operands:
        return None
    if op == "add":
        total = sum(operands)
        return total if abs(total) < 2**31 else None  # It may wrap around.
    if op == "compare":
        # HLO's names of comparisons, such as `LT`, are Python's.
        return getattr(operator, _named("direction", attributes).lower())(*operands)
    if op == "get-tuple-element":
        return operands[0][int(_named("index", attributes))]
    return operands[0]


def _named(name: str, attributes: str) -> str:
    """The value of an attribute that this operation always has."""
    (value,) = re.findall(rf"{name}=(\w+)", attributes)
    return value


def replica_groups(attributes: str, num_devices: int) -> list[tuple[int, ...]]:
    """The groups of devices that take part in a collective, from its attributes.

    No group, or an empty list, means all of the program's `num_devices`. Raises a ValueError for an
    unknown dialect.
    """
    match = re.search(rf"\breplica_groups=({_LIST}|{_IOTA}|{_MESH})", attributes)
    if not match and "replica_groups=" in attributes:
        raise ValueError(
            f"got collective attributes {attributes!r}, need replica_groups as lists, iota or "
            "mesh axes; add the dialect to jaxcomp/measure/hlo.py"
        )
    groups = match[1] if match else "{}"
    if groups.startswith("mesh"):
        return _mesh_groups(groups)
    if groups.startswith("["):
        return [tuple(group) for group in _iota(groups).tolist()]
    lists = [tuple(_ints(group)) for group in re.findall(r"\{([\d, ]+)\}", groups)]
    return lists or [tuple(range(num_devices))]


def source_target_pairs(attributes: str) -> list[tuple[int, int]]:
    """The pairs of sender and receiver of a permutation."""
    match = re.search(r'source_target_pairs="?\{(\{.*?\})\}', attributes)
    pairs = re.findall(r"\{(\d+), *(\d+)\}", match[1]) if match else []
    return [(int(source), int(target)) for source, target in pairs]


def positions_of(program: jax.stages.Compiled | str, mesh: Mesh) -> np.ndarray:
    """The position in the program's device assignment of each device of the mesh."""
    order = {device: position for position, device in enumerate(mesh.devices.flat)}
    if not isinstance(program, str):
        for sharding in jax.tree.leaves((program.input_shardings, program.output_shardings)):
            if isinstance(sharding, NamedSharding) and sharding.mesh.size == mesh.size:
                order = {device: i for i, device in enumerate(sharding.mesh.devices.flat)}
                break
    if set(order) != set(mesh.devices.flat):
        raise ValueError(
            "got a program that runs on other devices than the mesh's, need the same ones; pass "
            "the mesh that the step was made with"
        )
    positions = [order[device] for device in mesh.devices.flat]
    return np.array(positions).reshape(mesh.devices.shape)


def axes_of_groups(mesh: Mesh, positions: np.ndarray) -> dict[frozenset, tuple[str, ...]]:
    """Maps the device groups of each set of mesh axes to that set."""
    sizes = mesh.shape
    wide = [name for name in mesh.axis_names if sizes[name] > 1]
    axes_of = {}
    for size in range(len(wide) + 1):
        for axes in itertools.combinations(wide, size):
            numbers = [mesh.axis_names.index(name) for name in axes]
            last = np.moveaxis(positions, numbers, range(-size, 0))
            groups = last.reshape(-1, math.prod(sizes[name] for name in axes))
            axes_of[frozenset(map(frozenset, groups.tolist()))] = axes
    return axes_of


def axes_crossed(
    pairs: list[tuple[int, int]], positions: np.ndarray, mesh: Mesh
) -> tuple[tuple[str, ...], int]:
    """The axes along which some pair differs, and how many devices a pair joins."""
    where = {position: np.array(index) for index, position in np.ndenumerate(positions)}
    moves = [where[source] != where[target] for source, target in pairs]
    crossed = np.any(np.reshape(moves, (-1, positions.ndim)), axis=0)
    axes = tuple(name for name, cross in zip(mesh.axis_names, crossed, strict=True) if cross)
    return axes, 2 if axes else 1


def _ints(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    """Expands `[2,4]<=[4,2]T(1,0)`; without `<=` the result is flat."""
    dims, _, rest = text.rpartition("<=")
    reshape, _, order = rest.partition("T")
    ids = np.arange(math.prod(_ints(reshape))).reshape(_ints(reshape))
    return ids.transpose(_ints(order) or None).reshape(_ints(dims) or -1)


def _mesh_groups(text: str) -> list[tuple[int, ...]]:
    """Expands `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`."""
    mesh, _, axes = text.rpartition("{")
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    order = mesh.partition("device_ids=(")[2]
    num_devices = math.prod(sizes.values())
    ids = _iota(order) if "[" in order else np.array(_ints(order) or range(num_devices))
    coordinates = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes):
        # `(before)size` is a part of the axis: zeroing its digit joins the devices along it.
        size = int(size or sizes[name])
        stride = sizes[name] // (int(before or 1) * size)
        coordinates[name] = coordinates[name] - coordinates[name] // stride % size * stride
    keys = np.ravel_multi_index(tuple(coordinates.values()), tuple(sizes.values())).ravel()
    return [tuple(ids[keys == key].tolist()) for key in np.unique(keys)]
