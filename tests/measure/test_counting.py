"""Bytes of one collective, and the sum over branches."""

from types import SimpleNamespace

import pytest

from jaxcomp.measure import report


@pytest.mark.parametrize(
    ("op", "size", "bytes"),
    [
        ("all-reduce", 4, 150),
        ("all-gather", 4, 300),
        ("all-to-all", 4, 75),
        ("reduce-scatter", 4, 75),
        ("collective-permute", 4, 100),
        ("collective-permute", 1, 0),
        ("all-reduce", 1, 0),
    ],
)
def test_what_leaves_one_replica_that_hands_over_100_bytes(op, size, bytes):
    assert report.bytes_sent(op, 100, size) == bytes


def test_of_each_conditional_the_costliest_branch_counts():
    row = lambda sent, *branch, count=1: SimpleNamespace(
        sent_bytes=sent, count=count, branch=branch
    )
    rows = [
        row(1, count=3),
        row(10, "if branch 0"),
        row(20, "if branch 0"),
        row(5, "if branch 1"),
        row(100, "if branch 1", "inner branch 0"),
        row(50, "if branch 1", "inner branch 1"),
        row(1000, "other branch 1"),
    ]
    assert report.step_bytes(rows) == 3 + 105 + 1000
    assert report.step_bytes([]) == 0
