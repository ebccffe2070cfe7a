"""The benchmark of the slow network: what it starts, compares and shows; hosts are stubs here."""

import pathlib
import sys

import pytest

from benchmarks import network, slow_network, slow_network_figure, worker
from benchmarks.peers import AUTHORS, PEERS
from benchmarks.worker import period_of
from tests.benchmarks.test_network import TWO_HOSTS
from tests.helpers.namespaces import needs_namespaces
from train.placement.resolve import resolve

ROW = {
    "method": "4 bits",
    "rate": "unlimited",
    "hosts": 2,
    "parameters": 1000,
    "threads": "1 a host on 2 cores",
    "step_seconds": {"median": 0.2, "mean": 0.3, "quartiles": [0.1, 0.4]},
    "nic_bytes": {"sent": 1234.0, "received": 1234.0},
    "nic_over_report": 1.01,
    "skips_rounds": False,
}


def test_report_and_interface_agree_within_headers():
    payload = 10**6
    for sent in (payload, payload * slow_network.HEADERS, 0.96 * payload, 1.12 * payload):
        assert slow_network.compare(sent, payload, 3)["agrees"]
    assert slow_network.compare(1.1 * payload, payload, 3)["nic_over_report"] == 1.1


def test_a_row_says_how_report_and_interface_differ():
    less = slow_network.compare(0.9e6, 1e6, 3)
    assert not less["agrees"] and "10% less" in less["disagreement"]
    more = slow_network.compare(slow_network.HEADERS * 1e6 + 300_000, 1e6, 3)
    assert not more["agrees"]
    assert "300,000 bytes a step more" in more["disagreement"]
    assert "100,000 for each of 3 collectives" in more["disagreement"]


@pytest.mark.parametrize("report_bytes", [None, 0.0])
def test_without_a_report_nothing_is_compared(report_bytes):
    assert set(slow_network.compare(5.0, report_bytes, None).values()) == {None}


def test_skipped_parts_count_as_often_as_they_were_sent():
    parts = {"": 10.0, "synchronize": 1000.0, "variance": 4000.0}
    before = {"all": 9, "synchronize": 9, "variance": 2}
    after = {"all": 12, "synchronize": 12, "variance": 3}
    sent = worker.report_bytes(parts, 10, before, after)
    assert sent == (10 * 10 + 3 * 1000 + 1 * 4000) / 10
    assert worker.report_bytes({"": 10.0}, 7, {}, {}) == 10.0


@pytest.mark.parametrize("connected", [True, False])
def test_hosts_are_told_who_they_are(connected):
    """Without an exchange they do not know of each other."""
    team = slow_network.Team(["worker"], {}, connected)
    for number, command in enumerate(slow_network.programs(team, TWO_HOSTS.hosts)):
        namespace = TWO_HOSTS.hosts[number].namespace
        assert command[:5] == ["ip", "netns", "exec", namespace, "worker"]
        options = dict(zip(command[5::2], command[6::2], strict=True))
        found = options["--num-processes"], options["--process-id"]
        assert found == (("2", str(number)) if connected else ("1", "0"))
        if connected:
            assert options["--coordinator"] == "10.0.0.1:7000"
            assert options["--interface"] == "eth1"


def test_the_devices_of_a_host_are_processes_in_its_namespace():
    one, two = slow_network.teams(["4 bits"], None, devices=(1, 2))
    assert list(one.specs) == ["4 bits"] and list(two.specs) == ["4 bits, 2 devices"]
    commands = slow_network.programs(two, TWO_HOSTS.hosts)
    assert [command[3][-1] for command in commands] == ["1", "1", "2", "2"]
    options = [dict(zip(command[7::2], command[8::2], strict=True)) for command in commands]
    assert [of["--process-id"] for of in options] == ["0", "1", "2", "3"]
    assert {of["--num-processes"] for of in options} == {"4"}
    [spec] = two.specs.values()
    config = worker.config_of(**spec, model=slow_network.MODELS["0.5M"], replicas=4, sequences=1)
    assert (config.replicas, config.fast, config.data.batch) == (4, 2, 4)


