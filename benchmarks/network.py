"""Hosts on one Linux machine: network namespaces, joined by a bridge over shaped links.

Everything is in its own namespaces, even the bridge: the machine's own network is neither
used nor changed. Needs root and iproute2; `unavailable` says what is missing.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NamedTuple

INTERFACE = "eth1"
"""The network interface of every host, apart from loopback."""

UNLIMITED = "unlimited"
"""The rate of links that are not shaped."""

_PREFIX = "jaxcomp"
_BURST, _LATENCY = "128kb", "50ms"
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Host(NamedTuple):
    """One host: programs started by `inside` see its interface and no other."""

    namespace: str
    address: str
    port: str  # name of the bridge's end of its link


class Network(NamedTuple):
    """Hosts that reach each other through one bridge."""

    bridge: str  # namespace of the bridge
    hosts: tuple[Host, ...]


class Counters(NamedTuple):
    """The counters of a host since its creation."""

    sent: int  # bytes through its interface, headers included
    received: int
    retransmitted: int  # TCP packets


@contextlib.contextmanager
def network(num_hosts: int) -> Iterator[Network]:
    """Makes hosts, and always takes them down at the end.

    Inside, the first Ctrl-C, SIGTERM or SIGHUP raises KeyboardInterrupt and later ones are
    ignored, so that nothing interrupts the cleanup. Namespaces of dead processes are removed
    first.

    Args:
      num_hosts: From 1 to 254.

    Yields:
      The `Network`, its links unlimited.

    Raises:
      OSError: If `ip` fails.
      ValueError: For another number of hosts.
    """
    if not 1 <= num_hosts <= 254:
        raise ValueError(f"got {num_hosts} hosts; write a number from 1 to 254.")
    remove_stale()
    prefix = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(3)}-"
    with _interrupted_once() as ignore_signals:
        try:
            yield _make(prefix, num_hosts)
        finally:
            ignore_signals()
            _remove(name for name in namespaces() if name.startswith(prefix))


def unavailable() -> str | None:
    """The reason why `network` and `shape` do not work here, found by trying; None if they do."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"there is no {' and no '.join(missing)}: install iproute2"
    if os.geteuid():
        return "network namespaces need root: run it by sudo"
    try:
        with network(1) as tried:
            shape(tried, "1gbit")
    except OSError as error:
        return f"this machine allows no shaped network namespaces: {error}"
    return None


def shape(network: Network, rate: str) -> None:
    """Limits the rate of every link, in each direction; programs keep running.

    Args:
      network: The hosts.
      rate: For example `500mbit`, headers included, or "unlimited".

    Raises:
      OSError: If `tc` fails.
      ValueError: For another format.
    """
    for command in shape_commands(network, rate):
        _run(command)


def shape_commands(network: Network, rate: str) -> list[list[str]]:
    """The commands of `shape`: one for each end of each link."""
    bits_per_second(rate)
    limit = ["tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY]
    discipline = ["noqueue"] if rate == UNLIMITED else limit
    ends = [(host.namespace, INTERFACE) for host in network.hosts]
    ends += [(network.bridge, host.port) for host in network.hosts]
    return [
        ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *discipline]
        for namespace, device in ends
    ]


def bits_per_second(rate: str) -> float:
    """Reads a rate in the format of `tc`: `500mbit` is 5e8, "unlimited" is infinite.

    Raises:
      ValueError: For another format.
    """
    if rate == UNLIMITED:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None or not float(match[1]):
        raise ValueError(f"{rate!r} is no rate; write 1gbit, 500mbit, 100mbit or {UNLIMITED}.")
    return float(match[1]) * _UNITS[match[2]]


def inside(host: Host, command: list[str]) -> list[str]:
    """The command that runs `command` on a host, as the same process."""
    return ["ip", "netns", "exec", host.namespace, *command]


