"""Compiler options for meshes whose links are slower than XLA assumes."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

# XLA:GPU's latency hiding scheduler assumes that a message takes microseconds, and overlaps little
# with it. The plain scheduler starts each message as early and ends it as late as it can. Combined
# gathers would wait for the last of them, and are not asynchronous.
_LATE_AS_CAN_BE = {
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}
# With several gathers in a row, the plain scheduler makes them synchronous. The other one keeps
# only one message in flight, and sends a gradient before the weights that are needed first.
_TWO_UNDER_WAY = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}


def compiler_options(mesh: Mesh | AbstractMesh, *, gathers_layers: bool = False) -> dict[str, Any]:
    """The options of `jax.jit` with which XLA overlaps messages with as much work as it can.

    `train_step` and `qsdp_train_step` use them. If you jit your own step, write `jax.jit(step,
    compiler_options=jaxcomp.compiler_options(mesh))`.

    Args:
      mesh: Where the program runs.
      gathers_layers: Whether it gathers layer after layer, as `qsdp` does.

    Returns:
      Names and values on GPUs; empty for other devices, or an abstract mesh.
    """
    on_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
    if not on_gpus:
        return {}
    return dict(_TWO_UNDER_WAY if gathers_layers else _LATE_AS_CAN_BE)


def jitted(function: Any, mesh: Mesh | AbstractMesh) -> Any:
    """`jax.jit` with the mesh's `compiler_options`."""
    return jax.jit(function, compiler_options=compiler_options(mesh))
