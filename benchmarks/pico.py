"""Trains the pico task, many steps of a small model, with several methods; writes losses and bits.

    nice python -m benchmarks.pico --methods NAME ... [--seeds 1 2] [--json FILE]
    nice python -m benchmarks.pico --updates "diloco(...)" --rate 3e-3 --steps 2000 --seeds 0

The task has nano's text and schedule; 2 layers of width 64, 8,000 steps of 32 sequences of 64
bytes. The four replicas are simulated on one device, equal to a mesh up to rounding, and a hundred
steps are one program; only those of `qsdp` are a mesh. So local steps are tested over many outer
steps, in minutes on one core. Bits, and losses, are those of the program compiled for a mesh. Runs
with a row in the file are skipped.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxcomp
from benchmarks import methods, methods_beyond
from benchmarks import rows as rows_file
from configs import nano_dense
from train.config import Config
from train.config.run import AXIS_NAME, update
from train.models import build
from train.models.decoder import DecoderConfig
from train.processes import devices
from train.processes.exits import clean_exits
from train.task import Task, make_task, num_parameters

STEPS = 8000
TOGETHER = 100  # steps per program

# Methods of `benchmarks.convergence`, and nano's best learning rate, not tuned here.
TUNED_ON_NANO = {
    "dense Adam": ("dense Adam", 6e-3),
    "8 bits": ("8-bit Adam", 6e-3),
    "4 bits": ("4-bit Adam", 6e-3),
    "top_k": ("top_k Adam", 3e-3),
    "1 bit": ("sign Adam", 3e-3),
    "sharded Adam, 4 bits": ("sharded Adam, G4D4", 6e-3),
    "QSDP, 8 bits": ("QSDP W8G8", 6e-3),
    "QSDP, 4 bits, learned": ("QSDP W4G4, learned", 6e-3),
    **{
        f"QSDP, {bits} bits, embedding 8": (f"QSDP W{bits}G4, learned, embedding 8", 6e-3)
        for bits in (3, 4, 5, 6)
    },
    "QSDP, 4 bits, embedding's weights 8": ("QSDP W4G4, learned, embedding's weights 8", 6e-3),
    "CocktailSGD, no delay, 88x": ("CocktailSGD, no delay, 88x", 6e-3),
    "0/1 Adam": ("0/1 Adam, warm-up, variances of 8 bits", 6e-3),
    "SLAMB": ("SLAMB", 1.4e-2),  # nano's 2e-2 diverges here
}
METHODS: dict[str, methods.Method] = {
    **{
        name: methods.METHODS[known]._replace(rates=(rate,))
        for name, (known, rate) in TUNED_ON_NANO.items()
    },
    # 15% of the steps are dense, as on nano.
    "1-bit Adam": methods.Method(
        "one_bit_adam(learning_rate, axis_name, freeze_step=1200)", (6e-3,)
    ),
    **methods_beyond.METHODS,
}


class Loop(NamedTuple):
    """A run's functions.

    Attributes:
      start: `() -> params, state`.
      advance: `(params, state, batches) -> params, state`; batches have a leading axis of steps.
    """

    start: Callable[[], tuple[Any, Any]]
    advance: Callable[[Any, Any, Any], tuple[Any, Any]]


def config_of(method: methods.Method, seed: int, steps: int) -> Config:
    """The run of one row: nano's dense config with another size, method, rate and seed."""
    nano = nano_dense.get_config()
    return dataclasses.replace(
        nano,
        name="pico",
        steps=steps,
        seed=seed,
        qsdp=method.qsdp,
        model=DecoderConfig(layers=2, width=64, heads=2, context=64),
        data=dataclasses.replace(nano.data, batch=32),
        optimizer=dataclasses.replace(
            nano.optimizer,
            update=method.update,
            learning_rate=method.rates[0],
            warmup_steps=steps // 10,
            final_fraction=0.0,
        ),
        eval_batches=64,
    )


def simulated(config: Config) -> Loop:
    """The loop of replicas that one device simulates; several steps are one program."""
    loss_fn = build.loss_of(config)
    init, step = jaxcomp.simulated_train_step(loss_fn, update(config), config.replicas, AXIS_NAME)

    def start():
        params = jax.jit(lambda: build.random_params(config))()
        return params, init(params)

    def advance(params, state, batches):
        one = lambda carry, batch: (step(*carry, batch)[:2], None)
        return jax.lax.scan(one, (params, state), batches)[0]

    return Loop(start, jax.jit(advance, donate_argnums=(0, 1)))


