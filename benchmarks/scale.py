"""Trains tasks of growing size with several methods; writes losses and bits.

    nice python -m benchmarks.scale --size micro --tune --methods NAME ...
    nice python -m benchmarks.scale --size micro --methods NAME ... [--seeds 1 2 3]
    nice python -m benchmarks.scale --size micro --updates "diloco(...)" --rate 3e-3 --seeds 0

`--tune` finds each method's learning rate by one rule, that of `tune`; rows then have that rate.
Four replicas are simulated on one device, a CPU or a GPU, equal to a mesh up to rounding; only
those of `qsdp` are a mesh. Losses are those of the replicas' mean. Bits are those of the program
compiled for a mesh of CPUs: repeat on a CPU what a GPU has trained, and its rows get them.

Runs with a row in the file are skipped, and a row is written when its run ends, so you may stop and
start the program at any time. `--minutes` stops it, `--processes` shares the device.
"""

import argparse
import functools
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks import rows as rows_file
from benchmarks import scale_sizes
from benchmarks.methods import Method
from benchmarks.scale_sizes import METHODS, SIZES, baseline_of, by_recipe, config_of, data_of
from jaxcomp.launch.exits import clean_exits
from jaxcomp.replicas import protocol
from train import examples
from train.config import Config
from train.config.run import AXIS_NAME, update
from train.examples import Examples
from train.placement import build, devices
from train.task import Task, make_task, num_parameters

TRIAL_SEED, MOST_TRIALS = 0, 5


def steps_of(size: str) -> int:
    """Steps of a trial."""
    return SIZES[size].trial or SIZES[size].steps // 2


def tune(size: str, method: Method, make: Callable[..., dict]) -> None:
    """Makes a method's missing trials, as many for every method, on a seed that is no row.

    The first are the centre of its dense baseline, half and twice that; the baseline is dense
    training with the same inner optimizer, which is tuned alike. While the best trial is at an
    edge, the next rate beyond it is tried. A trial is a run of `steps_of`, with its own whole
    schedule. Trials are rows of a file beside the rows'.

    Args:
      size: A key of `SIZES`.
      method: The method, whose baseline has a centre there.
      make: `(steps=, learning_rate=) -> row`; a run that was cut short ends the trials.
    """
    centre, losses = SIZES[size].centres[baseline_of(method)], {}
    rates = [centre, centre / 2, centre * 2]
    while rates:
        row = make(steps=steps_of(size), learning_rate=rates.pop(0))
        if "stopped_at" in row:
            return
        losses[row["learning_rate"]] = row["val_loss"]
        if not rates and len(losses) < MOST_TRIALS:
            rates = beyond(losses)


def beyond(losses: Mapping[float, float | None]) -> list[float]:
    """The next rate, if the best one is the lowest or the highest of all."""
    rate = lowest(losses)
    return [rate / 2] * (rate == min(losses)) + [rate * 2] * (rate == max(losses))


def lowest(losses: Mapping[float, float | None]) -> float:
    """The rate of the lowest loss; None, of a run that diverged, is the highest."""
    return min(losses, key=lambda rate: float("inf") if losses[rate] is None else losses[rate])


def best(args: argparse.Namespace, name: str, known: Mapping[str, Method]) -> float:
    """The best rate of a method's trials; for a size without centres, the table's.

    Raises:
      ValueError: If there are no trials.
    """
    if not SIZES[args.size].centres:
        return known[name].rates[0]
    key = {"task": args.size, "method": name, "seed": TRIAL_SEED, "steps": steps_of(args.size)}
    rows = [row for row in rows_file.read(args.trials) if key.items() <= row.items()]
    losses = {row["learning_rate"]: row["val_loss"] for row in rows if "stopped_at" not in row}
    if len(losses) < 3:
        raise ValueError(
            f"{args.trials} has {len(losses)} trials of {name!r} in {key['steps']} steps; needs 3: "
            "add --tune first, or name a rate, --rate 3e-3."
        )
    return lowest(losses)


TOGETHER = 100  # most steps per program


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
        params = first_params(config)
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


