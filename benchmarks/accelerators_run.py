"""Runs steps on the accelerators of this machine, if any, and compares with the prediction."""

import glob
import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import accelerators_profile
from benchmarks import accelerators_roofline as roofline
from benchmarks.accelerators_devices import DEVICES, mesh_from
from benchmarks.accelerators_row import compile_step, facts
from benchmarks.accelerators_step import METHODS, Built, build_step, model_for
from train.placement import build

WARM_UP = 101
"""Steps before those that are timed: 1-bit Adam and 1-bit LAMB first take 100 dense ones."""
REPEATS, GROUPS = 10, 3
SINGLE = 33
"""Steps that are timed one by one: 16 is the longest interval between messages."""
DRIVERS = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


class AtHand(NamedTuple):
    """Accelerators of this machine: a key of `DEVICES`, and how many there are."""

    name: str
    count: int


def has_driver() -> bool:
    """Whether this machine has a GPU's or a TPU's driver; without one JAX only complains."""
    return any(glob.glob(files) for files in DRIVERS)


def at_hand() -> AtHand | None:
    """What kind of accelerator JAX finds here; None for none.

    Raises:
      ValueError: For one that is not described.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return None
    kinds = [name for name, device in DEVICES.items() if device.kind in devices[0].device_kind]
    if not kinds:
        raise ValueError(
            f"got {devices[0].device_kind}, need one of {', '.join(DEVICES)}; describe it in "
            "benchmarks/accelerators_devices.py, or write --no-run"
        )
    return AtHand(kinds[0], len(devices))


def measured(device: str, model: str, method: str) -> dict:
    """Runs a step on all local devices, each a host of its own, and says how long it takes.

    Args:
      device: What they are, a key of `DEVICES`.
      model: A key of `MODELS`.
      method: A key of `METHODS`.

    Returns:
      `measured`: what `time_step` returns; what the roofline predicts for this very program and its
      few tokens over links that take no time; its kernels and copies moved; and the bytes that it
      held at most, with those that the compiler counts.
    """
    devices = jax.local_devices()
    built = build_step(
        model_for(device, model), METHODS[method], mesh_from(devices, (len(devices),))
    )
    step = compile_step(built)
    found = facts(step, step.as_text(), built, device, (len(devices),))
    # The prediction of a row is for a large batch; this is for the one that runs.
    large = roofline.gradient_flops(built.config.model, built.numel, len(devices))
    less = (1 - _share(built)) * large / DEVICES[device].flops
    told = time_step(built, step) | {"predicted_seconds": found["predicted"]["unlimited"] - less}
    told |= {name: found[name] for name in ("kernels", "moved_copies")}
    told |= {"compiler_peak_bytes": found["memory"]["peak_bytes"], "peak_bytes": _held(devices[0])}
    return {"measured": told | {"hardware": devices[0].device_kind, "jax": jax.__version__}}


def time_step(built: Built, step, warm_up: int = WARM_UP, single: int = SINGLE) -> dict:
    """Times steps from random parameters and tokens.

    Returns:
      `seconds` of a step among `REPEATS` queued ones, the median of `GROUPS`; `slowest_seconds`, of
      `single` steps that each wait for the one before; and the kernels of the last steps, as
      `accelerators_profile.summary` returns them.
    """
    random = jax.jit(lambda: build.random_params(built.config))
    params, state = built.init(jax.device_put(random(), NamedSharding(built.mesh, P())))
    rows = np.random.default_rng(0).integers(0, 256, built.batch.shape, np.int32)
    batch = jax.device_put(rows, built.batch.sharding)

    def steps(count: int) -> float:
        nonlocal params, state
        began = time.perf_counter()
        for _ in range(count):
            params, state, metrics = step(params, state, batch)
        loss = np.asarray(metrics["loss"])  # waits
        if not np.all(np.isfinite(loss)):
            raise RuntimeError(f"the loss became {loss}")
        return (time.perf_counter() - began) / count

    steps(warm_up)
    slowest = max(steps(1) for _ in range(single))
    queued = statistics.median(steps(REPEATS) for _ in range(GROUPS))
    kernels = accelerators_profile.profiled(lambda: steps(1))
    return {"seconds": queued, "slowest_seconds": slowest} | kernels


def _held(device: jax.Device) -> int | None:
    """The most bytes that were in use at a time; None where the device does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def _share(built: Built) -> float:
    """Tokens of the batch that runs, as a share of those that the roofline assumes."""
    rows, length = built.batch.shape
    return rows * (length - 1) / (roofline.SEQUENCES * roofline.CONTEXT)
