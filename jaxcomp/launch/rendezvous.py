"""The rendezvous of processes before JAX connects them: problems get a message, not an abort.

JAX ends a process with a stack trace when its start times out, and lets two services share a port.
So process 0 listens on the coordinator's address first, waits for the others, and answers them.
"""

import contextlib
import errno
import ipaddress
import socket
import time

from jaxcomp.launch import addresses, arrivals, lines, seals
from jaxcomp.launch.exits import Transient

_LONGEST = 1 << 16  # bytes that process 0 may answer


def meet(
    coordinator: str,
    num_processes: int,
    process_id: int,
    seconds: float,
    patient: bool = False,
    secret: bytes = b"",
) -> tuple[str, str, bytes]:
    """Waits until all processes of a run are there; all of them return, or all raise.

    Args:
      coordinator: `host:port` at which process 0 listens until this returns.
      num_processes: Processes of the run, as this one was started.
      process_id: Id of this process, in [0, num_processes).
      seconds: Time to wait for the others.
      patient: Whether to also wait for the coordinator's name to resolve.
      secret: Secret of the run; processes without it are rejected and ignored.

    Returns:
      Numeric addresses of the coordinator and of this process on the way to it, and the key of this
      start of the run.

    Raises:
      ValueError: If the coordinator's address is invalid here, a process is there twice, or was
        started with another number of processes.
      Transient: If a process is missing, the port is taken, or the name does not resolve in time.
    """
    deadline = time.monotonic() + seconds
    host, port = addresses.split(coordinator)
    address = _resolve(host, deadline if patient else 0.0)
    if process_id == 0:
        with _listen(coordinator, address, port) as listener:
            hint = _hint(host, address)
            key = arrivals.gather(listener, num_processes, deadline, hint, secret)
        return address, address, key
    with _reach(coordinator, address, port, deadline, _hint(host, address)) as connection:
        until = time.monotonic() + 2 * seconds + 10  # process 0 may have begun later
        hello, answer = dict(process=process_id, of=num_processes, on=socket.gethostname()), None
        with contextlib.suppress(OSError):  # if the other side is gone, its own output says why
            nonce, own = lines.ask(connection, secret, "hello", hello, until)
            answer = lines.answer(connection, secret, own, until, _LONGEST)
        if answer is None or "problem" not in answer:
            raise Transient(
                f"the program at {coordinator} is not this run's process 0, or has another secret, "
                "or it has ended while processes were waiting, or all processes it needs were "
                "there already. See its output; if it belongs to something else, write another "
                "port on all hosts."
            )
        if answer["problem"] is not None:
            kind = Transient if answer.get("transient") else ValueError
            raise kind(str(answer["problem"]))
        return address, connection.getsockname()[0], seals.session(secret, nonce)


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
        # The port may belong to an earlier start of this run that is about to end.
        kind = Transient if error.errno == errno.EADDRINUSE else ValueError
        raise kind(
            f"process 0 cannot listen at {coordinator} ({address}) on {socket.gethostname()}: "
            f"{error.strerror}. The address must be this host's ({addresses.listing()}), and the "
            "port free: neither another run nor a second process 0 may use it. Write --coordinator "
            "HOST:PORT with this host, or another port."
        ) from error


def _reach(coordinator: str, address: str, port: int, deadline: float, hint: str) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((address, port), timeout=max(0.1, min(5.0, left)))
            # Repeated attempts at a free port of this host can connect a process to itself.
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
