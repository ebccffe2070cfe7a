"""Chooses between forms of a function by the platform that the program is compiled for."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

LANES = 128
"""Columns of a TPU's tile of 8 rows."""


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


def _platform_of_mesh():
    """The platform that the mesh names inside `shard_map`; None elsewhere."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device and device.platform
