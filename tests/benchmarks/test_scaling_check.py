"""The check of the scaling model: what it predicts of what hosts have measured."""

import argparse

import pytest

from benchmarks.studies import planner, scaling
from jaxcomp.measure.planner import Message

LINE = {"sent_bytes": [4096.0, 65536.0], "seconds": [0.006, 0.01]}


def found(runs):
    one = dict.fromkeys(runs, 0.02)
    facts = {name: {"parameters": 7} for name in runs}
    return planner.Measured("100mbit", {"all-reduce": LINE}, {}, one, 0.1, runs, facts)


def test_a_step_is_compute_and_rings_at_the_rate_of_the_link():
    messages = [Message("all-reduce", 1e6 / planner.HEADERS, 0.5)]
    # 6 ms are six rounds among four hosts; half a time 80 ms and 6 ms.
    seconds = scaling.predicted_seconds(messages, found({}), 0.12, 4)
    assert seconds == pytest.approx(0.12 + 0.5 * (0.08 + 0.006))


def test_rows_have_the_messages_of_so_many_devices(monkeypatch):
    model = {"layers": 1, "width": 128, "heads": 2, "context": 8}
    monkeypatch.setitem(scaling.MODELS, "one layer", model)
    runs = {
        "LAMB": {"seconds": [1.0, 9.0, 1.0], "skips_rounds": False},
        "SLAMB": {"seconds": [1.0, 1.0, 4.0], "skips_rounds": True},
    }
    options = argparse.Namespace(model="one layer", sequences=1)
    dense, sparse = scaling.rows_of(found(runs), options, 2)
    assert (dense["measured_seconds"], sparse["measured_seconds"]) == (1.0, 2.0)
    # A ring of two sends what it reduces once; SLAMB a tenth, and all in every eighth step.
    sent = [sum(m["times"] * m["sent_bytes"] for m in row["messages"]) for row in (dense, sparse)]
    assert sent[0] == pytest.approx(4 * 232_000, rel=0.01)
    assert 0.22 < sent[1] / sent[0] < 0.25
    assert dense["error"] == pytest.approx(dense["predicted_seconds"] - 1)
    assert dense["measured_efficiency"] == pytest.approx(0.12)
    text = scaling.check_table([dense, sparse])
    assert "| LAMB | 2 | 100mbit |" in text and "median error" in text
