"""The one place where devices are counted and the mesh is made."""

import os

import jax
from jax.sharding import AxisType, Mesh

from train.config.run import AXIS_NAME

FAST_AXIS = "fast"
"""Name of the mesh axis of replicas with fast links between them, if a run has one."""


def fast_axis_of(fast: int) -> str | None:
    """The name of a run's fast axis, if it has one."""
    return FAST_AXIS if fast > 1 else None


def start(replicas: int, num_processes: int = 1) -> None:
    """Makes a CPU device for each replica; call it before JAX's first use.

    Args:
      replicas: Number of CPU devices over all processes; 0: one each. Does not affect accelerators.
      num_processes: Processes of the run.

    Raises:
      ValueError: If the replicas cannot be divided evenly, or JAX_PLATFORMS names what is not here.
    """
    if replicas % num_processes:
        raise ValueError(
            f"replicas={replicas} cannot be divided among {num_processes} processes; write "
            f"--replicas {num_processes * max(1, replicas // num_processes)}."
        )
    if replicas:
        jax.config.update("jax_num_cpu_devices", replicas // num_processes)
    # XLA:CPU runs each device's program in a thread of a pool, which by default has only one thread
    # per device. Collectives of two steps in flight would then wait for each other forever.
    count = jax.config.jax_num_cpu_devices  # -1 if it is not set
    os.environ["NPROC"] = str(max(4 * count, int(os.environ.get("NPROC", os.cpu_count() or 1))))
    _require_platform()


def _require_platform() -> None:
    """Raises a ValueError if JAX_PLATFORMS names what this machine or its JAX does not have."""
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:
        # JAX has no text where no GPU is visible; other errors are those of a device.
        if isinstance(error, RuntimeError) and "is not in the list of known" not in str(error):
            raise
        raise ValueError(
            f"JAX_PLATFORMS={jax.config.jax_platforms!r}, of which JAX finds no device here; write "
            "JAX_PLATFORMS=cpu, or install JAX for the device, such as jax[cuda12]."
        ) from error


def make_mesh(replicas: int, fast: int = 1) -> Mesh:
    """Makes the mesh of a run: one axis of replicas, or a slow and a fast one.

    Args:
      replicas: Number of replicas, one per device; 0 for all devices.
      fast: Number of consecutive replicas, for example those of a host, that form the fast axis; 1:
        no fast axis.

    Returns:
      The mesh.

    Raises:
      ValueError: If there are fewer devices, or they cannot be divided evenly.
    """
    devices = jax.devices()
    count = replicas or len(devices)
    if count > len(devices):
        raise ValueError(
            f"replicas={count}, but there are {len(devices)} {devices[0].platform} devices; write "
            f"--replicas {len(devices)}, or set JAX_PLATFORMS=cpu to have {count} CPU devices."
        )
    if count % fast:
        raise ValueError(
            f"{count} replicas cannot be divided into groups of fast={fast}; write "
            f"--replicas {fast * max(1, count // fast)}, or another --fast."
        )
    sizes = (count,) if fast == 1 else (count // fast, fast)
    names, types = (AXIS_NAME, FAST_AXIS)[: len(sizes)], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, devices=devices[:count], axis_types=types)