def test_peers_run_only_with_a_python_that_has_them():
    everything = [slow_network.ALONE, *worker.METHODS, *PEERS]
    assert len(slow_network.teams(everything, None)) == 2
    _, _, *peers = slow_network.teams(everything, "/usr/bin/python-with-torch", has_code=True)
    assert {team.program[0] for team in peers} == {"/usr/bin/python-with-torch"}
    assert [name for team in peers for name in team.specs] == list(PEERS)
    # Processes of its own for each: what one changes in PyTorch, no other sees.
    assert all(len({spec["peer"] for spec in team.specs.values()}) == 1 for team in peers)
    _, _, *without = slow_network.teams(everything, "/usr/bin/python-with-torch")
    left = {spec["peer"] for team in without for spec in team.specs.values()}
    assert left == {peer.peer for peer in PEERS.values()} - set(AUTHORS)
    (only,) = slow_network.teams(["4 bits"], "/usr/bin/python-with-torch")
    assert list(only.specs) == ["4 bits"] and only.connected


def test_as_many_steps_are_timed_as_a_method_takes_to_repeat_itself():
    found = [period_of(name) for name in ("DiLoCo, 4 bits, every 32nd", "SLAMB's code")]
    assert [*found, period_of("PowerSGD 4, Adam")] == [32, 8, 1]


@pytest.mark.parametrize("method", list(worker.METHODS))
def test_every_method_is_a_config_of_the_training_program(method):
    model = slow_network.MODELS["5M"]
    [team] = slow_network.teams([method], None)
    config = worker.config_of(**team.specs[method], model=model, replicas=4, sequences=2)
    assert config.data.batch == 8
    assert (resolve(config).replica_spread is not None) == (method in worker.UPDATES)


def test_quick_changes_only_what_is_not_named():
    options = slow_network.parse(["--quick", "--hosts", "3"])
    assert (options.hosts, options.rates) == (3, ["unlimited", "100mbit"])
    assert slow_network.parse([]).hosts == 4
    with pytest.raises(ValueError, match="is no rate"):
        slow_network.parse(["--rates", "fast"])
    with pytest.raises(ValueError, match="no quartiles"):
        slow_network.parse(["--steps", "1"])


def test_the_table_shows_each_method_against_its_own_first_rate(tmp_path):
    slower = ROW | {"rate": "100mbit", "step_seconds": ROW["step_seconds"] | {"median": 0.5}}
    assert slow_network_figure.seconds(ROW | {"skips_rounds": True}) == 0.3  # the mean
    text = slow_network_figure.table([ROW, slower])
    assert "| 4 bits | 1,234 | 1.010 | 200 ms (1.00) | 500 ms (2.50) |" in text
    alone = ROW | {"method": "no exchange", "nic_over_report": None}
    slow_network_figure.draw([alone, ROW, slower], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes()[:4] == b"\x89PNG"


STUB = """
import argparse, json, socket
from benchmarks import commands

parser = argparse.ArgumentParser()
parser.add_argument("--coordinator")
parser.add_argument("--interface")
for option in ("--num-processes", "--process-id"):
    parser.add_argument(option, type=int)
args = parser.parse_args()
other = f"10.0.0.{(args.process_id + 1) % args.num_processes + 1}"
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind(("", 9))
link.settimeout(20)

def run(steps):
    # As an exchange does, each step waits for what the other has sent in it.
    for _ in range(steps):
        for _ in range(10):
            link.sendto(bytes(1000), (other, 9))
        for _ in range(10):
            link.recv(2000)
    seconds = [0.001 + args.process_id for _ in range(steps)]
    report = {"report_bytes": 1e4, "skips_rounds": False, "loss": 1.0, "cpu_seconds": 0.1}
    return {"seconds": seconds, **report}

build = lambda peer, model, work, code: {"collectives": 1, "parameters": 1000}
commands.serve(build=build, run=run)
"""


@needs_namespaces
def test_rows_hold_what_hosts_have_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    team = slow_network.Team([sys.executable, "-c", STUB], {"stub": {"peer": "udp"}}, True)
    options = slow_network.parse(["--steps", "50", "--hosts", "2"])
    monkeypatch.setattr(slow_network, "work_of", lambda *args: tmp_path / "work.npz")
    with network.network(2) as net:
        rates = ["unlimited", "100mbit"]
        rows = list(slow_network.rows_of(team, net, rates, "5M", options, tmp_path))
    assert [row["rate"] for row in rows] == rates
    for row in rows:
        # Each datagram of 1,000 bytes has 42 of headers; now and then a kernel asks for an address,
        # or for routers: a few packets of up to 110 bytes in 50 steps.
        assert all(10_420 <= number <= 10_440 for number in row["nic_bytes"].values()), row
        assert row["agrees"] and row["disagreement"] is None
        # The mean of a host that takes 1 ms and of one that takes 1,001 ms.
        assert row["step_seconds"]["median"] == pytest.approx(0.501)
        assert (row["method"], row["hosts"], row["steps"]) == ("stub", 2, 50)
