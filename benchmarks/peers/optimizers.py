"""Peers that are a hook or an optimizer of PyTorch, as their authors wrote it."""

import ast
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import base


def ddp(module: nn.Module, job: base.Job, exchange: str) -> base.Step:
    """PyTorch's DistributedDataParallel with Adam.

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


def power_sgd(module: nn.Module, job: base.Job, rank: int) -> base.Step:
    """PyTorch's PowerSGD hook in front of Adam; `rank` is that of the factors."""
    # With several buckets the hook's all-reduces on gloo sometimes meet in different orders.
    wrapped = DistributedDataParallel(module, bucket_cap_mb=10_000)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=max(2, job.dense_steps)
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return base.plain(wrapped, torch.optim.Adam(module.parameters()))


def demo(module: nn.Module, job: base.Job, **options) -> base.Step:
    """DeMo's code, github.com/bloc97/DeMo; `options` are those of its optimizer."""
    job.reach("DeMo")
    from demo import DeMo

    return base.plain(module, DeMo(module.parameters(), lr=1e-3, **options))


def dion(module: nn.Module, job: base.Job, rank_fraction: float) -> base.Step:
    """Dion's code, github.com/microsoft/dion: Dion for matrices, its AdamW for other parameters.

    `rank_fraction` is the rank's share of a matrix' shorter side.
    """
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


def slamb(module: nn.Module, job: base.Job, **options) -> base.Step:
    """SLAMB's code, github.com/hangxu0304/SLAMB: the optimizer of its CIFAR program."""
    path = job.find("SLAMB") / "Cifar10" / "main.py"
    # Only the class: the program around it needs Horovod and a GPU. Its mask is on the GPU, too.
    tree = ast.parse(path.read_text().replace("device='cuda'", "device='cpu'"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "Slamb"]
    names = {"torch": torch, "math": math}
    exec(compile(tree, str(path), "exec"), names)
    return base.plain(module, names["Slamb"](module.parameters(), **options))
