"""CocktailSGD's code, github.com/DS3Lab/CocktailSGD: its exchange, on gloo and without a GPU."""

import contextlib
import os
import sys
import types

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import base


def make(module: nn.Module, job: base.Job, random: float, top: float, bits: int) -> base.Step:
    """The step: local Adam on each host, and the exchange of parameters during the gradient.

    As in the authors' loop, gradients are taken at a copy, while a thread changes the parameters.

    Args:
      module: The same on all hosts.
      job: For the folder of the code.
      random: Share of the parameters that a step may send; the code uses its inverse, rounded down.
      top: Share of these that it sends, the largest.
      bits: Of each value.
    """
    settings = {"RANDOMP_RATIO": random, "TOPK_RATIO": top, "QUANT_BITS": bits}
    os.environ.update({name: str(value) for name, value in settings.items()})
    _without_gpu()
    job.reach("CocktailSGD")
    from comm import comm_utils

    _connect(comm_utils)
    from data_parallel.dist_dp_cocktail_sgd import CocktailSGDDP

    masters = [nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()]
    optimizer = torch.optim.Adam(masters)
    wrapper = types.SimpleNamespace(optimizer=optimizer, step=optimizer.step)
    size = dist.get_world_size()
    names = {"dp_bits": bits, "rank": dist.get_rank(), "data_group_size": size, "profiling": "no"}
    args, device = types.SimpleNamespace(**names), torch.device("cpu")
    exchange = CocktailSGDDP(args, device, module, wrapper, flatten=True)

    def step(loss, rate):
        base.set_rate(optimizer, rate)
        module.zero_grad()
        exchange.pre_optimizer_step()
        value = loss(module)
        value.backward()
        for master, parameter in zip(masters, module.parameters(), strict=True):
            master.grad = parameter.grad
        exchange.optimizer_step()
        with torch.no_grad():
            for master, parameter in zip(masters, module.parameters(), strict=True):
                parameter.copy_(master)
        return value

    return step


def _connect(comm_utils):
    """Connects the hosts as the replicas of a single pipeline stage."""
    rank, size = dist.get_rank(), dist.get_world_size()
    data = comm_utils.TorchCommunicator(dist.group.WORLD, dp_rank=rank, comm_group_size=size)
    alone = types.SimpleNamespace(all_gather=lambda own, parts: parts[0].copy_(own))
    for kind, communicator, place, count in (("DATA", data, rank, size), ("PIPELINE", alone, 0, 1)):
        setattr(comm_utils, f"_{kind}_PARALLEL_COMM", communicator)
        setattr(comm_utils, f"_{kind}_PARALLEL_RANK", place)
        setattr(comm_utils, f"_{kind}_PARALLEL_WORLD_SIZE", count)


def _without_gpu():
    """Replaces streams and events, and cupy, which the code needs only on GPUs, by stubs."""
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.default_stream = _Nothing
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    sys.modules.update(dict.fromkeys(("cupy", "cupy.cuda", "cupy.cuda.nccl"), _Nothing()))


class _Nothing:
    """Has every attribute, can be called and entered, and does nothing."""

    def __init__(self, *args, **options):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args, **options):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None
