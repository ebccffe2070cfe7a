"""Dion's code, github.com/microsoft/dion: Dion for matrices, its AdamW for other parameters."""

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import base


def make(module: nn.Module, job: base.Job, rank_fraction: float) -> base.Step:
    """The step; `rank_fraction` is the rank's share of a matrix' shorter side."""
    job.reach("dion")
    # Without compilation, which takes minutes on a CPU.
    torch.compile = lambda **options: lambda function: function
    from dion import Dion

    matrices = [p for name, p in module.named_parameters() if "blocks" in name and p.ndim == 2]
    others = [p for p in module.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw"}]
    group = dist.distributed_c10d._get_default_group()
    optimizer = Dion(groups, replicate_mesh=group, rank_fraction=rank_fraction, weight_decay=0.0)
    return base.plain(module, optimizer)
