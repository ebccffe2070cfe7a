"""Hosts in namespaces: what is pure anywhere, the rest where this machine has them."""

import contextlib
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import network
from tests.helpers.namespaces import needs_namespaces

ROOT = pathlib.Path(__file__).parents[2]
KERNEL_TEXT = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:     100       2    0    0    0     0          0         0      100       2    0    0 0 0 0 0
  eth1: 5000321      17    0    0    0     0          0         0 7000123      19    0    0 0 0 0 0
Ip: Forwarding DefaultTTL
Ip: 2 64
Tcp: RtoAlgorithm RtoMin MaxConn RetransSegs InErrs
Tcp: 1 200 -1 42 0
"""
TWO_HOSTS = network.Network(
    "jaxcomp-7-0123ab-bridge",
    (
        network.Host("jaxcomp-7-0123ab-1", "10.0.0.1", "port1"),
        network.Host("jaxcomp-7-0123ab-2", "10.0.0.2", "port2"),
    ),
)


def test_rates_are_read_as_tc_writes_them():
    assert network.bits_per_second("500mbit") == 5e8
    assert network.bits_per_second("2.5gbit") == 2.5e9
    assert network.bits_per_second("unlimited") == float("inf")


@pytest.mark.parametrize("rate", ["500", "500 mbit", "0mbit", "-1gbit", "fast", "10mbps"])
def test_other_rates_are_refused(rate):
    with pytest.raises(ValueError, match="write 1gbit"):
        network.bits_per_second(rate)


def test_counters_are_read_from_the_kernels_text():
    assert network.parse_counters(KERNEL_TEXT, "eth1") == (7000123, 5000321, 42)


@pytest.mark.parametrize("missing", ["eth1", "Tcp"])
def test_missing_counters_are_said(missing):
    text = "\n".join(line for line in KERNEL_TEXT.splitlines() if missing not in line)
    with pytest.raises(ValueError, match="no counters of 'eth1'"):
        network.parse_counters(text, "eth1")


def test_both_ends_of_every_link_are_shaped():
    limited = network.shape_commands(TWO_HOSTS, "500mbit")
    ends = {(command[2], command[6]) for command in limited}
    assert ends == {
        *((host.namespace, "eth1") for host in TWO_HOSTS.hosts),
        *((TWO_HOSTS.bridge, host.port) for host in TWO_HOSTS.hosts),
    }
    assert len(limited) == 4
    tail = "root tbf rate 500mbit burst 128kb latency 50ms".split()
    assert all(command[7:] == tail for command in limited)
    unlimited = network.shape_commands(TWO_HOSTS, "unlimited")
    assert [command[:7] for command in unlimited] == [command[:7] for command in limited]
    assert all(command[7:] == ["root", "noqueue"] for command in unlimited)


def test_only_this_modules_namespaces_have_an_owner():
    assert network.owner(TWO_HOSTS.bridge) == 7
    assert network.owner(TWO_HOSTS.hosts[0].namespace) == 7
    for other in ("jaxcomp", "jaxcomp-7", "jaxcomp-x-0123ab-1", "my-jaxcomp-7-0123ab-1", "vpn"):
        assert network.owner(other) is None


def test_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(network.sys, "platform", "darwin")
    assert "need Linux" in network.unavailable()
    monkeypatch.setattr(network.sys, "platform", "linux")
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert network.unavailable() == "there is no tc: install iproute2"
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert "run it by sudo" in network.unavailable()


@pytest.mark.parametrize("num_hosts", [0, 255])
def test_other_numbers_of_hosts_are_refused(num_hosts):
    with pytest.raises(ValueError, match="from 1 to 254"), network.network(num_hosts):
        pass


def run(command):
    """Output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


RECEIVE = """
import socket
with socket.create_server(("{address}", 7000)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    size = 0
    while part := connection.recv(2**20):
        size += len(part)
print(size, flush=True)
"""
SEND = """
import socket
with socket.create_connection(("{address}", 7000)) as connection:
    connection.sendall(bytes({size}))
"""


def transfer(net, size):
    """Sends bytes from the first host to the second; seconds, and what both have counted."""
    first, second = net.hosts[:2]
    python = lambda host, text: network.inside(host, [sys.executable, "-c", text])
    receive = python(second, RECEIVE.format(address=second.address))
    before = [network.counters(host) for host in (first, second)]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        assert receiver.stdout.readline() == "listening\n"
        began = time.perf_counter()
        run(python(first, SEND.format(address=second.address, size=size)))
        assert int(receiver.stdout.readline()) == size
        seconds = time.perf_counter() - began
    after = [network.counters(host) for host in (first, second)]
    return seconds, [
        network.Counters(*(new - old for new, old in zip(*pair, strict=True)))
        for pair in zip(after, before, strict=True)
    ]


