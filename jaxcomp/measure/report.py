"""Counts the bytes that one step sends, per mesh axis and per collective.

The numbers come from the compiled program, not from a method's formula: XLA may widen a type, and
JAX may insert a collective that nobody wrote. Data that a program sends outside XLA's collectives,
for example in custom calls and callbacks, is not counted.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxcomp._printing import aligned
from jaxcomp.compressors.policies import path_of
from jaxcomp.measure import hlo
from jaxcomp.replicas import protocol
from jaxcomp.replicas.compact import is_compact

_COLLECTIVES = frozenset(
    "all-reduce all-gather all-to-all reduce-scatter collective-permute collective-broadcast "
    "ragged-all-to-all send".split()
)


class Collective(NamedTuple):
    """One collective of a program, at one place where it runs.

    Attributes:
      op: Its HLO name, `all-reduce`; an asynchronous pair is one collective.
      axes: The mesh axes of size above 1 that its groups span, in the mesh's order; `()` if every
        device is alone, `("?",)` if the groups are not a product of axes.
      operand_bytes: Bytes of one replica's operands in one execution.
      sent_bytes: Bytes that leave one replica in one execution, with the best-known algorithm.
      shape: Types of the operands, such as `f32[8,4]` or `f32[8,4], u8[3]`.
      count: How often a step executes it: the product of the trip counts of the loops around it.
        None if a loop's length is unknown.
      branch: The branches of conditionals around it, outermost first, such as
        `("conditional.1 branch 0",)`. For `jax.lax.cond` branch 1 is the true one.
      part: The part of the exchange, for methods that do not send everything in every step.
      origin: JAX's name of the operation that it comes from; "" if XLA has lost it.
    """

    op: str
    axes: tuple[str, ...]
    operand_bytes: int
    sent_bytes: float
    shape: str
    count: Any
    branch: tuple[str, ...]
    part: str = ""
    origin: str = ""


Program = jax.stages.Compiled | str
"""The result of `jax.jit(f).lower(...).compile()`, or its HLO text."""


def collectives(program: Program | Sequence[Program], mesh: Mesh) -> list[Collective]:
    """Lists the collectives of a compiled program, in its order.

    With N replicas and operands of B bytes, a replica sends 2 B (N-1)/N for an all-reduce, B (N-1)
    for an all-gather, B (N-1)/N for a reduce-scatter or an all-to-all, and B for a permutation or a
    broadcast. For a ragged all-to-all, whose sizes are known only at run time, B is an upper bound.

    Args:
      program: Program of a step, or several programs that make up one step. Text does not name its
        devices, so the mesh's order is assumed.
      mesh: The mesh of the program, whose axes the report names.

    Raises:
      ValueError: If the program does not run on the mesh's devices.
    """
    if isinstance(program, Sequence) and not isinstance(program, str):
        if len(program) == 1:
            return collectives(program[0], mesh)
        # Conditionals of two programs may have the same name.
        named = lambda row, n: row._replace(branch=tuple(f"{n}:{name}" for name in row.branch))
        return [named(row, n) for n, one in enumerate(program) for row in collectives(one, mesh)]
    if not isinstance(program, str) and not hasattr(program, "as_text"):
        raise ValueError(
            f"got {program!r:.60} where a compiled program belongs; write step.lower(params, "
            "state, batch).compile(), or step.compile(params, state, batch).programs for the step "
            "of overlapped_train_step"
        )
    module = hlo.parse(program if isinstance(program, str) else str(program.as_text()))
    if sorted((module.num_replicas, module.num_partitions)) != [1, mesh.size]:
        raise ValueError(
            f"got a program of {module.num_replicas} replicas and {module.num_partitions} "
            f"partitions, need one that runs on the mesh's {mesh.size} devices; pass the mesh "
            "that the step was made with"
        )
    positions = hlo.positions_of(program, mesh)
    axes_of = hlo.axes_of_groups(mesh, positions)
    runs = _whole(hlo.executions(module))
    found = (_collective(run, axes_of, positions, mesh) for run in runs)
    return [collective for collective in found if collective is not None]


def sent_bytes(program: Program | Sequence[Program], mesh: Mesh, axis: str | None = None) -> float:
    """Sums the bytes that leave one replica in one step.

    It counts the branch of a conditional that sends most, so the sum is that of the most expensive
    step. A collective over several axes counts in full for each of them, and one whose groups fit
    no axes counts for all: do not add the sums of two axes.

    Args:
      program: As for `collectives`, like `mesh`.
      mesh: The mesh of the program.
      axis: Count only what crosses this mesh axis; None counts everything.

    Raises:
      ValueError: If the mesh has no such axis, or if the length of a loop that sends is unknown.
    """
    return step_bytes(_sending(program, mesh, axis))


def sent_bytes_by_part(
    program: Program | Sequence[Program], mesh: Mesh, axis: str | None = None
) -> dict[str, float]:
    """Sums the bytes that leave one replica in one step, for each part of an exchange.

    Methods that skip rounds name their parts ("synchronize", "variance"), and count in their
    state's `rounds` how often each was sent. The part "" is sent in every step. Arguments and
    errors are those of `sent_bytes`.
    """
    rows = _sending(program, mesh, axis)
    return {
        part: step_bytes([row for row in rows if row.part == part])
        for part in sorted({"", *(row.part for row in rows)})
    }


def table(program: Program | Sequence[Program], mesh: Mesh) -> str:
    """Formats the collectives of a step, with totals, as a table.

    There is a row for each branch, axes, operation and operand type, with bytes per step, then
    totals for each set of axes and for all, as `sent_bytes` counts them. If a loop's length is
    unknown, its row says so and has the bytes of one iteration, and totals say "at least".
    Arguments are those of `collectives`.
    """
    rows = collectives(program, mesh)
    order = lambda row: (row.branch, row.axes, row.op, row.shape, row.count is None)
    groups = itertools.groupby(sorted(rows, key=order), order)
    head = "axes", "collective", "times", "operand bytes", "sent bytes", "operands", "branch"
    totals = [_line_of_total(rows, axes) for axes in [*sorted({row.axes for row in rows}), None]]
    return "\n".join(aligned([head, *(_line(list(group)) for _, group in groups), *totals]))


def _line(same: list[Collective]) -> tuple[str, ...]:
    """The cells of collectives that differ only in bytes and counts."""
    first = same[0]
    counts = [1 if row.count is None else row.count for row in same]
    operand = sum(row.operand_bytes * count for row, count in zip(same, counts, strict=True))
    sent = sum(row.sent_bytes * count for row, count in zip(same, counts, strict=True))
    times = "unknown" if first.count is None else f"{sum(counts)}"
    where, branch = "+".join(first.axes) or "-", " / ".join(first.branch)
    return where, first.op, times, f"{operand:,}", f"{sent:,.0f}", _folded(first.shape), branch


def _line_of_total(rows: list[Collective], axes: tuple[str, ...] | None) -> tuple[str, ...]:
    chosen = [row for row in rows if axes is None or row.axes == axes]
    known = [row for row in chosen if row.count is not None]
    label = "total, all" if axes is None else f"total, {'+'.join(axes) or '-'}"
    bound = "" if len(known) == len(chosen) else "at least"
    return label, "", bound, "", f"{step_bytes(known):,.0f}", "", ""


def crossing(
    program: Program | Sequence[Program], mesh: Mesh, axis: str | None
) -> list[Collective]:
    """Lists the collectives that send something across an axis, or across any axis.

    Arguments are those of `sent_bytes`, which raises a ValueError for the same axes.
    """
    if axis is not None and axis not in mesh.axis_names:
        raise ValueError(
            f"got axis {axis!r}, need one of the mesh's {mesh.axis_names}; write axis=None for "
            "the sum over all"
        )
    return [
        row
        for row in collectives(program, mesh)
        if row.sent_bytes and (axis is None or axis in row.axes or row.axes == ("?",))
    ]


def _sending(program, mesh: Mesh, axis: str | None) -> list[Collective]:
    """Lists what crosses an axis, each with a count."""
    rows = crossing(program, mesh, axis)
    unknown = [row for row in rows if row.count is None]
    if unknown:
        raise ValueError(
            f"got {unknown[0].op} of {unknown[0].shape} in a loop of unknown length, need loops "
            "whose trip count the program states; write jax.lax.scan, or read table()"
        )
    return rows


def _whole(executions: Iterable[hlo.Execution]) -> Iterator[hlo.Execution]:
    """Keeps only the first piece of a collective that a TPU's compiler splits."""
    begun = set()
    for execution in executions:
        chain = hlo.chain(execution.instruction)
        if chain is None or (chain, execution.branch) not in begun:
            yield execution
        if chain is not None:
            begun.add((chain, execution.branch))


