"""What XLA is told of a mesh whose links are slower than it takes them for."""

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

# XLA:GPU's latency hiding scheduler thinks that a message takes microseconds and puts little
# beside it. Its plain one starts each message as early as it can and ends it as late. Gathers that
# were combined into one wait for the last of them, and are not asynchronous.
_FOR_GPUS = {
    "xla_gpu_enable_latency_hiding_scheduler": False,
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}


def compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """The options of `jax.jit` by which XLA leaves most time to the messages of a program.

    `train_step` and `qsdp_train_step` give them to `jax.jit` by themselves; a loop that jits its
    own step writes `jax.jit(step, compiler_options=jaxcomp.compiler_options(mesh))`.

    Args:
      mesh: Where the program runs.

    Returns:
      Names and values, for GPUs; nothing for other devices, or an abstract mesh.
    """
    on_gpus = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "gpu"
    return dict(_FOR_GPUS) if on_gpus else {}


def jitted(function: Any, mesh: Mesh | AbstractMesh, **options: Any) -> Any:
    """`jax.jit` with the mesh's `compiler_options`."""
    return jax.jit(function, compiler_options=compiler_options(mesh), **options)
