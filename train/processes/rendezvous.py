"""Where processes meet before JAX connects them: what is wrong gets a message, not an abort.

JAX ends a process with a stack trace when its start times out, and lets two services share a port.
So process 0 listens on the coordinator's address first, sees who comes, and tells everyone.
"""

import ipaddress
import json
import selectors
import socket
import time
from typing import Any

from train.processes import addresses
from train.processes.exits import Transient


def meet(
    coordinator: str, num_processes: int, process_id: int, seconds: float, patient: bool = False
) -> tuple[str, str]:
    """Waits until all processes of a run are there; all of them return, or all raise.

    Args:
      coordinator: `host:port` at which process 0 listens until this returns.
      num_processes: Processes of the run, as this one was told.
      process_id: Of this process, in [0, num_processes).
      seconds: How long to wait for the others.
      patient: Whether to wait also for the coordinator's name to resolve.

    Returns:
      Numeric addresses: the coordinator's, and this process's own on the way to it.

    Raises:
      ValueError: If the coordinator's address is no good here.
      RuntimeError: If somebody is there twice, or of another opinion about the number; `Transient`
        if somebody is missing, or the coordinator's name does not appear in time.
    """
    deadline = time.monotonic() + seconds
    host, port = addresses.split(coordinator)
    address = _resolve(host, deadline if patient else 0.0)
    if process_id == 0:
        with _listen(coordinator, address, port) as listener:
            _host(listener, num_processes, deadline, _hint(host, address))
        return address, address
    with _reach(coordinator, address, port, deadline, _hint(host, address)) as connection:
        _send(connection, {"process": process_id, "of": num_processes, "on": socket.gethostname()})
        connection.settimeout(2 * seconds + 10)
        answer = _receive(connection)
        if answer is None or "problem" not in answer:
            raise Transient(
                f"the program at {coordinator} is not this run's process 0, or it has ended while "
                "processes were waiting, or all processes it needs were there already. See its "
                "output; if it belongs to something else, write another port on all hosts."
            )
        if answer["problem"] is not None:
            raise (Transient if answer.get("transient") else RuntimeError)(answer["problem"])
        return address, connection.getsockname()[0]


def _resolve(host: str, deadline: float) -> str:
    while True:
        try:
            return addresses.resolve(host)
        except ValueError as error:
            if not deadline:
                raise
            if time.monotonic() > deadline:
                raise Transient(str(error)) from error
        time.sleep(0.5)


def _hint(host: str, address: str) -> str:
    if host == address or not ipaddress.ip_address(address).is_loopback:
        return ""
    return (
        f" The name {host!r} is {address} on {socket.gethostname()}, which no other host can "
        "reach; write an address of the network as --coordinator."
    )


def _listen(coordinator: str, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen at {coordinator} ({address}) on {socket.gethostname()}: "
            f"{error.strerror}. The address must be this host's ({addresses.listing()}), and the "
            "port free: neither another run nor a second process 0 may use it."
        ) from error


def _host(listener: socket.socket, num_processes: int, deadline: float, hint: str) -> None:
    """Process 0: gathers the others, tells them what came of it, and raises if it is a problem."""
    present: dict[int, tuple[socket.socket, str]] = {}
    problem: RuntimeError | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while problem is None and len(present) < num_processes - 1:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                problem = Transient(_missing(present, num_processes, listener) + hint)
            for key, _ in ready:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    connection.settimeout(2.0)
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                present = {i: who for i, who in present.items() if who[0] is not key.fileobj}
                hello = _receive(key.fileobj)
                if hello is None or not isinstance(hello.get("process"), int):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    continue
                if conflict := _conflict(hello, present, num_processes):
                    problem = problem or RuntimeError(conflict)
                present[hello["process"]] = (key.fileobj, hello.get("on"))
        answer = {"problem": problem and str(problem), "transient": isinstance(problem, Transient)}
        for key in list(selector.get_map().values()):
            if key.fileobj is not listener:
                with key.fileobj as connection:
                    _send(connection, answer)
                    _receive(connection)  # the other side closes first
    if problem is not None:
        raise problem


def _conflict(hello: dict[str, Any], present: dict, num_processes: int) -> str | None:
    process, host = hello["process"], hello.get("on")
    if hello.get("of") != num_processes:
        return (
            f"process {process} on {host} was started with --num-processes {hello.get('of')}, "
            f"process 0 on {socket.gethostname()} with {num_processes}; write the same on all "
            "hosts."
        )
    if process in present:
        return (
            f"two processes have --process-id {process}, one on {present[process][1]} and one on "
            f"{host}; give each its own in [0, {num_processes})."
        )
    return None


def _missing(present: dict, num_processes: int, listener: socket.socket) -> str:
    absent = [str(i) for i in range(1, num_processes) if i not in present]
    here = ", ".join(f"{i} ({present[i][1]})" for i in sorted(present))
    return (
        f"only {1 + len(present)} of {num_processes} processes have met at "
        f"{addresses.join(*listener.getsockname()[:2])}: there are 0 ({socket.gethostname()})"
        f"{', ' if here else ''}{here}; missing: {', '.join(absent)}. See their output; a firewall "
        "between the hosts, too few processes or a too short --start-timeout look like this."
    )


def _reach(coordinator: str, address: str, port: int, deadline: float, hint: str) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((address, port), timeout=max(0.1, min(5.0, left)))
            # Trying a free port of this host again and again can end in a connection to oneself.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        except OSError as error:
            if left <= 0:
                raise Transient(
                    f"process 0 cannot be reached at {coordinator} ({address}) from "
                    f"{socket.gethostname()}: {error}. Is it started, is the address right, and "
                    f"does no firewall close the port?{hint}"
                ) from error
        time.sleep(0.1)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # the other side has gone: what it has to say stands in its own output


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One message; None if the other side closes, is silent too long, or says something else."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < 2**16:
            part = connection.recv(4096)
            if not part:
                return None
            data += part
        message = json.loads(data)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
