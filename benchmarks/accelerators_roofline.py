"""The step time predicted by a roofline, which is always called "predicted".

Each matrix product runs at the device's peak, every other kernel at its memory's, and each kernel
takes the time to start one: `flops / peak + bytes / bandwidth + kernels * kernel_seconds`. A host's
bytes take the time of its link; asynchronous messages hide as much of it as the products that
overlap with them take. Latency is left out.
"""

from typing import NamedTuple

from benchmarks.accelerators_devices import Device
from train.models.decoder import DecoderConfig

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
