"""Starts the processes of a run, shows the first one's output, and makes sure that all end."""

import contextlib
import datetime
import itertools
import os
import pathlib
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from jaxcomp.launch import control, echo, regular, signals
from jaxcomp.launch.distributed import Cluster, Timeouts
from jaxcomp.launch.exits import Exit, from_returncode, may_restart, printable, say

PATIENCE = 5.0
"""Seconds for a process to end after it was told to."""


def member_command(
    python: str,
    cluster: Cluster,
    interface: str | None,
    timeouts: Timeouts,
    program: Sequence[str],
    devices: Sequence[int] | None = None,
) -> list[str]:
    """Makes the command of one process, whose standard input is its control channel.

    Args:
      python: The interpreter.
      cluster: The cluster from the view of the process to start.
      interface: Network interface for collectives, or None.
      timeouts: How long processes wait for each other.
      program: The command of the program.
      devices: Accelerators of the process; None: it finds them itself.

    Returns:
      The arguments, the program first.
    """
    flags = {
        "coordinator": cluster.coordinator,
        "num-processes": cluster.num_processes,
        "process-id": cluster.process_id,
        "local-id": cluster.local_id,
        "local-count": cluster.local_count,
        "start-timeout": timeouts.start,
        "heartbeat-timeout": timeouts.heartbeat,
    }
    if interface is not None:
        flags["interface"] = interface
    if devices is not None:
        flags["local-devices"] = ",".join(map(str, devices))
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [python, "-u", "-m", "jaxcomp.launch", "--obey-stdin", *words, "--", *program]


class Member(NamedTuple):
    """One process of the run."""

    popen: subprocess.Popen
    control: IO[bytes]  # its standard input
    log: pathlib.Path  # its output
    began: int  # position in the log where it begins


class End(NamedTuple):
    """The end of a run's processes.

    Attributes:
      status: 0, or the status of the process that failed first, 128 + its number for a signal.
        Processes that ended because another one was gone count last.
      lost: Processes that a signal or a fault ended, which needs no action by a person. An
        unforeseen error is not one: all processes end with its status.
      signalled: Whether a signal was passed on to them.
    """

    status: int
    lost: tuple[int, ...] = ()
    signalled: bool = False


def supervise(
    commands: Sequence[Sequence[str]],
    folder: pathlib.Path,
    grace: float,
    hurry: bool = False,
    is_wanted: Callable[[], bool] = lambda: False,
    private: Mapping[str, str] | None = None,
) -> End:
    """Runs commands until all have ended; the standard input of each is a control channel.

    Args:
      commands: One per process.
      folder: For the logs, `process_0.log` and so on; they grow with each start.
      grace: Seconds for the others to end after one has failed.
      hurry: Whether to kill them instead, and at once if that one was lost: all will be started
        again, and saved files are always complete.
      is_wanted: Whether to tell them to save and end.
      private: Variables to set in them that no process list may show.

    Returns:
      How they ended.
    """
    regular.make_folder(folder, "write another folder as --logs")
    echo.write(os.fsencode(f"{len(commands)} processes; logs: {folder}/process_*.log\n"))
    members: list[Member] = []
    secret = control.greeting(secrets.token_hex(32), private or {})
    with _signals() as names, contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            members.append(_start(command, folder / f"process_{number}.log", secret))
            stack.callback(_kill, members[-1])
        first = members[0]
        show = stack.enter_context(echo.echo(first.log, first.began))
        return _wait(members, names, grace, hurry, is_wanted, show)


def _start(command: Sequence[str], log: pathlib.Path, secret: str) -> Member:
    # Only the user may read the log; a link in its place would write elsewhere.
    owned = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with open(owned, "ab", buffering=0) as output:
        now = datetime.datetime.now().isoformat(" ", "seconds")
        with regular.named(log):
            output.write(os.fsencode(f"--- {now}: {_without_values(command)}\n"))
        began = output.tell()
        # A session of its own, so that Ctrl-C reaches a process only through the launcher, once.
        popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
        )
    assert popen.stdin is not None
    control.tell(popen.stdin, secret)
    return Member(popen, popen.stdin, log, began)


