"""Accelerators that XLA compiles for without having one: settings, peak rates and a roofline.

GPU numbers are from NVIDIA's data sheets and XLA's device descriptions
(xla/backends/gpu/target_config/specs); v5e's are those of Google Cloud's documentation.

The roofline's step time is always called "predicted". Each matrix product runs at the device's
peak, every other kernel at its memory's, and each kernel takes the time to start one:
`flops / peak + bytes / bandwidth + kernels * kernel_seconds`. A host's bytes take the time of its
link; asynchronous messages hide as much of it as the products that overlap with them take. Latency
is left out.
"""

import importlib.util
import math
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from train.config.run import AXIS_NAME
from train.models.decoder import DecoderConfig
from train.placement.devices import FAST_AXIS

PACKAGES = {
    "cuda": ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"),
    "tpu": ("libtpu",),
}
"""Modules of the compilers, which `pip install '.[accelerators]'` brings."""


class Device(NamedTuple):
    """One kind of accelerator.

    Attributes:
      platform: "cuda" or "tpu".
      kind: A part of JAX's name for it, `jax.Device.device_kind`.
      memory_bytes: Bytes of one device.
      bandwidth: Bytes a second of its memory.
      flops: FLOP a second of matrix products in the type `dtype`.
      link: Bytes a second, one way, from it to the others of its host.
      kernel_seconds: From one kernel's start to the next one's, if they do nothing.
      target: The fields of XLA's description that are a GPU's own; () for a TPU.
      dtype: The type that models compute in: float32 where XLA has no products of bfloat16.
    """

    platform: str
    kind: str
    memory_bytes: int
    bandwidth: float
    flops: float
    link: float
    kernel_seconds: float
    target: tuple[tuple[str, object], ...] = ()
    dtype: str = "bfloat16"


# With it the roofline is right for the dense step that an H200 ran: 1,443 kernels in 5.7 ms.
_KERNEL_SECONDS = 2e-6


def _gpu(
    kind: str,
    flops: float,
    link: float,
    version: tuple[int, int],
    dtype: str = "bfloat16",
    **target,
) -> Device:
    capability = f"{{ major: {version[0]} minor: {version[1]} }}"
    target = {"cuda_compute_capability": capability, **target}
    memory, bandwidth = target["device_memory_size"], target["memory_bandwidth"]
    own = tuple(target.items())
    return Device("cuda", kind, memory, bandwidth, flops, link, _KERNEL_SECONDS, own, dtype)


_HOPPER: dict = {
    "flops": 989e12,
    "link": 450e9,
    "version": (9, 0),
    "core_count": 132,
    "fpus_per_core": 128,
    "threads_per_core_limit": 2048,
    "shared_memory_per_core": 233_472,
    "shared_memory_per_block_optin": 232_448,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
}
"""Of both GPUs of this generation; their memories differ."""

DEVICES: dict[str, Device] = {
    "h100": _gpu(
        "H100",
        **_HOPPER,
        memory_bandwidth=3_352_320_000_000,
        device_memory_size=84_929_347_584,
    ),
    "h200": _gpu(
        "H200",
        **_HOPPER,
        memory_bandwidth=4_800_000_000_000,
        device_memory_size=150_754_820_096,
    ),
    "a100": _gpu(
        "A100",
        312e12,
        300e9,
        (8, 0),
        core_count=108,
        fpus_per_core=64,
        threads_per_core_limit=2048,
        shared_memory_per_core=167_936,
        shared_memory_per_block_optin=166_912,
        memory_bandwidth=2_039_040_000_000,
        l2_cache_size=41_943_040,
        clock_rate_ghz=1.41,
        device_memory_size=85_100_068_864,
    ),
    # Its host's link is PCIe 3.
    "t4": _gpu(
        "T4",
        8.1e12,
        12e9,
        (7, 5),
        dtype="float32",
        core_count=40,
        fpus_per_core=64,
        threads_per_core_limit=1024,
        shared_memory_per_core=65_536,
        shared_memory_per_block_optin=65_536,
        memory_bandwidth=320_064_000_000,
        l2_cache_size=4_194_304,
        clock_rate_ghz=1.59,
        device_memory_size=15_835_660_288,
    ),
    # Its operations are one program, without kernel launches.
    "v5e": Device("tpu", "v5 lite", 17_179_869_184, 819e9, 197e12, 200e9, 0.0),
}

