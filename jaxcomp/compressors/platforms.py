"""Chooses between forms of a function by the platform that the program is compiled for."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


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
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return lax.platform_dependent(*args, cpu=cpu, cuda=gpu, rocm=gpu, default=default)
    forms = {"cpu": cpu, "gpu": gpu, "cuda": gpu, "rocm": gpu}
    return forms.get(device.platform, default)(*args)
