"""One PyTorch host: builds a peer's training steps, then times them or trains with them."""

import importlib
import os
import pathlib
import platform
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import commands
from benchmarks.peers import base

WARM_STEPS = 3  # run by `build`, after the dense ones: first calls allocate buffers
RATE = 1e-4  # learning rate of timed steps


def functions(rank: int) -> dict:
    """The functions that benchmarks call: `build` a step, then `run` it, or `train`."""
    built: dict[str, Any] = {}

    def rows():
        """This host's rows of the next step: those of the replica with its number in JAX."""
        tokens = built["train"][built["step"] % len(built["train"])]
        built["step"] += 1
        own = np.split(tokens, dist.get_world_size())[rank]
        return torch.from_numpy(own.astype(np.int64))

    def step(rate):
        tokens = rows()
        began = time.perf_counter()
        value = built["peer"](lambda module: base.loss_of(module, tokens), rate)
        return time.perf_counter() - began, value.item()

    def build(
        peer: str,
        options: dict[str, Any],
        uneven: bool,
        model: dict[str, int],
        work: str,
        dense_steps: int = 2,
        code: str | None = None,
        warm_steps: int = WARM_STEPS,
    ) -> dict:
        built.clear()
        began = time.perf_counter()
        torch.manual_seed(0)
        module = module_of(model, work, built)
        file, _, function = peer.partition(".")
        make = getattr(importlib.import_module(f"benchmarks.peers.{file}"), function)
        built.update(uneven=uneven, module=module, step=0)
        built["peer"] = make(module, base.Job(dense_steps, code), **options)
        for _ in range(dense_steps + warm_steps if warm_steps else 0):
            step(RATE)
        return {
            "build_seconds": time.perf_counter() - began,
            "parameters": sum(parameter.numel() for parameter in module.parameters()),
            "collectives": None,
            "hardware": hardware(),
            "software": f"torch {torch.__version__}",
        }

    def run(steps: int) -> dict:
        processor = time.process_time()
        seconds, losses = zip(*[step(RATE) for _ in range(steps)], strict=True)
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - processor,
            "report_bytes": None,
            "skips_rounds": built["uneven"],
            "loss": losses[-1],
        }

    def train(rates: list[float]) -> dict:
        losses = [step(rate)[1] for rate in rates]
        return {"first_loss": losses[0], "val_loss": evaluate(built)}

    return {"build": build, "run": run, "train": train}


def module_of(sizes: dict[str, int], work: str, built: dict[str, Any]) -> torch.nn.Module:
    """The model with JAX's initial weights; keeps the work's rows in `built`."""
    module = base.GPT(**sizes)
    with np.load(work) as arrays:
        base.load(module, arrays)
        built.update(train=arrays["train"], validation=arrays["validation"])
    return module


def evaluate(built: dict[str, Any]) -> float:
    """Validation loss of the mean of the hosts' parameters."""
    with torch.no_grad():
        for parameter in built["module"].parameters():
            mean = parameter.detach().clone()
            dist.all_reduce(mean)
            parameter.copy_(mean / dist.get_world_size())
        batches = [torch.from_numpy(rows.astype(np.int64)) for rows in built["validation"]]
        return float(np.mean([base.loss_of(built["module"], rows).item() for rows in batches]))


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
    warnings.filterwarnings("ignore")  # about old calls in the authors' code, at every step
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
