"""Peers that are a hook or an optimizer of PyTorch, as their authors wrote it."""

import ast
import math
import types

import numpy as np
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


def one_bit(module: nn.Module, job: base.Job, optimizer: str, flat: bool = False) -> base.Step:
    """DeepSpeed's 1-bit Adam and 0/1 Adam: its optimizers, without its engine.

    Args:
      module: The same on all hosts.
      job: For its dense steps.
      optimizer: "one_bit_adam", or "zero_one_adam" whose local steps grow to four.
      flat: Whether DeepSpeed sees all parameters as one tensor. It encodes and sends each tensor
        separately, which takes most of a step's time.
    """
    import deepspeed

    # Otherwise it compiles a shared-memory backend, as these hosts are one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    _run_on_cpus()
    # All that these optimizers need from an engine.
    engine = types.SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    parameters = [base.flattened(module)] if flat else list(module.parameters())
    own = _optimizer(optimizer, parameters, engine, job.dense_steps)

    def step(loss, rate):
        base.set_rate(own, rate)
        own.zero_grad(set_to_none=False)
        value = loss(module)
        value.backward()
        if engine.enable_backward_allreduce:
            _average([parameter.grad for parameter in parameters])
        own.step()
        return value

    return step


def _optimizer(name, parameters, engine, dense_steps):
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam
    from deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam

    options = {"deepspeed": engine, "comm_backend_name": "compressed"}
    if name == "one_bit_adam":
        return OnebitAdam(parameters, freeze_step=dense_steps, **options)
    return ZeroOneAdam(
        parameters,
        var_freeze_step=dense_steps,
        local_step_scaler=max(1, dense_steps // 4),
        local_step_clipper=4,
        **options,
    )


def _average(gradients):
    """The mean over the hosts with one all-reduce, as in the engine."""
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _run_on_cpus():
    """Gives DeepSpeed CPU versions of its code for accelerators: packed signs, 0-d scales."""
    from deepspeed.ops import op_builder

    op_builder.PackbitsBuilder = _Packer
    from deepspeed.runtime.comm import compressed

    if not isinstance(compressed.dist, types.SimpleNamespace):
        gather = lambda parts, own, group: dist.all_gather(parts, own.reshape(-1), group=group)
        kept = {name: getattr(compressed.dist, name) for name in dir(compressed.dist)}
        compressed.dist = types.SimpleNamespace(**kept | {"all_gather": gather})


class _Packer:
    """Bits of the signs of a vector; the first is the highest of its byte."""

    def load(self):
        return self

    def packbits(self, values, size, rank):
        return torch.from_numpy(np.packbits((values >= 0).numpy()))

    def unpackbits(self, packed, size, rank):
        return torch.from_numpy(np.unpackbits(packed.numpy()).astype(np.float32) * 2 - 1)