def first_params(config: Config) -> Any:
    """What a run starts from: random parameters, or the last of the run before, made once."""
    random, before = jax.jit(lambda: build.random_params(config))(), SIZES[config.name].before
    if before is None:
        return random
    leaves, tree = jax.tree.flatten(random)
    file = scale_sizes.TEXT / f"{before.task}_{before.steps}.npz"
    if not file.is_file():
        dense = by_recipe(METHODS["dense Adam"], before.task)
        earlier = config_of(before.task, dense, TRIAL_SEED, before.steps, before.rate)
        params, _ = train(earlier, examples.read(earlier))
        with open(unfinished := file.with_suffix(".unfinished"), "wb") as opened:
            np.savez(opened, *jax.tree.leaves(params))
        unfinished.rename(file)
    with np.load(file) as arrays:
        return tree.unflatten([jnp.asarray(arrays[f"arr_{n}"]) for n in range(len(leaves))])


def on_mesh(task: Task) -> Loop:
    """The loop of a mesh, for sharded parameters: `simulated_train_step` does not shard them."""
    place = build.batch_of(task.config, task.mesh).sharding

    def advance(params, state, batches):
        for batch in batches:
            params, state, _ = task.step(params, state, jax.device_put(batch, place))
        return params, state

    loss = lambda *given: task.evaluate(task.deployed(*given)[0])["loss"]
    return Loop(lambda: task.init(first_params(task.config)), advance, loss)


