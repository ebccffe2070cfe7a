"""Many processes: connecting, checking that they run the same, and ending."""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax

from jaxcomp.launch import addresses, board, private, rendezvous
from jaxcomp.launch.aborts import on_abort
from jaxcomp.launch.board import Board
from jaxcomp.launch.exits import Exit, Transient, ended, flush, silence
from jaxcomp.launch.peers import bounded
from jaxcomp.launch.seals import json_object

_LOOK = 0.1  # seconds between two looks at the board
_FAILED = "failed"  # board folder with the exit status of each process that gives up


class Cluster(NamedTuple):
    """The processes of one run, from the view of this process."""

    coordinator: str  # host:port on which process 0 listens and the others find it
    num_processes: int
    process_id: int  # of this process, in [0, num_processes)
    source: str  # "flags" or the name of a scheduler
    local_id: int = 0  # number of this process on its host
    local_count: int = 1  # processes of the run on this host


class Timeouts(NamedTuple):
    """How long to wait for others, in seconds."""

    start: int = 60  # for all processes to connect
    heartbeat: int = 20  # without a sign of life, until a process counts as dead


def connect(
    cluster: Cluster,
    interface: str | None = None,
    timeouts: Timeouts | None = None,
    local_devices: list[int] | None = None,
    secret: bytes = b"",
    **options: Any,
) -> None:
    """Connects this process to the others; call it before JAX's first use.

    Args:
      cluster: The processes. Process 0 listens on the coordinator's address only, never on all.
      interface: Network interface for collectives, such as `eth1`; by default gloo uses the one
        that leads to the coordinator, and NCCL chooses.
      timeouts: How long to wait; None: the defaults.
      local_devices: Visible accelerators that this process uses; None: all.
      secret: Secret of the run, known to all its processes; empty: the network is trusted.
      **options: Further arguments of `jax.distributed.initialize`, which win over these.

    Raises:
      ValueError: If the cluster is impossible, an address or interface is not on this host, or the
        others were started with other arguments.
      Transient: If the others cannot be reached in time.
    """
    timeouts = timeouts or Timeouts()
    if not 0 <= cluster.process_id < cluster.num_processes:
        raise ValueError(
            f"--process-id {cluster.process_id} must be in [0, {cluster.num_processes}), as "
            f"--num-processes is {cluster.num_processes}."
        )
    if interface is not None:
        on_interface = addresses.require_interface(interface)
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    # A pod's name appears in DNS some time after its start; other names exist or are wrong.
    patient = cluster.source == "JobSet"
    host, own, key = rendezvous.meet(
        cluster.coordinator,
        cluster.num_processes,
        cluster.process_id,
        timeouts.start,
        patient,
        secret,
    )
    board.trust(key, on_interface if interface is not None else own)
    private.bind_gloo(**({"interface": interface} if interface else {"hostname": own}))
    # Processes of one run connect directly, even where HTTP goes through a proxy.
    os.environ["no_grpc_proxy"] = host
    jax.config.update("jax_check_proxy_envs", False)
    # The service would catch SIGTERM and do nothing; before training, it should end the process.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = addresses.join(host, addresses.split(cluster.coordinator)[1])
    try:
        given = dict(
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=timeouts.start,
            heartbeat_timeout_seconds=timeouts.heartbeat,
            coordinator_bind_address=address,
        )
        numbers = cluster.num_processes, cluster.process_id
        jax.distributed.initialize(address, *numbers, **given | options)
    except jax.errors.JaxRuntimeError as error:
        raise Transient(f"the processes have met, but JAX cannot connect them: {error}") from error
    on_abort(_end_alone)  # until a watchdog can say more


def finish(function: Callable[[], None]) -> None:
    """Calls the main function of a program, and ends all processes of the run if it fails.

    Raises:
      SystemExit: With the status of the failure, if this is the only process; with `Exit.DRAINED`.
    """
    status = ended(function)
    if status == Exit.DRAINED:  # all end the same way, as after the last step, and together
        sys.exit(status)
    if status:
        abandon(status)