def _without_values(command: Sequence[str]) -> str:
    """A command for the log, with only the names of variables that are passed over ssh."""
    words = list(command)
    for key, value in os.environ.items():
        given = shlex.quote(f"{key}={value}")
        words = [word.replace(f" {given} ", f" {key}=... ") for word in words]
    return shlex.join(words)


@contextlib.contextmanager
def _signals() -> Iterator[list[str]]:
    """The names of arriving signals, for `_wait` to pass on.

    A handler that passed them on would miss a process that is just being started. A new program
    keeps what is ignored, but no handlers: what this process ignores, its processes do not.
    """
    names: list[str] = []

    def note(number, frame):
        names.append(signal.Signals(number).name.removeprefix("SIG"))

    nothing = dict.fromkeys(signals.ignored(), lambda number, frame: None)
    handlers = dict.fromkeys(signals.to_catch(), note) | nothing
    with signals.handled(handlers):
        yield names


def _wait(members: list[Member], names: list[str], grace: float, hurry: bool, wanted, show) -> End:
    failed: list[int] = []  # numbers of processes, in the order of their failures
    deadline = float("inf")
    passed, asked, at_once = 0, False, False
    while running := [member for member in members if member.popen.poll() is None]:
        new = names[passed:]
        passed += len(new)
        if not asked and not passed and wanted():
            new, asked = ["TERM"], True
        for name, member in itertools.product(new, running):
            control.tell(member.control, name)
        failed += _failed(members, failed)
        if failed:
            deadline = min(deadline, time.monotonic() + grace)
        if at_once := sum(f"SIG{name}" in signals.ORDERS for name in names) > 2:
            deadline = min(deadline, time.monotonic() + PATIENCE)  # for those that end themselves
        if time.monotonic() > deadline or (hurry and not names and _lost(members, failed)):
            break
        show()
        time.sleep(0.05)
    failed += _failed(members, failed)
    _end(running, ("KILL",) if at_once or (hurry and not names) else ("TERM", "KILL"))
    show()
    if not failed:
        return End(Exit.INTERRUPTED if running else Exit.DONE, signalled=bool(names))
    alone = _alone(members, failed)
    return End(_report(members, [*alone, *failed][0]), _lost(members, failed), bool(names))


def _failed(members: list[Member], known: list[int]) -> list[int]:
    return [n for n, member in enumerate(members) if member.popen.returncode and n not in known]


def _alone(members: list[Member], failed: list[int]) -> list[int]:
    """The failed processes whose status does not say that another one made them end."""
    others = Exit.TRY_AGAIN, Exit.DRAINED
    return [n for n in failed if members[n].popen.returncode not in others]


def _lost(members: list[Member], failed: list[int]) -> tuple[int, ...]:
    """The failed processes that need no action by a person, and ended by themselves."""
    statuses = {n: from_returncode(members[n].popen.returncode) for n in _alone(members, failed)}
    return tuple(n for n, it in statuses.items() if may_restart(it) and it != Exit.UNFORESEEN)


def _end(members: list[Member], names: Sequence[str]) -> None:
    for name in names:
        for member in members:
            control.tell(member.control, name)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and any(m.popen.poll() is None for m in members):
            time.sleep(0.05)
    for member in members:
        _kill(member)


def _kill(member: Member) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(member.popen.pid, signal.SIGKILL)  # with all that it has started
    member.popen.wait()
    with contextlib.suppress(OSError):
        member.control.close()


def _report(members: list[Member], first: int) -> int:
    """Prints which process failed first and the end of its log."""
    member = members[first]
    code = member.popen.returncode
    status = from_returncode(code)
    # Ctrl-C at the start, or a third one, which the user knows; or a stop, which the run reported.
    if status in (Exit.INTERRUPTED, Exit.DRAINED):
        return status
    how = f"status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    if status == Exit.KILLED:
        how += " (did its host or pod run out of memory?)"
    with open(member.log, "rb") as log:
        log.seek(member.began)
        end = printable(log.read().decode(errors="replace")).splitlines()[-20:]
    say(f"error: process {first} failed first, with {how}; {member.log} ends:")
    say("\n".join(f"    {line}" for line in end) or "    (nothing)")
    return status