def counters(host: Host) -> Counters:
    """Reads a host's counters."""
    text = _run(inside(host, ["cat", "/proc/net/dev", "/proc/net/snmp"]))
    return parse_counters(text, INTERFACE)


def parse_counters(text: str, interface: str) -> Counters:
    """Reads the texts of `/proc/net/dev` and `/proc/net/snmp`.

    Raises:
      ValueError: If the interface, or TCP, is not in them.
    """
    lines = [line.partition(":") for line in text.splitlines()]
    device = [fields.split() for name, _, fields in lines if name.strip() == interface]
    tcp = [fields.split() for name, _, fields in lines if name == "Tcp"]
    if len(device) != 1 or len(tcp) != 2:
        raise ValueError(f"no counters of {interface!r} and of TCP in {text!r}.")
    retransmitted = dict(zip(*tcp, strict=True))["RetransSegs"]
    return Counters(int(device[0][8]), int(device[0][0]), int(retransmitted))


def namespaces() -> list[str]:
    """Names of the existing namespaces that this module has made, in any process."""
    lines = _run(["ip", "netns", "list"]).splitlines()
    names = [line.split()[0] for line in lines if line.strip()]
    return [name for name in names if owner(name) is not None]


def owner(namespace: str) -> int | None:
    """The process that made a namespace, from its name; None if this module did not make it."""
    match = re.fullmatch(rf"{_PREFIX}-(\d+)-[0-9a-f]{{6}}-(?:bridge|\d+)", namespace)
    return int(match[1]) if match else None


def remove_stale() -> None:
    """Removes the namespaces of dead processes."""
    _remove(name for name in namespaces() if not os.path.exists(f"/proc/{owner(name)}"))


def _make(prefix: str, num_hosts: int) -> Network:
    bridge = f"{prefix}bridge"
    _run(["ip", "netns", "add", bridge])
    # A bridge that snoops on multicast joins a group itself, and tells every host.
    quiet = ["type", "bridge", "mcast_snooping", "0"]
    _run(["ip", "-n", bridge, "link", "add", "bridge0", *quiet])
    _up(bridge, "bridge0")
    hosts = []
    for number in range(1, num_hosts + 1):
        host = Host(f"{prefix}{number}", f"10.0.0.{number}", f"port{number}")
        _run(["ip", "netns", "add", host.namespace])
        ends = [host.port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace]
        _run(["ip", "-n", bridge, "link", "add", *ends])
        _run(["ip", "-n", bridge, "link", "set", host.port, "master", "bridge0"])
        _up(bridge, host.port)
        _run(["ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE])
        _up(host.namespace, INTERFACE)
        _run(["ip", "-n", host.namespace, "link", "set", "lo", "up"])
        hosts.append(host)
    return Network(bridge, tuple(hosts))


def _up(namespace: str, interface: str) -> None:
    # With an IPv6 address it looks for neighbours and routers, which the counters would include.
    # First, since in one command `ip` brings the interface up before it looks at the address.
    _run(["ip", "-n", namespace, "link", "set", interface, "addrgenmode", "none"])
    _run(["ip", "-n", namespace, "link", "set", interface, "up"])


def _remove(names) -> None:
    # Removing the bridge's namespace removes the bridge and both ends of every link.
    for name in names:
        _run(["ip", "netns", "delete", name])


def _run(command: list[str]) -> str:
    # In a session of its own, so that a Ctrl-C at the terminal does not reach it.
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, start_new_session=True
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@contextlib.contextmanager
def _interrupted_once():
    """Makes the first stop signal a KeyboardInterrupt; yields a function to ignore later ones."""
    ignored = threading.Event()

    def handle(signum, frame):
        if not ignored.is_set():
            ignored.set()
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield ignored.set
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield ignored.set
    finally:
        for number, handler in previous.items():
            # None stands for a handler of a C library, which Python cannot put back.
            signal.signal(number, handler or signal.SIG_DFL)
