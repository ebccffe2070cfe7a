"""What XLA is told of a mesh whose links are slower than it takes them for."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

# XLA:GPU's latency hiding scheduler thinks that a message takes microseconds and puts little
# beside it. Its plain one starts each message as early as it can and ends it as late. Gathers that
# were combined into one wait for the last of them, and are not asynchronous.
_LATE_AS_CAN_BE = {
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}
# Where gathers follow each other, the plain scheduler makes them synchronous; the other one keeps
# a single message under way, and sends a gradient before the weights that are needed first.
_TWO_UNDER_WAY = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


def compiler_options(mesh: Mesh | AbstractMesh, *, gathers_layers: bool = False) -> dict[str, Any]:
    """The options of `jax.jit` by which XLA leaves most time to the messages of a program.

    `train_step` and `qsdp_train_step` give them to `jax.jit` by themselves; a loop that jits its
    own step writes `jax.jit(step, compiler_options=jaxcomp.compiler_options(mesh))`.

    Args:
      mesh: Where the program runs.
      gathers_layers: Whether it gathers layer after layer, as by `qsdp`.

    Returns:
      Names and values, for GPUs; nothing for other devices, or an abstract mesh.
    """
    on_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
    if not on_gpus:
        return {}
    return dict(_TWO_UNDER_WAY if gathers_layers else _LATE_AS_CAN_BE)


def jitted(
    function: Any, mesh: Mesh | AbstractMesh, *, gathers_layers: bool = False, **options: Any
) -> Any:
    """`jax.jit` with the mesh's `compiler_options`."""
    own = compiler_options(mesh, gathers_layers=gathers_layers)
    return jax.jit(function, compiler_options=own, **options)
