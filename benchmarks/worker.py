"""Training steps that a host builds and times on request, and what they are called.

`python -m benchmarks.worker` is one JAX host of `benchmarks.slow_network`. Hosts of studies give
more `functions` to `serve`.
"""

import dataclasses
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import cache_key

import jaxcomp
from benchmarks import commands, methods
from benchmarks.methods import Method
from jaxcomp.launch import distributed
from jaxcomp.launch.exits import clean_exits
from jaxcomp.measure import step_probe
from jaxcomp.replicas import protocol
from train import examples
from train.config import Config, Data, Optimizer
from train.config.run import AXIS_NAME
from train.models.decoder import DecoderConfig
from train.output.metrics import hardware_name
from train.placement import devices
from train.task import make_task, num_parameters

DENSE, LAMB = "dense float32", "LAMB"

METHODS: dict[str, Method] = {
    name: methods.METHODS[known]
    for name, known in {
        DENSE: "dense Adam",
        "dense bfloat16": "dense Adam, sent in bfloat16",
        "8 bits": "8-bit Adam",
        "4 bits": "4-bit Adam",
        "1 bit": "sign momentum SGD",
        "random 1/10": "random momentum SGD",
        "largest of 8": "group_top_1 momentum SGD",
        "largest of 64, 4 bits": "groups of 64, 4 bits, momentum SGD",
        "1-bit Adam": "1-bit Adam, 2 dense steps",
        "0/1 Adam, every 4th": "0/1 Adam, every 4th",
        "CocktailSGD": "CocktailSGD",
        "CocktailSGD, 1 bit of 1/8": "CocktailSGD, 1 bit of 1/8",
        "CocktailSGD, 10x": "CocktailSGD, 10x",
        "CocktailSGD, no delay, 10x": "CocktailSGD, no delay, 10x",
        # As many bytes as "8 bits", but they may be sent while the gradient is computed.
        "CocktailSGD, 8 bits": "CocktailSGD, 8 bits",
        "CocktailSGD, 8 bits, overlapped": "CocktailSGD, 8 bits",
        "sharded Adam, 4 bits": "sharded Adam",
        "PowerSGD 1": "PowerSGD 1, two dense steps",
        "PowerSGD 4": "PowerSGD 4, two dense steps",
        **{
            f"PowerSGD {rank}{name}, Adam": f"PowerSGD {rank}{name}, Adam, two dense steps"
            for rank in (1, 4)
            for name in ("", ", both sides")
        },
        "DiLoCo, 4 bits, every 4th": "DiLoCo, 4 bits, every 4th, plain",
        "DiLoCo, 4 bits, every 32nd": "DiLoCo, 4 bits, every 32nd, plain",
        "SparseLoCo, every 4th": "SparseLoCo, every 4th",
        "SparseLoCo, every 16th": "SparseLoCo",
        "DeMo": "DeMo",
        "Dion": "Dion, rank 24",
        LAMB: "LAMB",
        "SLAMB": "SLAMB, every 8",
        "SLAMB, 8 bits": "SLAMB, every 8, 8 bits",
        "1-bit LAMB": "1-bit LAMB, 2 dense steps",
        "shards float32": "shards, float32",
        "shards bfloat16": "shards, bfloat16",
        "QSDP W8G8": "shards, 8 bits",
        "QSDP W8G8, gathered once": "shards, 8 bits, gathered once",
        "QSDP W4G4": "QSDP W4G4",
    }.items()
}

UPDATES = {name: method.update for name, method in METHODS.items() if method.qsdp is None}
"""`optimizer.update` of the methods that shard no parameters."""

MODELS = {
    # name: fields of DecoderConfig
    "0.5M": {"layers": 2, "width": 128, "heads": 4, "context": 64},
    "5M": {"layers": 6, "width": 256, "heads": 4, "context": 128},
    "14M": {"layers": 8, "width": 384, "heads": 6, "context": 128},
}


def period_of(method: str) -> int:
    """The period of a method's steps; a multiple of it is timed."""
    every = re.search(r"every (\d+)", method)
    return int(every[1]) if every else 8 if method.startswith("SLAMB") else 1


def config_of(
    update: str,
    model: dict[str, int],
    replicas: int,
    sequences: int,
    overlap: bool = False,
    qsdp: str | None = None,
    fast: int = 1,
) -> Config:
    """The run whose step is timed.

    Args:
      update: The optimizer, as `optimizer.update` of a config.
      model: Fields of `DecoderConfig`.
      replicas: Devices of all hosts.
      sequences: Sequences of one replica and step.
      overlap: Whether the exchange overlaps with the gradient.
      qsdp: How parameters are sharded; None: not sharded.
      fast: Devices of a host.
    """
    return Config(
        name="slow_network",
        overlap=overlap,
        qsdp=qsdp,
        fast=fast,
        steps=10**4,  # more than are ever timed
        replicas=replicas,
        optimizer=Optimizer(update=update, learning_rate=1e-4, schedule="constant"),
        model=DecoderConfig(**model),
        data=Data(batch=replicas * sequences),
    )


