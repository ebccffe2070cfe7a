"""One JAX host of benchmarks.slow_network: builds training steps and times them on request."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jax._src import cache_key

import jaxcomp
from benchmarks import commands
from benchmarks.timing import interleaved
from jaxcomp.launch import distributed
from jaxcomp.measure import step_probe
from jaxcomp.replicas import protocol
from train import examples
from train.config import Config, Data, Optimizer
from train.config.run import AXIS_NAME
from train.models.decoder import DecoderConfig
from train.output.metrics import hardware_name
from train.placement import devices
from train.task import make_task, num_parameters


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
    """The functions to call: `build` a step, then `run` it, or an overlapped one's `parts`.

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

    def parts(repeats: int) -> dict[str, float]:
        step, params, state = built["task"].step, built["params"], built["state"]
        batch = jax.block_until_ready(built["task"].batch(0))
        gradient_args = params, protocol.drifts(state), batch, None, None
        exchange = lambda: step.exchange(params, state, None)
        gradient = lambda: step.gradient(*gradient_args)

        def by_two_threads():
            other = step.helper.submit(gradient)
            return exchange(), other.result()

        calls = {
            "exchange": exchange,
            "gradient": gradient,
            "both, one thread": lambda: (exchange(), gradient()),
            "both, two threads": by_two_threads,
        }
        return interleaved(calls, repeats)

    def sends() -> list[dict]:
        task = built["task"]
        shares = {part: count / task.config.steps for part, count in task.rounds.items()}
        found = step_probe.messages(task.programs, task.mesh, shares, AXIS_NAME)
        return [dataclasses.asdict(message) for message in found]

    return {"read": read, "build": build, "run": run, "parts": parts, "sends": sends}


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


def main() -> None:
    """Connects to the other hosts, then answers calls from standard input."""
    args = commands.place(__doc__)
    if args.num_processes > 1:
        cluster = distributed.Cluster(args.coordinator, args.num_processes, args.process_id, "")
        distributed.connect(cluster, args.interface)
    share_compilations()
    devices.start(args.num_processes, args.num_processes)
    jax.devices()  # Waits for all hosts; to build, none needs another.
    commands.serve(**functions(args.num_processes))


if __name__ == "__main__":
    main()
