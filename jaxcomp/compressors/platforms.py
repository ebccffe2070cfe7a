"""Chooses between forms of a function by the platform that the program is compiled for."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

LANES = 128
"""Columns of a TPU's tile of 8 rows."""

# Kinds of GPUs, such as "Tesla V100-SXM2-16GB" or "NVIDIA T4".
_NO_TRITON = re.compile(r"AMD|Tesla|Quadro|TITAN|GTX|RTX 20|\b[KMPTV]\d")


def by_platform(*args: Any, cpu: Callable, default: Callable, gpu: Callable | None = None) -> Any:
    """Calls the form of the platform that the program is compiled for; all return the same.

    Inside `shard_map` the mesh names the platform, and only its form is traced. Elsewhere, for
    example under `jax.vmap`, all forms are traced, and the compiler takes the one that it needs.

    Args:
      *args: What the form gets.
      cpu: For CPUs.
      default: For TPUs and other platforms.
      gpu: For GPUs; `default` if there is none.
    """
    gpu = default if gpu is None else gpu
    mesh_platform = _platform_of_mesh()
    if mesh_platform is None:
        return lax.platform_dependent(*args, cpu=cpu, cuda=gpu, rocm=gpu, default=default)
    forms = {"cpu": cpu, "gpu": gpu, "cuda": gpu, "rocm": gpu}
    return forms.get(mesh_platform, default)(*args)


def platform() -> str:
    """The platform of the mesh, or without a mesh, that on which JAX computes by default.

    For forms with other results. All must be right everywhere; one is fast on its platform.
    """
    return _platform_of_mesh() or jax.default_backend()


def fuses_rows() -> bool:
    """Whether XLA makes one GPU kernel of reductions of the same row that follow each other.

    It does by Triton, on NVIDIA's GPUs from Ampere on. AMD's have not been tried.
    """
    device = _device_of_mesh() or jax.local_devices()[0]
    return _NO_TRITON.search(device.device_kind) is None


def _platform_of_mesh():
    device = _device_of_mesh()
    return device and device.platform


def _device_of_mesh():
    """The device that the mesh names inside `shard_map`; None elsewhere."""
    return jax.sharding.get_abstract_mesh().abstract_device
