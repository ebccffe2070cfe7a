"""What one collective sends, and all of a step: conditionals take one of their branches."""

from collections.abc import Sequence
from typing import Any


def sent(op: str, operand_bytes: int, size: int) -> float:
    """What leaves one of `size` replicas that each hand over `operand_bytes`."""
    others = operand_bytes * (size - 1)
    if op == "all-gather" or size == 1:
        return float(others)
    shares = {"all-reduce": 2, "reduce-scatter": 1, "all-to-all": 1}
    return shares[op] * others / size if op in shares else float(operand_bytes)


def total(rows: Sequence[Any], depth: int = 0) -> float:
    """Sums `sent_bytes` of `report.Collective` rows, all of a known count.

    It takes what is in no deeper branch, and of each conditional the branch that sends most.
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
