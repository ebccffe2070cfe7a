"""A check for tests and at the start of a run: nothing dense crosses a slow axis."""

import itertools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxcomp.measure.report import Collective, Program, crossing, step_bytes

_SUMS = ("all-reduce", "reduce-scatter")
_part = operator.attrgetter("part")
_MOST_LISTED = 8


def assert_no_dense(
    program: Program | Sequence[Program],
    mesh: Mesh,
    axis: str,
    *,
    exact: Any = (),
    parts: Mapping[str, Any] | None = None,
) -> None:
    """Checks that only messages and the named float32 leaves cross a mesh axis in a step.

    If a gradient loses its type inside `shard_map`, JAX sums it in float32, and training looks
    healthy. The compiled program shows it. Messages are arrays of unsigned words that are not
    summed; messages of `identity()` count too. Any other array may have as many elements as the
    axis has replicas, for a loss, a flag, a norm or padding.

    Args:
      program: Program of a step, or several programs that make up one step; or HLO text.
      mesh: The mesh of the program.
      axis: The mesh axis that nothing dense may cross.
      exact: Pytree of arrays or shapes: the leaves that cross it in float32 in every step, such as
        those of `jaxcomp.report.exact_leaves`; or the sums of a linear code such as `random_k`.
      parts: The same for parts of a method's exchange, by their names in the report, for example
        `{"variance": params}` for `one_bit_adam`.

    Raises:
      AssertionError: If more crosses the axis. The text lists each collective with its bytes,
        types and origin, the likely cause, and what to write instead.
      ValueError: If the mesh has no such axis, or not the size of the program.
    """
    allowed = {"": _numel(exact), **{part: _numel(own) for part, own in (parts or {}).items()}}
    rows = [row for row in crossing(program, mesh, axis) if not _is_message(row)]
    free, found = mesh.shape[axis], []
    rows = [row for row in rows if any(numel > free for numel in _numels(row))]
    for part, group in itertools.groupby(sorted(rows, key=_part), _part):
        if _elements(same := list(group), free) > allowed.get(part, 0):
            found += same
    if found:
        raise AssertionError(_text(found, axis, allowed))


def _numel(leaves: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves))


def _is_message(row: Collective) -> bool:
    """Whether it moves encoded words, which are never summed."""
    words = all(re.match(r"u(8|32)\[", array) for array in row.shape.split(", "))
    return words and row.op not in _SUMS


def _numels(row: Collective) -> list[int]:
    """Elements of each of its arrays; for an all-gather, of its results."""
    size = round(row.sent_bytes / row.operand_bytes) + 1 if row.op == "all-gather" else 1
    shapes = re.findall(r"\[([^\]]*)\]", row.shape)
    return [size * math.prod(map(int, re.findall(r"\d+", shape))) for shape in shapes]


def _elements(rows: list[Collective], free: int) -> float:
    """Elements that cross in a step, without `free` elements of each array."""
    if any(row.count is None for row in rows):
        return math.inf
    count = lambda row: sum(max(0, numel - free) for numel in _numels(row))
    return step_bytes([row._replace(sent_bytes=count(row)) for row in rows])


def _text(rows: list[Collective], axis: str, allowed: Mapping[str, int]) -> str:
    rows = sorted(rows, key=lambda row: -row.sent_bytes)
    lines = [f"got more than messages across the axis {axis!r}, need words of codes only:"]
    lines += [f"  {_line(row)}" for row in rows[:_MOST_LISTED]]
    if len(rows) > _MOST_LISTED:
        lines.append(f"  and {len(rows) - _MOST_LISTED} more; read jaxcomp.report.table")
    for part, group in itertools.groupby(sorted(rows, key=_part), _part):
        lines.append(_remedy(list(group), axis, part, allowed.get(part, 0)))
    return "\n".join(lines)


def _line(row: Collective) -> str:
    often = {None: "in a loop of unknown length", 1: "once a step"}
    times = often.get(row.count, f"{row.count} times a step")
    where = f", in {' / '.join(row.branch)}" if row.branch else ""
    origin = f", from {row.origin}" if row.origin else ""
    return (
        f"{row.op} of {row.shape} over {'+'.join(row.axes)}: a replica sends "
        f"{row.sent_bytes:,.0f} bytes, {times}{where}{origin}"
    )


def _remedy(rows: list[Collective], axis: str, part: str, allowed: int) -> str:
    if part:
        return (
            f"Part {part!r} of the method sends these as numbers, of {allowed:,} elements that are "
            f"named. If it is meant to, as a dense warm-up is, write parts={{{part!r}: params}}."
        )
    if any(row.op in _SUMS for row in rows):
        return (
            "The likely cause is jax.grad at parameters that are equal on all replicas, whose "
            "gradients JAX sums inside shard_map, or a psum or pmean of gradients. "
            f"Take gradients at jaxcomp.local_params(params, state, {axis!r}), keep check_vma=True "
            "and leave the mean to the transformation. For leaves sent in float32 (here "
            f"{allowed:,} elements are named) write exact=[params['bias'], ...]."
        )
    return (
        f"The likely cause is that XLA moves arrays that the step wants placed otherwise: "
        f"parameters, state or batch that are sharded over {axis!r}. Place parameters with "
        f"NamedSharding(mesh, P()) and the batch by P({axis!r}), and look for "
        "with_sharding_constraint and reshard."
    )
