"""One JAX host of benchmarks.planner: measures a plan's inputs, and the predicted steps."""

import dataclasses
from typing import Any

import jax

from benchmarks import commands, slow_network_worker
from jaxcomp.launch import distributed
from jaxcomp.measure import link_probe
from train.config.run import AXIS_NAME
from train.placement import devices
from train.plan import planning


def functions(replicas: int) -> dict:
    """The functions that the benchmark calls, on all hosts together, except `build`."""
    steps: dict[str, dict] = {}
    text: dict[str, Any] = {}
    timers: dict[str, Any] = {}

    def build(method: str, update: str, model: dict[str, int], sequences: int) -> dict:
        steps[method] = slow_network_worker.functions(replicas, text)
        return steps[method]["build"](update=update, model=model, sequences=sequences)

    def prepare(method: str, update: str, model: dict[str, int], sequences: int) -> list[dict]:
        config = slow_network_worker.config_of(update, model, replicas, sequences)
        mesh = devices.make_mesh(replicas)
        timers[method] = planning.update_timer(config, mesh)
        if "" not in timers:
            timers[""] = planning.gradient_timer(config, mesh)
        return steps[method]["sends"]()

    def link(sizes: list[int]) -> dict[str, dict]:
        found = link_probe.measure_link(devices.make_mesh(replicas), AXIS_NAME, sizes)
        return {op: dataclasses.asdict(cost) for op, cost in found.items()}

    return {
        "read": slow_network_worker.functions(replicas, text)["read"],
        "build": build,
        "prepare": prepare,
        "link": link,
        "local": lambda method: timers[method](),
        "gradient": lambda: timers[""](),
        "run": lambda method, steps_of_run: steps[method]["run"](steps_of_run),
    }


def main() -> None:
    """Connects to the other hosts, then answers calls from standard input."""
    args = commands.place(__doc__)
    cluster = distributed.Cluster(args.coordinator, args.num_processes, args.process_id, "")
    distributed.connect(cluster, args.interface)
    slow_network_worker.share_compilations()
    devices.start(args.num_processes, args.num_processes)
    jax.devices()  # Waits for all hosts; to build, none needs another.
    commands.serve(**functions(args.num_processes))


if __name__ == "__main__":
    main()
