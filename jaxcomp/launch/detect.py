"""Detects the place of this process in its run from the scheduler's environment variables.

Precedence: flags, Open MPI and MPICH (inside a SLURM job, mpirun starts the processes), SLURM
(srun), JobSet.
Pure functions of the environment, without network access.

JAX detects SLURM and Open MPI as well as this. But no public function says what it has found before
it connects, and the processes must meet first. It knows neither MPICH and Intel MPI nor single
fields, and it asks Kubernetes' servers what a JobSet already writes into the environment.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcomp.launch import addresses
from jaxcomp.launch.distributed import Cluster

Environ = Mapping[str, str]

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Environment variables that hide accelerators; JAX counts the others."""


def detect(environ: Environ, **given: Any) -> Cluster | None:
    """Finds this process's place in its run.

    Args:
      environ: Environment variables.
      **given: Known fields of `Cluster`, for example from flags; None for others. Each wins over
        what is detected.

    Returns:
      The cluster; None if nothing is given and no scheduler started this process.

    Raises:
      ValueError: If a scheduler's variables are incomplete, or are not numbers.
    """
    given = {field: value for field, value in given.items() if value is not None}
    needed = {"coordinator", "num_processes", "process_id"}
    if needed <= given.keys():
        return Cluster(source="flags", **given)
    for source, (marks, fields) in SCHEDULERS.items():
        if any(mark in environ for mark in marks) and not (
            source == _HYDRA and _is_of_srun(environ)
        ):
            return _complete(source, fields, environ, given)
    if given:
        absent = ", ".join(sorted(f"--{name.replace('_', '-')}" for name in needed - given.keys()))
        raise ValueError(f"no scheduler has started this process, so write {absent} as well.")
    return None


def _complete(source: str, fields: dict, environ: Environ, given: dict[str, Any]) -> Cluster:
    found, absent = dict(given), {}
    for field, find in fields.items():
        if field not in given:
            try:
                found[field] = find(environ)
            except KeyError as error:
                absent[field] = error.args[0]
    if absent:
        names = ", ".join(sorted(set(absent.values())))
        flags = ", ".join(f"--{field.replace('_', '-')}" for field in absent)
        if absent.keys() == {"coordinator"}:
            raise ValueError(
                f"{source} does not say where process 0 runs: {names} is not set. Write "
                "--coordinator HOST:29411, with the host of rank 0: the first one."
            )
        raise ValueError(
            f"{source} is only half there: {names} not set, as in a shell opened by ssh or outside "
            f"of srun, mpirun or a pod. Let {source} start this process; or write {flags}, which "
            "win, or --single to run in this process alone."
        )
    return Cluster(source=source, **found)


def _number(name: str) -> Callable[[Environ], int]:
    def find(environ):
        if not environ[name].isdecimal():
            raise ValueError(f"{name}={environ[name]!r} must be a number; flags win over it.")
        return int(environ[name])

    return find


def _port(job: int) -> int:
    # In the upper part of the range of dynamic ports; differs between jobs.
    return 61440 + job % 4096


def _slurm_coordinator(environ: Environ) -> str:
    job = _number("SLURM_JOB_ID")(environ)
    return addresses.join(first_host(environ["SLURM_STEP_NODELIST"]), _port(job))


def _slurm_local_count(environ: Environ) -> int:
    nodes = _number("SLURM_STEP_NUM_NODES")(environ) if "SLURM_STEP_NUM_NODES" in environ else 1
    return math.ceil(_number("SLURM_NTASKS")(environ) / nodes)