def on_mesh(task: Task) -> Loop:
    """The loop of a mesh, for sharded parameters: `simulated_train_step` does not shard them."""
    place = build.batch_of(task.config, task.mesh).sharding

    def advance(params, state, batches):
        for batch in batches:
            params, state, _ = task.step(params, state, jax.device_put(batch, place))
        return params, state

    return Loop(task.init, advance)


def on_devices(task: Task, params: Any, state: Any) -> Any:
    """Parameters and state of simulated replicas, or of a mesh's, on the task's mesh."""
    places = jax.tree.map(lambda like: like.sharding, (task.like["params"], task.like["state"]))
    return jax.device_put(jax.device_get((params, state)), places)


def loss_at(task: Task, params: Any, state: Any, last: bool) -> float:
    """The validation loss as the training program takes it, on its mesh."""
    given = on_devices(task, params, state)
    return task.evaluate(*(task.deployed(*given)[:1] if last else given))["loss"]


def train(task: Task) -> tuple[Any, list[list[float]]]:
    """Trains once: the last parameters, and [step, validation loss] after each tenth of the run."""
    config, curve = task.config, []
    loop = on_mesh(task) if config.qsdp else simulated(config)
    params, state = loop.start()
    for first in range(0, config.steps, TOGETHER):
        last = min(first + TOGETHER, config.steps)
        batches = np.stack(
            [task.examples.train(number, slice(None)) for number in range(first, last)]
        )
        params, state = loop.advance(params, state, batches)
        if last * 10 // config.steps > first * 10 // config.steps:
            curve.append([last, loss_at(task, params, state, last == config.steps)])
            print(f"step {last}: {curve[-1][1]:.4f}", flush=True)
            if not math.isfinite(curve[-1][1]):
                break
    return params, curve


def run_row(name: str, method: methods.Method, seed: int, steps: int) -> dict:
    """One row: the run, its bytes, and its losses."""
    config = config_of(method, seed, steps)
    task = make_task(config)  # compiled for a mesh, to count its messages and to evaluate
    began = time.perf_counter()
    _, curve = train(task)
    loss, size = curve[-1][1], config.replicas
    return {
        "task": "pico",
        "method": name,
        "update": config.optimizer.update,
        "qsdp": config.qsdp,
        "learning_rate": config.optimizer.learning_rate,
        "seed": seed,
        "steps": steps,
        "replicas": size,
        "val_loss": loss if math.isfinite(loss) else None,
        "curve": [point for point in curve if math.isfinite(point[1])],
        "sent_bytes_per_step": task.sent_bytes,
        # Per direction of an all-reduce, as in `benchmarks.convergence`.
        "bits_per_parameter": task.sent_bytes * 8 / num_parameters(task) / (2 * (size - 1) / size),
        "seconds": round(time.perf_counter() - began),
        "data_sha256": task.examples.record["sha256"],
        **rows_file.machine(),
    }


def main() -> None:
    """Makes the missing runs, one after the other, and saves after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--updates", nargs="+", help="other methods' `optimizer.update`; with --rate"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rate", type=float, help="instead of each method's own")
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/pico.json")
    )
    args = parser.parse_args()
    if args.updates and not args.rate:
        parser.error("--updates needs a rate, write --rate 3e-3")
    if args.updates:
        chosen = {update: methods.Method(update) for update in args.updates}
    else:
        chosen = {name: METHODS[name] for name in args.methods}
    devices.start(config_of(METHODS["dense Adam"], 0, args.steps).replicas)
    for seed in args.seeds:
        for name, method in chosen.items():
            rows = json.loads(args.json.read_text()) if args.json.exists() else []
            rate = args.rate or method.rates[0]
            key = {"method": name, "learning_rate": rate, "seed": seed, "steps": args.steps}
            if not any(key.items() <= row.items() for row in rows):
                row = run_row(name, method._replace(rates=(rate,)), seed, args.steps)
                rows_file.write(args.json, [*rows, row])
                print(f"{name}, rate {rate:g}, seed {seed}: {row['val_loss']}", flush=True)


if __name__ == "__main__":
    with clean_exits():
        main()