@needs_namespaces
def test_counters_hold_what_sockets_have_sent():
    size = 4_000_000
    with network.network(3) as net:
        # Until the bridge has met both hosts it sends their frames to the third one too.
        transfer(net, 1_000)
        before = network.counters(net.hosts[2])
        _, (sender, receiver) = transfer(net, size)
        after = network.counters(net.hosts[2])
    # Headers, acknowledgements and what was sent twice; nothing is lost on the way back.
    resent = 66_000 * sender.retransmitted
    assert size < sender.sent < 1.07 * size + 2_000 + resent
    # The connection's last packets may be on their way while the counters are read.
    late = 4 * 66
    assert sender.sent - resent <= receiver.received + late
    assert receiver.received <= sender.sent + late
    assert abs(receiver.sent - sender.received) <= late and sender.received < 0.05 * size
    # A broadcast for the second host's address is all that the third one may hear.
    assert after.received - before.received < 200 and after.sent == 0


@needs_namespaces
def test_hosts_hear_nothing_that_no_host_has_sent():
    with network.network(2) as net:
        time.sleep(2.5)  # the kernel looks for neighbours and routers within two seconds
        counted = [network.counters(host) for host in net.hosts]
    assert counted == [network.Counters(0, 0, 0)] * 2


@needs_namespaces
def test_links_carry_what_they_are_shaped_to():
    size, bits = 4_000_000, 8 * 4_000_000
    burst = 2 * 8 * 128 * 1024  # one at each end passes at once
    with network.network(2) as net:
        network.shape(net, "500mbit")
        network.shape(net, "100mbit")
        slow, _ = transfer(net, size)
        network.shape(net, "unlimited")
        fast, _ = transfer(net, size)
    assert slow > (bits - burst) / 100e6
    assert fast < (bits - burst) / 100e6


@needs_namespaces
def test_the_machines_own_network_stays_as_it_is():
    look = lambda: (run(["ip", "-o", "link"]), run(["tc", "qdisc"]), run(["ip", "-o", "address"]))
    before = look()
    with network.network(2) as net:
        network.shape(net, "100mbit")
        assert look() == before
    assert look() == before


@pytest.mark.parametrize("raised", [KeyboardInterrupt, None])
@needs_namespaces
def test_nothing_is_left_however_it_ends(raised):
    names = []
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        with network.network(2) as net:
            names = [net.bridge, *(host.namespace for host in net.hosts)]
            assert set(names) <= set(network.namespaces())
            if raised:
                raise raised
    assert names and not set(names) & set(network.namespaces())


@needs_namespaces
def test_nothing_is_left_of_a_network_that_could_not_be_made(monkeypatch):
    before, real = network.namespaces(), network._run

    def refuse(command):
        if "10.0.0.2/24" in command:
            raise OSError("refused")
        return real(command)

    monkeypatch.setattr(network, "_run", refuse)
    with pytest.raises(OSError, match="refused"), network.network(2):
        pass
    assert network.namespaces() == before


HOLD = """
import signal, time
from benchmarks import network

handlers = lambda: [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
before = handlers()
try:
    with network.network(2):
        print("made", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", handlers() == before, flush=True)
"""


def hold():
    """Starts a process that holds a network; the process, and its namespaces."""
    command = [sys.executable, "-c", HOLD]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "made\n"
    owned = [name for name in network.namespaces() if network.owner(name) == process.pid]
    assert len(owned) == 3
    return process, owned


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@needs_namespaces
def test_nothing_is_left_after_a_signal(number):
    process, owned = hold()
    with process:
        process.send_signal(number)
        process.send_signal(number)  # Impatience must not stop the taking down.
        assert process.stdout.read() == "interrupted True\n"
    assert process.returncode == 0
    assert not set(owned) & set(network.namespaces())


@needs_namespaces
def test_what_a_killed_process_leaves_goes_at_the_next_start():
    (dead, left), (alive, kept) = hold(), hold()
    with dead, alive:
        try:
            dead.kill()
            dead.wait(30)
            assert set(left + kept) <= set(network.namespaces())
            with network.network(1):
                now = set(network.namespaces())
            assert not set(left) & now
            assert set(kept) <= now
        finally:
            dead.kill()
            alive.terminate()
    assert not set(kept) & set(network.namespaces())
