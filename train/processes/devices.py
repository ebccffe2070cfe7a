"""The one place where devices are counted and the mesh is made."""

import os

import jax
from jax.sharding import AxisType, Mesh

from train.config.run import AXIS_NAME, Config

FAST_AXIS = "fast"
"""Name of the mesh axis of replicas between which links are fast, where a run has one."""


def fast_axis_of(config: Config) -> str | None:
    """The name of the run's fast axis, if it has one."""
    return FAST_AXIS if config.fast > 1 else None


def start(replicas: int, num_processes: int = 1) -> None:
    """Makes as many CPU devices as replicas are wanted; call it before JAX's first use.

    Args:
      replicas: Number of CPU devices of all processes together; 0 leaves it at one for each.
        Accelerators are not affected.
      num_processes: Processes of the run.

    Raises:
      ValueError: If the replicas cannot be shared out evenly.
    """
    if replicas % num_processes:
        raise ValueError(
            f"replicas={replicas} cannot be shared out among {num_processes} processes; write "
            f"--replicas {num_processes * max(1, replicas // num_processes)}."
        )
    if replicas:
        jax.config.update("jax_num_cpu_devices", replicas // num_processes)
    # XLA:CPU runs a device's program in one thread of a pool that by default has only as many
    # threads as devices; collectives of two steps in flight then wait for each other for ever.
    count = jax.config.jax_num_cpu_devices  # -1 where nobody has set it
    os.environ["NPROC"] = str(max(4 * count, int(os.environ.get("NPROC", os.cpu_count() or 1))))


def make_mesh(replicas: int, fast: int = 1) -> Mesh:
    """Makes the mesh of a run: one axis of replicas, or a slow and a fast one.

    Args:
      replicas: Number of replicas, one a device; 0 for all the devices there are.
      fast: How many that lie behind each other, as those of a host, make up the fast axis; 1:
        there is none.

    Returns:
      The mesh.

    Raises:
      ValueError: If there are fewer devices, or they cannot be shared out evenly.
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
            f"{count} replicas cannot be shared out into groups of fast={fast}; write "
            f"--replicas {fast * max(1, count // fast)}, or another --fast."
        )
    sizes = (count,) if fast == 1 else (count // fast, fast)
    names, types = (AXIS_NAME, FAST_AXIS)[: len(sizes)], (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, devices=devices[:count], axis_types=types)
