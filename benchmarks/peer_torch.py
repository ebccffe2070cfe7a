"""One PyTorch host of benchmarks.slow_network: DDP on gloo, with its own ways to send less.

Runs by any Python that has PyTorch; imports nothing of jaxcomp, JAX or `train`.
"""

import os
import pathlib
import platform
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks import commands

DENSE_STEPS = 2  # that PowerSGD needs before it may begin


class Block(nn.Module):
    """The block of `train.models.decoder`: causal self-attention, a perceptron, norms first."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time_, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time_, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """The model of `train.models.decoder`, with tied embeddings of 256 bytes."""

    def __init__(self, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def wrap(model: nn.Module, exchange: str) -> nn.Module:
    """The model with an exchange of gradients.

    Args:
      model: The same on all hosts.
      exchange: "none", "float32", "bfloat16", or "powersgd 4" for rank 4.
    """
    if exchange == "none":
        return model
    if not exchange.startswith("powersgd"):
        wrapped = DistributedDataParallel(model)
        if exchange == "bfloat16":
            # gloo refuses the hook itself, not a function that calls it.
            wrapped.register_comm_hook(
                None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)
            )
        return wrapped
    # With several buckets the hook's all-reduces on gloo sometimes meet in different orders.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=10_000)
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=int(exchange.split()[1]),
        start_powerSGD_iter=DENSE_STEPS,
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped


def text() -> torch.Tensor:
    """The standard library's modules, as bytes."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    data = bytearray(b"\n".join(file.read_bytes() for file in files))
    return torch.frombuffer(data, dtype=torch.uint8).long()


def functions(rank: int) -> dict:
    """What the benchmark calls: `build` a step, then `run` it, as often as it likes."""
    built: dict[str, Any] = {}
    corpus = text()
    draws = torch.Generator().manual_seed(rank)

    def step():
        context = built["context"]
        starts = torch.randint(len(corpus) - context, (built["sequences"],), generator=draws)
        tokens = torch.stack([corpus[start : start + context + 1] for start in starts])
        began = time.perf_counter()
        logits = built["model"](tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        built["optimizer"].zero_grad()
        loss.backward()
        built["optimizer"].step()
        return time.perf_counter() - began, loss.item()

    def build(exchange: str, model: dict[str, int], sequences: int) -> dict:
        built.clear()
        began = time.perf_counter()
        torch.manual_seed(0)
        network = GPT(**model)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
        wrapped = wrap(network, exchange)
        context = model["context"]
        built.update(model=wrapped, optimizer=optimizer, context=context, sequences=sequences)
        for _ in range(DENSE_STEPS + 1):
            step()
        return {
            "build_seconds": time.perf_counter() - began,
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "collectives": None,
            "hardware": hardware(),
            "software": f"torch {torch.__version__}",
        }

    def run(steps: int) -> dict:
        processor = time.process_time()
        seconds, losses = zip(*[step() for _ in range(steps)], strict=True)
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - processor,
            "report_bytes": None,
            "skips_rounds": False,
            "loss": losses[-1],
        }

    return {"build": build, "run": run}


def hardware() -> str:
    """The processor and its cores, in the words of `train.output.metrics.hardware_name`."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    """Connects to the other hosts, then answers calls from standard input."""
    args = commands.place(__doc__)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = args.interface
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.coordinator}",
        rank=args.process_id,
        world_size=args.num_processes,
    )
    commands.serve(**functions(args.process_id))


if __name__ == "__main__":
    main()
