"""The model of weak scaling, on figures worked out by hand."""

import pytest

from benchmarks import rows as rows_file
from benchmarks.studies import scaling
from jaxcomp import planner

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


def test_the_file_has_what_the_planner_says_of_papers():
    rows, path = scaling.published(), rows_file.RESULTS / "scaling_published.json"
    assert rows_file.read(path) == rows
    # A search in steps of 1.2, of which the exact sizes are not given.
    table_4 = [row["error"] for row in rows if row["figure"].startswith("95%")]
    assert len(table_4) == 5 and max(map(abs, table_4)) < 0.2
    (unknown,) = [row for row in rows if row["predicted"] is None]
    assert "| 0.9 | not checked |  |" in scaling.published_table([unknown])


def test_a_program_of_16_hosts_is_a_method_of_more():
    messages = {"all-to-all": {"all": 3, "async": 0}, "all-gather": {"all": 1, "async": 0}}
    row = {
        "method": "local_steps",
        "messages": messages,
        "nic_bytes": 15e6,
        "sent_bytes": {"fast": 450e6},
        "products_beside": 0.5,
    }
    method = scaling.on_hosts(row, 1024, codec_seconds=0.25)
    # A millisecond in the host. Of 16 steps one sends 16 / 16 of what 16 hosts send 15 / 16 of.
    assert method.codec_seconds == pytest.approx(0.251)
    sent = sum(message.times * message.sent_bytes for message in method.messages)
    assert sent == pytest.approx(1e6 * 1023 / 1024)
    seconds = planner.network_seconds(method.messages, planner.uniform_link(1e9, 1e-3, 1024))
    assert seconds == pytest.approx((0.128 * 1023 / 1024 + 3e-3 + 1.023) / 16)


def test_a_measured_code_costs_by_parameter_and_bandwidth():
    where = {"device": "h200", "model": "124m-scan"}
    rows = [
        {**where, "method": name, "measured": {"seconds": seconds}}
        for name, seconds in {"dense": 0.005, "q4": 0.007}.items()
    ]
    found = scaling.codecs([*rows, {"model": "124m-scan", "parameters": 1000}])
    assert found == pytest.approx({"dense": 0.0, "q4": 2e-6 * 4800 / 3352.32})
