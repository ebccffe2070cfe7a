"""Runs a notebook on the CPU, and compiles what it runs for an accelerator that is not there.

    python -m tests.helpers.compiling_notebook t4 notebooks/compressors.py

Each jitted function of a notebook, or of jaxcomp, that runs on one device is compiled for the
accelerator, too, at its first call; what belongs to a mesh of CPU devices is not. The last line
says how many were.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding


class Compiled:
    """A jitted function that is also compiled for the accelerator when it is first called."""

    place: SingleDeviceSharding  # of all
    count = 0

    def __init__(self, jitted: Any):
        self.jitted, self.called = jitted, False

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the function, on the CPU."""
        leaves = jax.tree.leaves((args, options))
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        if not self.called and not traced and all(map(_is_alone, leaves)):
            self.called = True
            args_there, options_there = jax.tree.map(_there, (args, options))
            self.jitted.lower(*args_there, **options_there).compile()
            Compiled.count += 1
        return self.jitted(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def _is_alone(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1


def _there(leaf: Any) -> Any:
    if not hasattr(leaf, "shape"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=Compiled.place)


def patched(real: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit`, whose functions are `Compiled`."""

    def jit(function: Callable | None = None, **options: Any) -> Any:
        if function is None:
            return lambda function: jit(function, **options)
        return Compiled(real(function, **options))

    return jit


if __name__ == "__main__":
    device, path = sys.argv[1:]
    jax.jit = patched(jax.jit)  # before anything else is imported that uses it

    from benchmarks.accelerators_devices import mesh_of

    Compiled.place = SingleDeviceSharding(mesh_of(device, (1,)).devices.flat[0])
    exec(compile(pathlib.Path(path).read_text(), path, "exec"), {"__name__": "notebook"})
    print(f"compiled for {device}: {Compiled.count}")