def _collective(
    execution: hlo.Execution, axes_of: dict, positions: np.ndarray, mesh: Mesh
) -> Collective | None:
    """Describes one collective; None for other operations and for sends to the host."""
    instruction, computation, count, branch = execution
    op = instruction.op.removesuffix("-start")
    if op not in _COLLECTIVES:
        return None
    operands = [computation.instructions[name].type for name in instruction.operands]
    if op in ("ragged-all-to-all", "send"):
        operands = operands[:1]  # The others are offsets, sizes and tokens.
    pairs = hlo.source_target_pairs(instruction.attributes)
    if op == "send" and not pairs:
        return None
    if op in ("collective-permute", "send"):
        axes, size = hlo.axes_crossed(pairs, positions, mesh)
    else:
        groups = hlo.replica_groups(instruction.attributes, mesh.size)
        axes = axes_of.get(frozenset(map(frozenset, groups)), ("?",))
        size = max(map(len, groups))
    operand_bytes = sum(map(hlo.num_bytes, operands))
    shape = ", ".join(itertools.chain.from_iterable(map(hlo.shapes, operands)))
    sent = bytes_sent(op, operand_bytes, size)
    parts = re.findall(r"\bjaxcomp\.(\w+)", instruction.attributes)
    part = (parts or [""])[-1]
    origin = re.search(r'\bop_name="([^"]*)"', instruction.attributes)
    name = origin[1] if origin else ""
    return Collective(op, axes, operand_bytes, sent, shape, count, branch, part, name)