def _end_alone() -> None:
    with contextlib.suppress(OSError):  # a log on a full disk
        os.write(2, b"error: another process of the run is gone; start the same command to go on\n")
    os._exit(Exit.TRY_AGAIN)


def require_same(facts: dict[str, str], seconds: float = 600.0) -> None:
    """Checks that values are equal on all processes of the run; does nothing for a single one.

    All processes call it at the same point, and once for the same keys.

    Args:
      facts: Names and values, such as `{"data": sha256}`.
      seconds: How long to wait for the slowest process.

    Raises:
      ValueError: In every process, if a fact differs; says which, and where.
      ConnectionError: If a process has failed or does not come.
    """
    if (texts := board.this_run()) is None:
        return
    name = hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()[:16]
    texts.put(name, json.dumps(facts))
    process_id, count = board.numbers()
    if process_id == 0:
        found = answers(texts, name, range(count), seconds)
        made = [{str(key): str(value) for key, value in each.items()} for each in found]
        texts.put(f"{name}-verdict", json.dumps({"differences": differences(made)}))
    (verdict,) = answers(texts, f"{name}-verdict", [0], seconds + 10)
    if verdict.get("differences"):
        raise ValueError(str(verdict["differences"]))


def differences(facts: list[dict[str, str]]) -> str:
    """Lists the first five facts that differ between processes; empty if none does."""
    lines = []
    for key in sorted(set().union(*facts)):
        values: dict[str, list[int]] = {}
        for process, these in enumerate(facts):
            values.setdefault(these.get(key, "missing"), []).append(process)
        if len(values) > 1:
            on = [f"{value} on {_processes(where)}" for value, where in values.items()]
            lines.append(f"{key}: {', '.join(on)}")
    if not lines:
        return ""
    more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
    return (
        f"the processes do not run the same. {'; '.join(lines[:5])}{more}. Use the same code, "
        "packages, config, data and weights on all hosts."
    )


def _processes(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"process{'es' if len(numbers) > 1 else ''} {shown}"


def abandon(status: int) -> NoReturn:
    """Ends this process after a failure, and leaves a note for the others.

    An ordinary exit would wait minutes for the others, which may be waiting for this process.

    Args:
      status: Exit status.
    """
    texts = board.this_run()
    if texts is None and status != Exit.INTERRUPTED:
        sys.exit(status)
    flush()
    if texts is None:
        os._exit(status)  # sys.exit would wait for the threads that still save
    silence()  # if the others end meanwhile, JAX logs stack traces
    process_id, count = board.numbers()
    on_abort(lambda: os._exit(status))  # process 0 may end first, and the service with it

    def tell():
        texts.put(_FAILED, str(int(status)))
        # The service ends with process 0, and so do processes that still use it. But once a process
        # is gone, JAX will soon abort all.
        if process_id == 0:
            deadline = time.monotonic() + (1 if status == Exit.TRY_AGAIN else 3)
            while len(texts.look(_FAILED)) < count and time.monotonic() < deadline:
                time.sleep(0.1)

    bounded(tell, 5.0)  # without the service it would wait forever
    os._exit(status)


def answers(texts: Board, folder: str, processes: Sequence[int], seconds: float) -> list[Any]:
    """The JSON objects that these processes write, unless a process fails first."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            found, notes = texts.look(folder), texts.look(_FAILED)
        except (RuntimeError, ValueError) as error:
            raise ConnectionError("process 0, which has the board of the run, is gone.") from error
        objects = [json_object(found.get(process, "")) for process in processes]
        if None not in objects:
            return objects
        # Without those that gave up because another one did.
        failed = [who for who, status in notes.items() if status != str(int(Exit.TRY_AGAIN))]
        if failed:
            raise ConnectionError(f"{_processes(failed)} failed; see what is said there.")
        if time.monotonic() > deadline:
            raise ConnectionError(
                f"a process has not answered for {seconds:.0f} s; see the others' output."
            )
        time.sleep(_LOOK)
