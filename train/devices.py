"""The one place where devices are counted and the mesh is made."""

import os

import jax
from jax.sharding import AxisType, Mesh

from train.config import AXIS_NAME


def start(replicas: int) -> None:
    """Makes as many CPU devices as replicas are wanted; call it before JAX's first use.

    Args:
      replicas: Number of CPU devices; 0 leaves it at one. Accelerators are not affected.
    """
    if replicas:
        jax.config.update("jax_num_cpu_devices", replicas)
    # XLA:CPU runs a device's program in one thread of a pool that by default has only as many
    # threads as devices; collectives of two steps in flight then wait for each other for ever.
    count = jax.config.jax_num_cpu_devices  # -1 where nobody has set it
    os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))


def make_mesh(replicas: int) -> Mesh:
    """Makes the mesh of a run: one axis of replicas.

    Args:
      replicas: Number of replicas, one a device; 0 for all the devices there are.

    Returns:
      The mesh.

    Raises:
      ValueError: If there are fewer devices.
    """
    devices = jax.devices()
    count = replicas or len(devices)
    if count > len(devices):
        raise ValueError(
            f"replicas={count}, but there are {len(devices)} {devices[0].platform} devices; write "
            f"--replicas {len(devices)}, or set JAX_PLATFORMS=cpu to have {count} CPU devices."
        )
    return jax.make_mesh(
        (count,), (AXIS_NAME,), devices=devices[:count], axis_types=(AxisType.Auto,)
    )
