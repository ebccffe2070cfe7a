"""Starts processes on other machines over ssh, from a file that lists the hosts."""

import ipaddress
import itertools
import pathlib
import re
import shlex
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxcomp.launch import addresses, variables
from jaxcomp.launch.distributed import Cluster, Timeouts
from jaxcomp.launch.supervise import member_command

PORT = 29411
"""Default port of process 0."""


MOST_SLOTS = 4096
"""Most processes on one host."""

_FORM = "[user@]name [slots=K]"


class Host(NamedTuple):
    """A line of the hosts file."""

    target: str  # for ssh: name, or user@name
    slots: int  # processes to start there


def hosts_of_file(path: str) -> list[Host]:
    """Reads a hosts file, see `read_hosts`.

    Raises:
      ValueError: If it cannot be read, or as `read_hosts`.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"the hosts file {path!r} cannot be read ({why}); write the name of a text file with "
            f"one {_FORM} per line."
        ) from error
    return read_hosts(text)


def read_hosts(text: str) -> list[Host]:
    """Reads the text of a hosts file: one `[user@]name [slots=K]` per line; `#` begins a comment.

    Raises:
      ValueError: For any other line, for a host that is listed twice, and for an empty list.
    """
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        # A name that begins with a dash would be an option of ssh.
        found = re.fullmatch(r"((?:\w[\w.-]*@)?[\w:][\w.:-]*)(?:\s+slots=([1-9]\d*))?", line)
        if found is None:
            raise ValueError(
                f"hosts file, line {number}: {line!r}; write {_FORM}, an IPv6 address without "
                "brackets."
            )
        if problem := _colon(found[1]):
            raise ValueError(f"hosts file, line {number}: {problem}.")
        if len(found[2] or "") > 4 or int(found[2] or 1) > MOST_SLOTS:
            raise ValueError(
                f"hosts file, line {number}: slots={found[2]} is more than {MOST_SLOTS} processes "
                "on one host; write how many accelerators it has."
            )
        if _name(found[1]) in (_name(host.target) for host in hosts):
            raise ValueError(
                f"hosts file, line {number}: {found[1]} is there already; write slots=K to start "
                "K processes on it."
            )
        hosts.append(Host(found[1], int(found[2] or 1)))
    if not hosts:
        raise ValueError(f"the hosts file names no host; write one {_FORM} per line.")
    return hosts


def _colon(target: str) -> str:
    """What is wrong with a name that has a colon and is no IPv6 address; empty for others.

    Open MPI and Horovod write HOST:SLOTS, others HOST:PORT.
    """
    name = target.rpartition("@")[2]
    try:
        ipaddress.IPv6Address(name if ":" in name else "::")
        return ""
    except ValueError:
        host, _, count = target.partition(":")
        count = count if count.isdecimal() else "K"
        return (
            f"{target!r} is neither a name nor an IPv6 address; write '{host} slots={count}' to "
            f"start {count} processes there, or '{host}' alone and --ssh 'ssh -p PORT' for a port"
        )


def _name(target: str) -> str:
    """The host that ssh would reach, without the user; in lower case."""
    return target.rpartition("@")[2].casefold()


def places(hosts: Sequence[Host]) -> list[str]:
    """The target of each process: host after host, one for each slot."""
    return [host.target for host in hosts for _ in range(host.slots)]


def hosts_of(places: Sequence[str]) -> list[Host]:
    """The hosts of processes; the inverse of `places`, or of a part of it."""
    return [Host(target, len(list(group))) for target, group in itertools.groupby(places)]


def answering(places: Sequence[str], ssh: str, seconds: float = 30.0) -> list[str]:
    """The places whose host answers over ssh within a time limit; all are asked at once."""
    asked = {
        target: subprocess.Popen(
            [*shlex.split(ssh), target, "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for target in dict.fromkeys(places)
    }
    deadline, there = time.monotonic() + seconds, set()
    for target, popen in asked.items():
        try:
            if popen.wait(max(0.0, deadline - time.monotonic())) == 0:
                there.add(target)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
    return [target for target in places if target in there]


def commands(
    hosts: Sequence[Host],
    coordinator: str | None,
    interface: str | None,
    timeouts: Timeouts,
    program: Sequence[str],
    *,
    ssh: str,
    python: str,
    folder: str,
    environ: Mapping[str, str],
    more: Collection[str] = (),
    devices: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> list[list[str]]:
    """Makes the ssh command of each process: host after host, one for each slot.

    Args:
      hosts: Where to start.
      coordinator: `host:port` of process 0, as all hosts know it; None: the first host's name
        and `PORT`.
      interface: Network interface for collectives, the same on all hosts.
      timeouts: How long processes wait for each other.
      program: The command of the program.
      ssh: Command that runs another one on a host, with its options.
      python: Interpreter on the hosts.
      folder: Working directory on the hosts.
      environ: Environment variables here; those of `variables.passed` are passed on, but for
        secret ones.
      more: Names of further variables to pass on.
      devices: The accelerators of each process of a host, by target; None: a process finds them
        itself.

    Returns:
      One command per process, process 0 first.
    """
    coordinator = coordinator or addresses.join(hosts[0].target.rpartition("@")[2], PORT)
    count = sum(host.slots for host in hosts)
    passed = variables.passed(environ, more)
    settings = [f"{key}={value}" for key, value in passed.items() if not variables.is_secret(key)]
    made: list[list[str]] = []
    for host in hosts:
        for slot in range(host.slots):
            cluster = Cluster(coordinator, count, len(made), "flags", slot, host.slots)
            own = None if devices is None else devices[host.target][slot]
            member = member_command(python, cluster, interface, timeouts, program, own)
            remote = f"cd {shlex.quote(folder)} && exec env {shlex.join([*settings, *member])}"
            made.append([*shlex.split(ssh), host.target, remote])
    return made
