"""Trains a task of some size with several methods; writes losses and bits.

    nice python -m benchmarks.scale --size micro --methods NAME ... [--seeds 1 2 3] [--json FILE]
    nice python -m benchmarks.scale --size micro --updates "diloco(...)" --rate 3e-3 --seeds 0

Four replicas are simulated on one device, equal to a mesh up to rounding, and many steps are one
program; only those of `qsdp` are a mesh. Losses are those of the replicas' mean. Bits are those of
the program compiled for a mesh of CPUs. Runs with a row in the file are skipped. `--size` names the
model and its text; all but `pico` share a recipe: clipping, decay and b2 = 0.95.
"""

import argparse
import functools
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks import methods, scale_methods
from benchmarks import rows as rows_file
from benchmarks.scale_sizes import SIZES, by_recipe, config_of
from jaxcomp.replicas import protocol
from train.config import Config
from train.config.run import AXIS_NAME, update
from train.data import examples
from train.data.examples import Examples
from train.models import build
from train.processes import devices
from train.processes.exits import clean_exits
from train.task import Task, make_task, num_parameters

TOGETHER = 100  # most steps per program
RESULTS = pathlib.Path("benchmarks/results")


class Loop(NamedTuple):
    """A run's functions.

    Attributes:
      start: `() -> params, state`.
      advance: `(params, state, batches) -> params, state`; batches have a leading axis of steps.
      loss: `(params, state) -> ` the validation loss of the replicas' mean.
    """

    start: Callable[[], tuple[Any, Any]]
    advance: Callable[[Any, Any, Any], tuple[Any, Any]]
    loss: Callable[[Any, Any], float]


def mean_params(params: Any, state: Any) -> Any:
    """`jaxcomp.mean_params` of simulated replicas."""
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    for drift in protocol.drifts(state):
        add = lambda d, p: p if is_masked(d) else p + jnp.mean(d, axis=0)
        params = jax.tree.map(add, drift, params, is_leaf=is_masked)
    return params


def simulated(config: Config, text: Examples) -> Loop:
    """The loop of replicas that one device simulates; several steps are one program."""
    loss_fn = build.loss_of(config)
    init, step = jaxcomp.simulated_train_step(loss_fn, update(config), config.replicas, AXIS_NAME)
    numbers = range(config.eval_batches)
    held_out = np.stack([text.validation(number, slice(None)) for number in numbers])

    def start():
        params = jax.jit(lambda: build.random_params(config))()
        return params, init(params)

    def advance(params, state, batches):
        one = lambda carry, batch: (step(*carry, batch)[:2], None)
        return jax.lax.scan(one, (params, state), batches)[0]

    @jax.jit
    def losses(params, state):
        mean = mean_params(params, state)
        return jax.lax.map(functools.partial(loss_fn, mean), held_out)

    loss = lambda *given: float(np.mean(np.asarray(losses(*given), np.float64)))
    return Loop(start, jax.jit(advance, donate_argnums=(0, 1)), loss)


def on_mesh(task: Task) -> Loop:
    """The loop of a mesh, for sharded parameters: `simulated_train_step` does not shard them."""
    place = build.batch_of(task.config, task.mesh).sharding

    def advance(params, state, batches):
        for batch in batches:
            params, state, _ = task.step(params, state, jax.device_put(batch, place))
        return params, state

    loss = lambda *given: task.evaluate(task.deployed(*given)[0])["loss"]
    return Loop(task.init, advance, loss)


def train(config: Config, text: Examples) -> tuple[Any, list[list[float]]]:
    """Trains once: the last parameters, and [step, validation loss] after each tenth of the run."""
    sharded = config.qsdp is not None
    loop = on_mesh(make_task(config, lambda _: text)) if sharded else simulated(config, text)
    tenth, curve = max(1, config.steps // 10), []
    together = max(n for n in range(1, TOGETHER + 1) if tenth % n == 0)
    params, state = loop.start()
    for first in range(0, config.steps, together):
        last = min(first + together, config.steps)
        batches = np.stack([text.train(number, slice(None)) for number in range(first, last)])
        params, state = loop.advance(params, state, batches)
        if last % tenth == 0 or last == config.steps:
            curve.append([last, loop.loss(params, state)])
            print(f"step {last}: {curve[-1][1]:.4f}", flush=True)
            if not math.isfinite(curve[-1][1]):
                break
    return params, curve


def run_row(size: str, name: str, config: Config) -> dict:
    """One row: the run, its bytes, and its losses."""
    text = examples.read(config)
    began = time.perf_counter()
    _, curve = train(config, text)
    loss, replicas = curve[-1][1], config.replicas
    seconds = round(time.perf_counter() - began)
    task = make_task(config, examples.none)  # compiled for a mesh, to count its messages
    parameters = num_parameters(task)
    return {
        "task": size,
        "method": name,
        "update": config.optimizer.update,
        "qsdp": config.qsdp,
        "learning_rate": config.optimizer.learning_rate,
        "seed": config.seed,
        "steps": config.steps,
        "replicas": replicas,
        "local_batch": config.data.batch // replicas,
        "parameters": parameters,
        "val_loss": loss if math.isfinite(loss) else None,
        "curve": [point for point in curve if math.isfinite(point[1])],
        "sent_bytes_per_step": task.sent_bytes,
        # Per direction of an all-reduce, as in `benchmarks.convergence`.
        "bits_per_parameter": task.sent_bytes * 8 / parameters / (2 * (replicas - 1) / replicas),
        "seconds": seconds,
        "data_sha256": text.record["sha256"],
        **rows_file.machine(),
    }


def main() -> None:
    """Makes the missing runs, one after the other, and saves after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="micro", choices=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=[], choices=list(scale_methods.METHODS))
    parser.add_argument(
        "--updates", nargs="+", help="other methods' `optimizer.update`; with --rate"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--rate", type=float, help="instead of each method's own")
    parser.add_argument("--json", type=pathlib.Path, help="default: benchmarks/results/SIZE.json")
    args = parser.parse_args()
    if args.updates and not args.rate:
        parser.error("--updates needs a rate, write --rate 3e-3")
    if args.updates:
        chosen = {update: methods.Method(update) for update in args.updates}
    else:
        known = scale_methods.METHODS
        chosen = {name: by_recipe(known[name], args.size) for name in args.methods}
    devices.start(4)
    steps, file = args.steps or SIZES[args.size].steps, args.json or RESULTS / f"{args.size}.json"
    for seed in args.seeds:
        for name, method in chosen.items():
            rows = json.loads(file.read_text()) if file.exists() else []
            rate = args.rate or method.rates[0]
            key = {"method": name, "learning_rate": rate, "seed": seed, "steps": steps}
            if not any(key.items() <= row.items() for row in rows):
                row = run_row(args.size, name, config_of(args.size, method, seed, steps, rate))
                rows_file.write(file, [*rows, row])
                print(f"{name}, rate {rate:g}, seed {seed}: {row['val_loss']}", flush=True)


if __name__ == "__main__":
    with clean_exits():
        main()
