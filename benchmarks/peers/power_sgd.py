"""PyTorch's PowerSGD hook, in front of Adam."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import base


def make(module: nn.Module, job: base.Job, rank: int) -> base.Step:
    """The step; `rank` is that of the factors."""
    # With several buckets the hook's all-reduces on gloo sometimes meet in different orders.
    wrapped = DistributedDataParallel(module, bucket_cap_mb=10_000)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, job.dense_steps)
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return base.plain(wrapped, torch.optim.Adam(module.parameters()))