def functions(replicas: int, kept: dict[str, examples.Examples] | None = None) -> dict:
    """The functions to call: `build` a step, then `run` it.

    `sends` lists the messages of its step. Hosts `read` the text together; after that one may
    `build` before the others. The text is kept in `kept`, which several steps may share.
    """
    built: dict[str, Any] = {}
    kept = {} if kept is None else kept

    def read(model: dict[str, int], sequences: int) -> dict:
        config = config_of("adam(learning_rate)", model, replicas, sequences)
        kept["text"] = examples.read(config)
        return kept["text"].record

    def build(update: str, model: dict[str, int], sequences: int, **method: Any) -> dict:
        built.clear()
        began = time.perf_counter()
        config = config_of(update, model, replicas, sequences, **method)
        task = make_task(config, lambda config: kept.get("text") or examples.read(config))
        params, state = jax.block_until_ready(task.init())
        parts = jaxcomp.report.sent_bytes_by_part(task.programs, task.mesh, AXIS_NAME)
        built.update(task=task, params=params, state=state, step=0, parts=parts)
        return {
            "build_seconds": time.perf_counter() - began,
            "parameters": num_parameters(task),
            "collectives": num_collectives(task),
            "hardware": hardware_name(),
            "software": f"jax {jax.__version__}",
        }

    def run(steps: int) -> dict:
        task, seconds, before = built["task"], [], rounds(built["state"])
        processor = time.process_time()
        for _ in range(steps):
            batch = jax.block_until_ready(task.batch(built["step"]))
            start = time.perf_counter()
            result = task.step(built["params"], built["state"], batch)
            built["params"], built["state"], metrics = jax.block_until_ready(result)
            seconds.append(time.perf_counter() - start)
            built["step"] += 1
        after = rounds(built["state"])
        own = [np.asarray(shard.data) for shard in metrics["loss"].addressable_shards]
        return {
            "seconds": seconds,
            "cpu_seconds": time.process_time() - processor,
            "report_bytes": report_bytes(built["parts"], steps, before, after),
            "skips_rounds": any(0 < after[part] - before[part] < steps for part in after),
            "loss": float(np.mean(own)),
        }

    def sends() -> list[dict]:
        task = built["task"]
        shares = {part: count / task.config.steps for part, count in task.rounds.items()}
        found = step_probe.messages(task.programs, task.mesh, shares, AXIS_NAME)
        return [dataclasses.asdict(message) for message in found]

    return {"read": read, "build": build, "run": run, "sends": sends}


def num_collectives(task) -> int:
    """Collectives between hosts that one step executes, of all branches together."""
    rows = jaxcomp.report.collectives(task.programs, task.mesh)
    return sum(row.count for row in rows if row.sent_bytes and {AXIS_NAME, "?"} & set(row.axes))


def rounds(state) -> dict[str, int]:
    """How often each part of the exchange was sent; empty if every step sends all."""
    counts = protocol.rounds(state)
    return {part: int(count) for part, count in counts.items()}


def report_bytes(parts: dict[str, float], steps: int, before: dict, after: dict) -> float:
    """Bytes per step that a replica has sent according to the report, averaged over some steps.

    Args:
      parts: Bytes of each part of the exchange; that of "" is sent in every step.
      steps: Between `before` and `after`.
      before: How often each part was sent until the first step.
      after: The same, after the last one.
    """
    sent = {part: after[part] - before[part] if part else steps for part in parts}
    return sum(parts[part] * sent[part] for part in parts) / steps


def share_compilations() -> None:
    """Lets each host read the first host's programs from JAX's compilation cache."""
    # A CPU topology's fingerprint differs from process to process; the programs are the same.
    cache_key._hash_accelerator_config = lambda hashed, accelerators: None


def serve(functions: Callable[[int], dict]) -> None:
    """Connects to the other hosts, then answers calls from standard input.

    Args:
      functions: Of the number of replicas: what may be called, by name.
    """
    args = commands.place(__doc__)
    if args.num_processes > 1:
        cluster = distributed.Cluster(args.coordinator, args.num_processes, args.process_id, "")
        distributed.connect(cluster, args.interface)
    share_compilations()
    devices.start(args.num_processes, args.num_processes)
    jax.devices()  # Waits for all hosts; to build, none needs another.
    commands.serve(**functions(args.num_processes))


def main_or_host(main: Callable[[], None], functions: Callable[[int], dict]) -> None:
    """Runs a program that starts itself once more for each host: `main`, or `serve` in a host."""
    if "--process-id" in sys.argv:
        serve(functions)
    else:
        with clean_exits():
            main()


if __name__ == "__main__":
    serve(functions)