def _is_of_srun(environ: Environ) -> bool:
    """Whether srun has set MPICH's variables, as with `--mpi=pmi2`, which say less than its own."""
    pairs = ("SLURM_PROCID", "PMI_RANK"), ("SLURM_NTASKS", "PMI_SIZE")
    return all(environ.get(own, "") == environ.get(theirs) for own, theirs in pairs)


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: `node001` of `node[001-003,007],gpu5`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodelist!r} names no host; write --coordinator.")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _open_mpi_coordinator(environ: Environ) -> str:
    # The address of mpirun: "1531576320.0;tcp://10.0.0.1,10.1.0.1:34911", IPv6 as
    # "tcp6://[a,b]:port". Open MPI 5 sets no such variable.
    uri = environ["OMPI_MCA_orte_hnp_uri"]
    found = re.search(r"^(\d+)\..*?tcp6?://\[?([^,\]]+?)(?:,|\]|:\d+(?:;|$))", uri)
    if found is None:
        raise ValueError(f"OMPI_MCA_orte_hnp_uri={uri!r} has no address; write --coordinator.")
    return addresses.join(found[2], _port(int(found[1]) // 4096))


_HYDRA = "MPICH or Intel MPI"

SCHEDULERS = {
    "Open MPI": (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        {
            "coordinator": _open_mpi_coordinator,
            "num_processes": _number("OMPI_COMM_WORLD_SIZE"),
            "process_id": _number("OMPI_COMM_WORLD_RANK"),
            "local_id": _number("OMPI_COMM_WORLD_LOCAL_RANK"),
            "local_count": _number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        },
    ),
    # They do not say where rank 0 is. Inside a SLURM job it is on the first host.
    _HYDRA: (
        ("PMI_RANK", "PMI_SIZE"),
        {
            "coordinator": _slurm_coordinator,
            "num_processes": _number("PMI_SIZE"),
            "process_id": _number("PMI_RANK"),
            "local_id": _number("MPI_LOCALRANKID"),
            "local_count": _number("MPI_LOCALNRANKS"),
        },
    ),
    "SLURM": (
        ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
        {
            "coordinator": _slurm_coordinator,
            "num_processes": _number("SLURM_NTASKS"),
            "process_id": _number("SLURM_PROCID"),
            "local_id": _number("SLURM_LOCALID"),
            "local_count": _slurm_local_count,
        },
    ),
    "JobSet": (
        ("JOB_COMPLETION_INDEX",),
        {
            "coordinator": lambda environ: environ["JAX_COORDINATOR_ADDRESS"],
            "num_processes": _number("JAX_NUM_PROCESSES"),
            "process_id": _number("JOB_COMPLETION_INDEX"),
        },
    ),
}
"""The variables of each scheduler, and how to read the fields of `Cluster`."""


def local_devices(
    cluster: Cluster, environ: Environ, wanted: list[int] | None = None
) -> list[int] | None:
    """The visible accelerators that this process uses, one process per device.

    Args:
      cluster: The processes.
      environ: Environment variables; CUDA_VISIBLE_DEVICES and similar variables say what is
        visible. A launcher's processes all have its own.
      wanted: Numbers among the visible ones that win over this.

    Returns:
      The device with this process's number on its host; None, for all visible devices, if it is
      alone there or the scheduler has already hidden the others' devices.

    Raises:
      ValueError: If a host has more processes than visible devices, or shows fewer than `wanted`.
    """
    name = next((name for name in VISIBLE if name in environ), "")
    visible = [entry for entry in environ.get(name, "").split(",") if entry.strip()]
    if not name or not visible or visible[0].strip() == "-1":  # all are visible, or none
        alone = cluster.local_count == 1 or name or "SLURM_GPUS_PER_TASK" in environ
        return wanted or (None if alone else [cluster.local_id])
    if environ.get("JAX_PLATFORMS") == "cpu":
        return wanted
    needed = max(wanted or [cluster.local_id])
    hidden = len(visible) == 1 and cluster.source != "flags"
    if not wanted and (cluster.local_count == 1 or hidden or "SLURM_GPUS_PER_TASK" in environ):
        return None
    if len(visible) <= needed:
        raise ValueError(
            f"process {cluster.local_id} of {cluster.local_count} on this host needs accelerator "
            f"{needed} of those that are visible, but {name}={environ[name]} shows {len(visible)}; "
            "start one process per device, or write --local-devices with numbers below "
            f"{len(visible)}."
        )
    return wanted or [cluster.local_id]


def shares(devices: Sequence[int], processes: int) -> list[list[int]]:
    """Divides the accelerators of `--local-devices` among the processes of a host.

    Raises:
      ValueError: If they cannot be divided evenly.
    """
    each, rest = divmod(len(devices), processes)
    if rest or not each:
        raise ValueError(
            f"--local-devices names {len(devices)} accelerators for {processes} processes of a "
            f"host; write {processes} of them, or a multiple."
        )
    return [list(devices[first * each : (first + 1) * each]) for first in range(processes)]


def threads(cluster: Cluster, allowed: int, cores: int) -> int:
    """The number of cores of this process.

    Args:
      cluster: The processes.
      allowed: Cores that this process may use.
      cores: Cores of the host.

    Returns:
      All allowed cores if a scheduler has bound this process to some; else its share.
    """
    bound = cluster.source != "flags" and allowed < cores
    return allowed if bound else max(1, allowed // cluster.local_count)


def line(
    cluster: Cluster, interface: str | None, devices: list[int] | None, environ: Environ
) -> str:
    """Describes a process's place in one line."""
    hidden = [name for name in VISIBLE if name in environ]
    visible = ", ".join(f"{name}={environ[name]}" for name in hidden) or "all of this host"
    taken = "" if devices is None else f", this process number {', '.join(map(str, devices))}"
    return (
        f"process {cluster.process_id} of {cluster.num_processes} ({cluster.source}); coordinator "
        f"{cluster.coordinator}; interface {interface or 'the one towards it'}; accelerators: "
        f"{visible}{taken}"
    )