def _folded(shapes: str) -> str:
    """Merges equal shapes in a row: on XLA:CPU an all-to-all has one operand per replica."""
    groups = itertools.groupby(shapes.split(", "))
    counted = ((shape, len(list(same))) for shape, same in groups)
    return ", ".join(shape if count == 1 else f"{count} x {shape}" for shape, count in counted)


def exact_leaves(params: Any, state: Any) -> list[str] | None:
    """Lists the parameters whose updates `compressed_mean` sends in float32.

    Args:
      params: The parameters, or their shapes.
      state: The optimizer's state, or its shapes. With several `compressed_mean`, as in
        `optax.masked`, a leaf is listed if each that sees it sends it in float32.

    Returns:
      The paths of leaves, such as `block_0/up/bias`; None if no state has a field `residual`.
    """
    found = protocol.residuals(state)
    if not found:
        return None
    # Without error feedback () stands for a residual. optax.MaskedNode() is another empty tuple,
    # without leaves: leaves hidden from all methods, such as a frozen group, are not sent at all.
    is_mark = lambda x: x is None or is_compact(x) or (type(x) is tuple and not x)
    exact: set[str] = set()
    lossy: set[str] = set()
    for residual in found:
        for path, leaf in jax.tree.leaves_with_path(residual, is_leaf=is_mark):
            (exact if leaf is None else lossy).add(path_of(path))
    paths = [path_of(path) for path, _ in jax.tree.leaves_with_path(params)]
    return [path for path in paths if path in exact - lossy]


def bytes_sent(op: str, operand_bytes: int, size: int) -> float:
    """Bytes that leave each of `size` replicas, for operands of `operand_bytes`."""
    others = operand_bytes * (size - 1)
    if op == "all-gather" or size == 1:
        return float(others)
    shares = {"all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1}
    return shares[op] * others / size if op in shares else float(operand_bytes)


def step_bytes(rows: Sequence[Any], depth: int = 0) -> float:
    """Sums `sent_bytes` of `report.Collective` rows, whose counts must be known.

    It adds rows in no deeper branch, and for each conditional the branch that sends most.
    """
    outside = sum(row.sent_bytes * row.count for row in rows if len(row.branch) == depth)
    conditionals: dict[str, dict[str, list[Any]]] = {}
    for row in rows:
        if len(row.branch) > depth:
            label = row.branch[depth]
            branches = conditionals.setdefault(label.split()[0], {})
            branches.setdefault(label, []).append(row)
    return outside + sum(
        max(step_bytes(branch, depth + 1) for branch in branches.values())
        for branches in conditionals.values()
    )
