"""The model of weak scaling, on figures worked out by hand."""

import pytest

from benchmarks.studies import scaling

MESSAGES = [
    {"op": "all-reduce", "sent_bytes": 1_000_000, "times": 0.5},
    {"op": "all-to-all", "sent_bytes": 250_000, "times": 1.0},
]
ROW = {"method": "a", "replicas": 4, "memory_bytes": 2**21, "messages": MESSAGES}


def test_efficiency_is_the_share_of_a_step_that_computes():
    # Half a time 8 ms and six rounds, once 2 ms and one round, of 1 ms each: 7 + 3.
    assert scaling.efficiency(ROW, 1e9, 1e-3, 0.04) == pytest.approx(0.04 / 0.05)


def test_the_table_has_bytes_in_the_mean_over_a_run():
    line = scaling.table([ROW], [1e9, 1e12], 0.0, 0.054).splitlines()[2]
    assert line == "| a | 4 | 750,000 | 2 | 90% | 100% |"


def test_every_method_is_an_update_of_the_config():
    config = scaling.bert_large_slamb.get_config()
    for update in scaling.METHODS.values():
        assert scaling.planning.with_update(config, update).optimizer.update == update
