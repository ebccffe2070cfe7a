"""What a run may evaluate on its way: the consensus, the replicas, or the replicas' mean.

    python -m benchmarks.studies.evaluation [--json FILE] [--methods NAME ...] [--steps 640]

Trains methods of the pico task whose replicas differ, and writes the three validation losses at
some steps of one run. A run of `train` evaluates the replicas, each on its rows, and at its end the
mean.
"""

import argparse
import pathlib
from typing import Any

import jax
import numpy as np

from benchmarks import rows as rows_file
from benchmarks import scale, scale_sizes
from jaxcomp.launch.exits import clean_exits
from train.placement import devices
from train.task import Task, make_task

DIFFER = ("CocktailSGD, no delay, 88x", "SLAMB", "0/1 Adam")
AT = (40, 80, 160, 320, 640)


def on_devices(task: Task, params: Any, state: Any) -> Any:
    """Parameters and state of simulated replicas on the task's mesh."""
    places = jax.tree.map(lambda like: like.sharding, (task.like["params"], task.like["state"]))
    return jax.device_put(jax.device_get((params, state)), places)


def run_row(name: str, seed: int, steps: int) -> dict:
    """The three losses of one run, by step."""
    task = make_task(scale_sizes.config_of("pico", scale_sizes.METHODS[name], seed, steps))
    loop, seen, losses = scale.simulated(task.config, task.examples), 0, {}
    params, state = loop.start()
    for step in [step for step in AT if step <= steps]:
        batches = [task.examples.train(number, slice(None)) for number in range(seen, step)]
        (params, state), seen = loop.advance(params, state, np.stack(batches)), step
        given = on_devices(task, params, state)
        losses[str(step)] = {
            "consensus": task.evaluate(given[0])["loss"],
            "replicas": task.evaluate(*given)["loss"],
            "mean": task.evaluate(task.deployed(*given)[0])["loss"],
        }
    row = {"task": "pico", "method": name, "seed": seed, "steps": steps, "losses": losses}
    return row | rows_file.machine()


def main() -> None:
    """Makes all rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--methods", nargs="+", default=list(DIFFER), choices=list(scale_sizes.METHODS)
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=AT[-1])
    parser.add_argument("--json", type=pathlib.Path, default=rows_file.RESULTS / "evaluation.json")
    args = parser.parse_args()
    devices.start(4)
    rows = []
    for name in args.methods:
        rows.append(run_row(name, args.seed, args.steps))
        print(name, rows[-1]["losses"], flush=True)
        rows_file.write(args.json, rows)


if __name__ == "__main__":
    with clean_exits():
        main()
