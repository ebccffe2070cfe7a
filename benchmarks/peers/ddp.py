"""PyTorch's DistributedDataParallel with Adam, float32 or by its bfloat16 hook."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import base


def make(module: nn.Module, job: base.Job, exchange: str) -> base.Step:
    """The step.

    Args:
      module: The same on all hosts.
      job: Of which nothing is needed.
      exchange: "none", "float32" or "bfloat16".
    """
    optimizer = torch.optim.Adam(module.parameters())
    if exchange == "none":
        return base.plain(module, optimizer)
    wrapped = DistributedDataParallel(module)
    if exchange == "bfloat16":
        # gloo refuses the hook itself, not a function that calls it.
        hook = lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
        wrapped.register_comm_hook(None, hook)
    return base.plain(wrapped, optimizer)
