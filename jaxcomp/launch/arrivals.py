"""Process 0 at the start: it waits for the others for a bounded time, and tells them the result.

Anybody who reaches the port may connect. A caller has a few seconds for one short line with the
run's seal. Other callers are disconnected, without harm to the start.
"""

import contextlib
import dataclasses
import secrets
import selectors
import socket
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from jaxcomp.launch import addresses, lines, seals
from jaxcomp.launch.exits import Transient

HELLO = {"process": int, "of": int, "on": str, "nonce": str}
"""The hello of a process: its number, the number of processes, its host and a nonce."""

_NAME = 64  # characters of a host's name
_LINE = 4096  # most bytes from a caller
_PATIENCE = 5.0  # seconds for these
_MOST = 1024  # callers at a time
_FAREWELL = 2.0  # seconds for all to hear the result, and close


class Caller(NamedTuple):
    """A connection that has not said hello yet."""

    data: bytes  # received so far
    until: float  # deadline for the rest


class Present(NamedTuple):
    """A process that has arrived."""

    connection: socket.socket
    host: str
    nonce: str  # for the answer to it


@dataclasses.dataclass
class Gathering:
    """Which of the processes 1 to `num_processes - 1` have arrived."""

    listener: socket.socket
    num_processes: int
    secret: bytes
    selector: selectors.BaseSelector
    nonce: str  # of this start
    present: dict[int, Present] = dataclasses.field(default_factory=dict)
    callers: dict[socket.socket, Caller] = dataclasses.field(default_factory=dict)
    refused: set[str] = dataclasses.field(default_factory=set)  # addresses of strangers

    def wait(self, deadline: float) -> None:
        """Returns when all are there; raises ValueError on a conflict, Transient if some miss."""
        while len(self.present) < self.num_processes - 1:
            now = time.monotonic()
            if now >= deadline:
                raise Transient(self.missing())
            for caller in [caller for caller, (_, until) in self.callers.items() if until <= now]:
                self.refuse(caller)
            nearest = min([deadline, *(until for _, until in self.callers.values())])
            for key, _ in self.selector.select(max(0.0, nearest - now)):
                if key.fileobj is self.listener:
                    self.welcome()
                elif isinstance(key.fileobj, socket.socket):
                    # One that is no caller any more is done, and leaves.
                    is_waiting = key.fileobj in self.callers
                    (self.hear if is_waiting else self.forget)(key.fileobj)

    def welcome(self) -> None:
        try:
            caller, (address, *_) = self.listener.accept()
        except OSError:  # already gone
            return
        caller.setblocking(False)
        if len(self.callers) >= _MOST:
            self.refuse(next(iter(self.callers)))
        self.callers[caller] = Caller(b"", time.monotonic() + _PATIENCE)
        self.selector.register(caller, selectors.EVENT_READ, address)
        with contextlib.suppress(OSError):
            lines.greet(caller, self.nonce)

    def hear(self, caller: socket.socket) -> None:
        data, until = self.callers[caller]
        try:
            part = caller.recv(_LINE)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        self.callers[caller] = Caller(data + part, until)
        line, end, _ = (data + part).partition(b"\n")
        if end or not part or len(data + part) > _LINE:
            hello = self.hello(line) if end else None
            if hello is None:
                self.refuse(caller)
            else:
                self.take(caller, hello)

    def hello(self, line: bytes) -> dict[str, Any] | None:
        text = seals.unseal(self.secret, f"hello {self.nonce}", line.decode(errors="replace"))
        hello = seals.json_object(text or "")
        if hello is None or [type(hello.get(name)) for name in HELLO] != list(HELLO.values()):
            return None
        # A process with another number of processes is told so, whatever its own number.
        is_ours = 0 < hello["process"] < self.num_processes or hello["of"] != self.num_processes
        return hello if is_ours else None

    def take(self, caller: socket.socket, hello: dict[str, Any]) -> None:
        """Accepts a caller as a process; raises ValueError if it conflicts with another."""
        del self.callers[caller]
        process, conflict = hello["process"], self.conflict(hello)
        present = Present(caller, hello["on"][:_NAME], hello["nonce"])
        # All hear of a conflict, including the two processes in it.
        self.present[process if conflict is None else -1 - process] = present
        if conflict is not None:
            raise ValueError(conflict)

    def forget(self, connection: socket.socket) -> None:
        self.present = {i: it for i, it in self.present.items() if it.connection is not connection}
        self.selector.unregister(connection)
        connection.close()

    def refuse(self, caller: socket.socket) -> None:
        self.refused.add(self.selector.get_key(caller).data)
        del self.callers[caller]
        self.forget(caller)

    def conflict(self, hello: dict[str, Any]) -> str | None:
        process, host, here = hello["process"], hello["on"][:_NAME], socket.gethostname()
        if hello["of"] != self.num_processes:
            return (
                f"process {process} on {host} was started with --num-processes {hello['of']}, "
                f"process 0 on {here} with {self.num_processes}; write the same on all hosts."
            )
        if process in self.present:
            return (
                f"two processes have --process-id {process}, one on {self.present[process].host} "
                f"and one on {host}; give each its own in [0, {self.num_processes})."
            )
        return None

    def missing(self) -> str:
        count, here = self.num_processes, socket.gethostname()
        absent = [str(number) for number in range(1, count) if number not in self.present]
        there = [f"{number} ({it.host})" for number, it in sorted(self.present.items())]
        strangers = (
            f" Not of this run, or without its secret: {', '.join(sorted(self.refused)[:8])}."
            if self.refused
            else ""
        )
        return (
            f"only {1 + len(there)} of {count} processes have met at "
            f"{addresses.join(*self.listener.getsockname()[:2])}: there are "
            f"{', '.join([f'0 ({here})', *there])}; missing: {', '.join(absent)}. See their "
            "output; a firewall between the hosts, too few processes or a too short "
            f"--start-timeout look like this.{strangers}"
        )

    def close(self, problem: Exception | None) -> None:
        """Tells the processes that are there the result, and disconnects other callers."""
        for caller in list(self.callers):
            self.refuse(caller)
        answer = {"problem": problem and str(problem), "transient": isinstance(problem, Transient)}
        _tell(self.present.values(), answer, self.secret)


def gather(
    listener: socket.socket, num_processes: int, deadline: float, hint: str, secret: bytes
) -> bytes:
    """Waits for the others in process 0, and returns the key of this start of the run.

    Raises:
      ValueError: After telling all that are there, if a process is there twice or has another
        number of processes; `Transient`, with the hint, if a process is missing.
    """
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        made = Gathering(listener, num_processes, secret, selector, secrets.token_hex(16))
        try:
            made.wait(deadline)
        except (ValueError, Transient) as error:
            problem = Transient(f"{error}{hint}") if isinstance(error, Transient) else error
            made.close(problem)
            raise problem from None
        made.close(None)
    return seals.session(secret, made.nonce)


def _tell(present: Collection[Present], answer: dict[str, Any], secret: bytes) -> None:
    until = time.monotonic() + _FAREWELL
    for connection, _, nonce in present:
        with contextlib.suppress(OSError):
            connection.settimeout(max(0.01, until - time.monotonic()))
            lines.send(connection, secret, f"answer {nonce}", answer)
    for connection, _, _ in present:
        # The other side closes first, so that the port is free at once.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(max(0.01, until - time.monotonic()))
            connection.recv(1)
