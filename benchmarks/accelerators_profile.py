"""How long the kernels of a step take on an accelerator, by JAX's profiler."""

import collections
import pathlib
import tempfile
from collections.abc import Callable, Iterable

import jax

STEPS = 4
_LINES = ("Stream", "XLA Ops")  # of kernels on GPUs, of operations on TPUs
_TOLD = 8  # kernels


def profiled(step: Callable[[], object]) -> dict:
    """Profiles `STEPS` calls of a function that waits for its results; see `summary`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                step()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        found = [jax.profiler.ProfileData.from_file(str(file)) for file in files]
        return summary(plane for data in found for plane in data.planes)


def summary(planes: Iterable) -> dict:
    """Sums the planes of a profile.

    Returns:
      `kernel_seconds` of one step on all devices together, and its `slowest_kernels`: names, how
      often they run, and seconds of these runs together. Zero and [] without an accelerator.
    """
    counts, seconds = collections.Counter(), collections.Counter()
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/device:") else ():
            for event in line.events if line.name.startswith(_LINES) else ():
                counts[event.name] += 1
                seconds[event.name] += event.duration_ns / 1e9
    most = [[k, counts[k] / STEPS, s / STEPS] for k, s in seconds.most_common(_TOLD)]
    return {"kernel_seconds": seconds.total() / STEPS, "slowest_kernels": most}