def train(config: Config, text: Examples, until: float = math.inf) -> tuple[Any, list[list[float]]]:
    """Trains once, evaluating after each tenth of the run.

    Args:
      config: The run.
      text: Its batches.
      until: Time of `time.monotonic()` at which the run ends early.

    Returns:
      The last parameters, and [step, validation loss] of each evaluation; the last one is that of
      the last step, or where the time was up or the loss not finite.
    """
    sharded = config.qsdp is not None
    loop = on_mesh(make_task(config, lambda _: text)) if sharded else simulated(config, text)
    tenth, curve = max(1, config.steps // 10), []
    together = max(n for n in range(1, TOGETHER + 1) if tenth % n == 0)
    params, state = loop.start()
    for first in range(0, config.steps, together):
        last = min(first + together, config.steps)
        batches = np.stack([text.train(number, slice(None)) for number in range(first, last)])
        params, state = loop.advance(params, state, batches)
        jax.block_until_ready(params)
        late = time.monotonic() > until
        if last % tenth == 0 or last == config.steps or late:
            curve.append([last, loop.loss(params, state)])
            print(f"step {last}: {curve[-1][1]:.4f}", flush=True)
            if late or not math.isfinite(curve[-1][1]):
                break
    return params, curve


def run_row(size: str, name: str, config: Config, until: float = math.inf) -> dict:
    """One row: the run, its bytes, and its losses. `stopped_at` is the step of a run cut short."""
    text = examples.read(config)
    began = time.perf_counter()
    _, curve = train(config, text, until)
    last, loss = curve[-1]
    row = {
        "task": size,
        "method": name,
        "update": config.optimizer.update,
        "qsdp": config.qsdp,
        "learning_rate": config.optimizer.learning_rate,
        "seed": config.seed,
        "steps": config.steps,
        "replicas": config.replicas,
        "local_batch": config.data.batch // config.replicas,
        "val_loss": loss if math.isfinite(loss) else None,
        "curve": [point for point in curve if math.isfinite(point[1])],
        "seconds": round(time.perf_counter() - began),
        "data_sha256": text.record["sha256"],
        **rows_file.machine(),
    }
    if math.isfinite(loss) and last < config.steps:
        row["stopped_at"] = last
    return row


def sent(config: Config) -> dict:
    """What a row says of its messages: those of the program compiled for a mesh of CPUs."""
    task, size = make_task(config, examples.none), config.replicas
    parameters = num_parameters(task)
    return {
        "parameters": parameters,
        "sent_bytes_per_step": task.sent_bytes,
        "bits_per_parameter": rows_file.bits_per_parameter(task.sent_bytes, parameters, size),
    }


REPLICAS = 4


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; fills in what the size decides."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="micro", choices=list(SIZES))
    parser.add_argument("--methods", nargs="+", default=[], choices=list(METHODS), metavar="NAME")
    parser.add_argument(
        "--updates", nargs="+", default=[], help="`optimizer.update` of other methods; with --rate"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, help="instead of the size's own")
    parser.add_argument("--rate", type=float, help="instead of each method's own")
    parser.add_argument("--tune", action="store_true", help="make the trials of rates")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--processes", type=int, default=1, help="side by side on one device")
    parser.add_argument("--part", type=int, help="which of the processes this one is")
    parser.add_argument("--json", type=pathlib.Path, help="default: benchmarks/results/SIZE.json")
    args = parser.parse_args(argv)
    if args.updates and not args.rate:
        parser.error("--updates needs a rate, write --rate 3e-3")
    if not args.updates and not args.methods:
        parser.error(f"name --methods, some of {list(METHODS)}, or --updates")
    args.steps = args.steps or SIZES[args.size].steps
    args.json = args.json or rows_file.RESULTS / f"{args.size}.json"
    args.trials = args.json.with_name(f"{args.json.stem}_tuning.json")
    return args


def row_of(
    file: pathlib.Path,
    size: str,
    name: str,
    method: Method,
    until: float,
    counted: bool,
    **key,
) -> dict:
    """The row of a run: trained, and its bytes counted, unless the file has them.

    Args:
      file: The file of rows.
      size: A key of `SIZES`.
      name: The method's name in the row.
      method: The method.
      until: When to stop, see `train`.
      counted: Whether to count the bytes.
      **key: "seed", "steps" and "learning_rate".
    """
    key = {"task": size, "method": name, **key}
    row = next((row for row in rows_file.read(file) if key.items() <= row.items()), None)
    config = config_of(size, method, key["seed"], key["steps"], key["learning_rate"])
    if row is None or "stopped_at" in row:
        print(f"{name}, rate {key['learning_rate']:g}, seed {key['seed']}", flush=True)
        row = run_row(size, name, config, until) | {"baseline": baseline_of(method)}
        rows_file.add(file, row, key)
    if counted and "bits_per_parameter" not in row and jax.device_count() >= REPLICAS:
        row |= sent(config)
        rows_file.add(file, row, key)
    return row


def run(args: argparse.Namespace) -> None:
    """Makes the missing rows of this process, one after the other."""
    until = time.monotonic() + 60 * args.minutes
    chosen = {name: by_recipe(METHODS[name], args.size) for name in args.methods}
    chosen |= {update: Method(update) for update in args.updates}
    jobs = [
        (seed, name) for seed in (args.seeds if not args.tune else [TRIAL_SEED]) for name in chosen
    ]
    for seed, name in jobs[args.part or 0 :: args.processes]:
        of_run = {"size": args.size, "name": name, "method": chosen[name], "seed": seed}
        make = functools.partial(row_of, **of_run, until=until, counted=not args.tune)
        if args.tune:
            tune(args.size, chosen[name], functools.partial(make, args.trials))
        else:
            rate = args.rate or best(args, name, METHODS)
            make(args.json, steps=args.steps, learning_rate=rate)
        if time.monotonic() > until:
            return


def side_by_side(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Runs the processes of `--processes`; returns how many failed."""
    data_of(SIZES[args.size])  # else each process would write the text
    fraction = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / args.processes:.3f}"}
    command = [sys.executable, "-m", "benchmarks.scale", *argv, "--part"]
    parts = [
        subprocess.Popen([*command, str(part)], env=os.environ | fraction)
        for part in range(args.processes)
    ]
    return sum(part.wait() != 0 for part in parts)


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parsed(argv)
    if args.processes > 1 and args.part is None:
        raise SystemExit(side_by_side(args, argv))
    devices.start(REPLICAS)
    run(args)


if __name__ == "__main__":
    with clean_exits():
        main()