SLICE = 256
"""Devices of the largest TPU v5e slice."""

_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  {fields}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "NVIDIA {kind}"
"""


def unavailable(name: str) -> str | None:
    """The reason why nothing can be compiled for a device; None if it can."""
    missing = [module for module in PACKAGES[DEVICES[name].platform] if not _installed(module)]
    if not missing:
        return None
    return (
        f"no compiler for {name}: {', '.join(missing)} cannot be imported; write "
        "pip install '.[accelerators]' with Python 3.12 or newer"
    )


def mesh_of(name: str, sizes: tuple[int, ...]) -> Mesh:
    """A mesh of absent devices: hosts, and with two sizes also their devices.

    Args:
      name: A key of `DEVICES`.
      sizes: `(hosts,)` of one device each, or `(hosts, devices of each)`.

    Returns:
      The mesh, of the axes that `train` names.

    Raises:
      ValueError: For more devices than a TPU's slice has: its compiler would end the process.
    """
    device, count = DEVICES[name], math.prod(sizes)
    if device.platform == "cuda":
        fields = " ".join(f"{key}: {value}".replace(": {", " {") for key, value in device.target)
        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=_TARGET.format(fields=fields, kind=device.kind),
            topology=f"1x{sizes[0]}x{count // sizes[0]}",
        )
    else:
        if count > SLICE:
            raise ValueError(
                f"got {count} devices of {name}, need at most {SLICE}: a slice has no more; write "
                "--meshes 8 16x8, or another device"
            )
        rows = 2 ** (int(math.log2(count)) // 2)
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=f"v5e:{rows}x{count // rows}"
        )
    return mesh_from(described.devices, sizes)


def mesh_from(devices: list[jax.Device], sizes: tuple[int, ...]) -> Mesh:
    """Lays devices out as replicas, or as hosts and their devices."""
    names = (AXIS_NAME, FAST_AXIS)[: len(sizes)]
    return Mesh(np.array(devices).reshape(sizes), names, axis_types=(AxisType.Auto,) * len(sizes))


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


SEQUENCES, CONTEXT = 2048, 1024
"""The global batch of the prediction, whatever was compiled."""

RATES = {
    "100mbit": 100e6,
    "500mbit": 500e6,
    "1gbit": 1e9,
    "10gbit": 10e9,
    "25gbit": 25e9,
    "100gbit": 100e9,
}
"""bit/s of a host's link."""


class Work(NamedTuple):
    """What one step needs.

    Attributes:
      flops: FLOP of the gradient's products on one device.
      moved: Bytes that kernels move on one device.
      kernels: Kernels that run on one device.
      fast_bytes: Bytes that one device sends to others of its host.
      nic_bytes: Bytes that one host sends to others.
      beside: The share of the products that overlaps with messages between hosts.
      asynchronous: The share of these messages' bytes that anything can overlap with.
    """

    flops: float
    moved: float
    kernels: int
    fast_bytes: float
    nic_bytes: float
    beside: float
    asynchronous: float


def gradient_flops(model: DecoderConfig, numel: int, devices: int) -> float:
    """Of one device: 6 a parameter and token, and 12 a layer, feature and token looked back on."""
    of_token = 6 * numel + 12 * model.layers * model.width * CONTEXT
    return of_token * SEQUENCES * CONTEXT / devices


def local_seconds(device: Device, work: Work) -> float:
    """A step's time with an unlimited network between hosts."""
    memory, launches = work.moved / device.bandwidth, work.kernels * device.kernel_seconds
    return work.flops / device.flops + memory + launches + work.fast_bytes / device.link


def predicted_seconds(device: Device, work: Work, rate: float) -> float:
    """A step's time at a rate in bit/s per host."""
    sending, computing = 8 * work.nic_bytes / rate, work.beside * work.flops / device.flops
    return local_seconds(device, work) + sending - min(work.asynchronous * sending, computing)
