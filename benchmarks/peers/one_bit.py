"""DeepSpeed's 1-bit Adam and 0/1 Adam: its optimizers, without its engine."""

import types

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import base


def make(module: nn.Module, job: base.Job, optimizer: str, flat: bool = False) -> base.Step:
    """The step.

    Args:
      module: The same on all hosts.
      job: For its dense steps.
      optimizer: "one_bit_adam", or "zero_one_adam" whose local steps grow to four.
      flat: Whether DeepSpeed sees all parameters as one tensor. It encodes and sends each tensor
        separately, which takes most of a step's time.
    """
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
