"""Runs steps on the accelerators of this machine, if any, and compares with the prediction."""

import glob
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import accelerators_roofline as roofline
from benchmarks.accelerators_devices import DEVICES, mesh_from
from benchmarks.accelerators_row import compile_step, facts
from benchmarks.accelerators_step import METHODS, Built, build_step, model_for
from train.models import build

REPEATS = 20
DRIVERS = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


class AtHand(NamedTuple):
    """Accelerators of this machine: a key of `DEVICES`, and how many there are."""

    name: str
    count: int


def has_driver() -> bool:
    """Whether this machine has a GPU's or a TPU's driver; without one JAX only complains."""
    return any(glob.glob(files) for files in DRIVERS)


def at_hand() -> AtHand | None:
    """What kind of accelerator JAX finds here; None for none, or one that is not described."""
    devices = jax.local_devices()
    kinds = [name for name, device in DEVICES.items() if device.kind in devices[0].device_kind]
    return AtHand(kinds[0], len(devices)) if kinds else None


def measured(device: str, model: str, method: str, repeats: int = REPEATS) -> dict:
    """Runs a step on all local devices, each a host of its own, and says how long it takes.

    Args:
      device: What they are, a key of `DEVICES`.
      model: A key of `MODELS`.
      method: A key of `METHODS`.
      repeats: Steps that are timed, one by one.

    Returns:
      `measured`: seconds of the median step, and what the roofline predicts for this very program
      and its few tokens over links that take no time.
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
    seconds = found["predicted"]["unlimited"] - less
    told = {"seconds": time_step(built, step, repeats), "predicted_seconds": seconds}
    return {"measured": told | {"hardware": devices[0].device_kind, "jax": jax.__version__}}


def time_step(built: Built, step, repeats: int) -> float:
    """Seconds of the median step, from random parameters and tokens."""
    random = jax.jit(lambda: build.random_params(built.config))
    params, state = built.init(jax.device_put(random(), NamedSharding(built.mesh, P())))
    rows = np.random.default_rng(0).integers(0, 256, built.batch.shape, np.int32)
    batch = jax.device_put(rows, built.batch.sharding)
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        params, state, metrics = jax.block_until_ready(step(params, state, batch))
        seconds.append(time.perf_counter() - began)
    if not jnp.all(jnp.isfinite(metrics["loss"])):
        raise RuntimeError(f"the loss became {metrics['loss']} after {repeats + 1} steps")
    return statistics.median(seconds[1:])


def _share(built: Built) -> float:
    """Tokens of the batch that runs, as a share of those that the roofline assumes."""
    rows, length = built.batch.shape
    return rows * (length - 1) / (roofline.SEQUENCES * roofline.CONTEXT)
