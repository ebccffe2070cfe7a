"""Bytes of one collective, and of a whole step with one branch per conditional."""

from collections.abc import Sequence
from typing import Any


def sent(op: str, operand_bytes: int, size: int) -> float:
    """Bytes that leave each of `size` replicas, for operands of `operand_bytes`."""
    others = operand_bytes * (size - 1)
    if op == "all-gather" or size == 1:
        return float(others)
    shares = {"all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1}
    return shares[op] * others / size if op in shares else float(operand_bytes)


def total(rows: Sequence[Any], depth: int = 0) -> float:
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
        max(total(branch, depth + 1) for branch in branches.values())
        for branches in conditionals.values()
    )
