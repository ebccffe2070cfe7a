"""The benchmark of the planner: what it predicts from answers of hosts, and how it is judged."""

import pytest

from benchmarks import slow_network
from benchmarks.studies import planner as benchmark

LINE = {"sent_bytes": [0.0, 1e6], "seconds": [0.01, 0.11]}  # 10 ms and 80 Mbit/s
LINK = {op: LINE for op in ("all-reduce", "all-gather", "all-to-all")}
SENDS = {
    "dense float32": [{"op": "all-reduce", "sent_bytes": 1e6, "times": 1.0}],
    "4 bits": [
        {"op": "all-to-all", "sent_bytes": 1e5, "times": 1.0},
        {"op": "all-gather", "sent_bytes": 1e5, "times": 1.0},
    ],
}


def test_a_prediction_is_made_of_what_hosts_have_measured():
    local = {"dense float32": 0.02, "4 bits": 0.05}
    plan = benchmark.predict(LINK, SENDS, local, gradient=0.3, hosts=2)
    dense, four_bits = (row.step_seconds for row in plan.rows)
    assert dense == pytest.approx(0.3 + 0.02 + 0.01 + 0.1)
    # Alone a replica goes over 6 buckets, among two over 5.
    assert four_bits == pytest.approx(0.3 + 0.02 + 0.03 * 5 / 6 + 2 * (0.01 + 0.01))
    assert plan.recommended.method.name == "4 bits"


def row(rate, method, predicted, measured, recommended=False):
    return {
        "hosts": 4,
        "rate": rate,
        "method": method,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "recommended": recommended,
    }


def test_the_recommended_method_is_judged_by_measured_times():
    rows = [
        row("1gbit", "dense float32", 1.0, 1.2, recommended=True),
        row("1gbit", "4 bits", 1.1, 1.0),
        row("100mbit", "dense float32", 9.0, 10.0),
        row("100mbit", "4 bits", 2.0, 2.0, recommended=True),
    ]
    assert benchmark.regrets(rows) == pytest.approx({(4, "1gbit"): 0.2, (4, "100mbit"): 0.0})
    text = benchmark.table(rows)
    assert "| 4 | 1gbit | **dense float32** | 1000 ms | 1200 ms | -17% |" in text
    # Of errors of 17, 10, 10 and 0%.
    assert "median error 10.0%; the recommended method is within 10% of the best in 1 of 2" in text


def test_recorded_rows_are_predicted_from_those_at_the_unlimited_rate():
    def measured(method, rate, seconds, sent):
        times = {"median": seconds, "mean": seconds}
        facts = {"hosts": 4, "skips_rounds": False, "report_bytes": sent}
        return {"method": method, "rate": rate, "step_seconds": times} | facts

    sent = 1e6 / slow_network.HEADERS
    rows = [
        measured(slow_network.ALONE, "unlimited", 0.1, 0.0),
        measured("dense float32", "unlimited", 0.2, sent),
        measured("dense float32", "100mbit", 0.3, sent),
        measured("PyTorch DDP float32", "unlimited", 0.2, 0.0),
    ]
    (found,) = benchmark.recorded_rows(rows)
    assert found["predicted_seconds"] == pytest.approx(0.2 + 8e6 / 100e6)
    assert (found["measured_seconds"], found["recommended"]) == (0.3, True)


def test_a_step_that_was_held_up_counts_little():
    times = [1.0, 2.0, 3.0, 6.0] * 2 + [1.0, 50.0, 3.0, 6.0]
    assert benchmark.typical(times, skips_rounds=True) == 3.0
    assert benchmark.typical([2.0, 9.0, 1.0], skips_rounds=False) == 2.0


def test_a_plan_needs_the_dense_mean_and_two_hosts():
    assert benchmark.parse([]).hosts == [2, 4]
    assert len(benchmark.parse([]).methods) >= 6 and len(benchmark.parse([]).rates) == 4
    with pytest.raises(ValueError, match="a plan compares with 'dense float32', over 2 hosts"):
        benchmark.parse(["--methods", "4 bits"])
    with pytest.raises(ValueError, match="over 2 hosts or more"):
        benchmark.parse(["--hosts", "1"])
    with pytest.raises(ValueError, match="a multiple of 4; write --steps 24 --warmup 4"):
        benchmark.parse(["--steps", "10"])
    with pytest.raises(ValueError, match="is no rate"):
        benchmark.parse(["--rates", "fast"])
