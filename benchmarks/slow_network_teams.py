"""The hosts that benchmarks.slow_network starts for its methods, and their commands."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import network
from benchmarks.slow_network_methods import (
    ADAM,
    ALONE,
    AUTHORS,
    DENSE,
    METHODS,
    PEERS,
    SHARDED,
)


class Team(NamedTuple):
    """Hosts that are started together, and what they build."""

    program: list[str]  # a worker's command, up to its options
    specs: dict[str, dict]  # method -> arguments of the worker's `build`
    connected: bool  # whether the hosts train together
    devices: int = 1  # of a host, each a process


def teams(
    methods: list[str],
    torch_python: str | None,
    has_code: bool = False,
    devices: Sequence[int] = (1,),
) -> list[Team]:
    """The teams of hosts for some methods, in the order of the tables of methods.

    Args:
      methods: Their names.
      torch_python: The peers' Python; None for no peers.
      has_code: Whether the authors' code is available.
      devices: Devices per host, for each team that trains with JAX.
    """
    jax_host = [sys.executable, "-m", "benchmarks.slow_network_worker"]
    torch_host = [torch_python or "", "-m", "benchmarks.peers.host"]
    updates = {
        name: {"update": METHODS[name], "overlap": name.endswith("overlapped")}
        for name in METHODS
        if name in methods
    } | {name: {"update": ADAM, "qsdp": SHARDED[name]} for name in SHARDED if name in methods}
    alone = {ALONE: {"update": METHODS[DENSE]}} if ALONE in methods else {}
    everyone = [Team(jax_host, alone, False)]
    for count in devices:
        # Behind one interface: together they send what one device would.
        several = {
            f"{name}, {count} devices": spec | {"fast": count} for name, spec in updates.items()
        }
        everyone.append(Team(jax_host, several if count > 1 else updates, True, count))
    # Each file of peers runs in its own processes, since some modify PyTorch.
    for peer in dict.fromkeys(peer.peer for peer in PEERS.values()):
        specs = {
            name: spec._asdict()
            for name, spec in PEERS.items()
            if name in methods and spec.peer == peer
        }
        if torch_python and (has_code or peer not in AUTHORS):
            everyone.append(Team(torch_host, specs, True))
    return [team for team in everyone if team.specs]


def programs(team: Team, hosts: tuple[network.Host, ...]) -> list[list[str]]:
    """The commands of a team, host after host."""
    count = len(hosts) * team.devices if team.connected else 1
    options = ["--coordinator", f"{hosts[0].address}:7000", "--num-processes", str(count)]
    options += ["--interface", network.INTERFACE]
    places = [host for host in hosts for _ in range(team.devices)]
    return [
        network.inside(
            host, [*team.program, *options, "--process-id", str(i if team.connected else 0)]
        )
        for i, host in enumerate(places)
    ]
