"""Trains tasks of growing size with several methods; writes losses and bits.

    nice python -m benchmarks.scale --size micro --tune --methods NAME ...
    nice python -m benchmarks.scale --size micro --methods NAME ... [--seeds 1 2 3]
    nice python -m benchmarks.scale --size micro --updates "diloco(...)" --rate 3e-3 --seeds 0

`--tune` finds each method's learning rate by one rule, see `benchmarks.scale_tuning`; rows then
have that rate. Four replicas are simulated on one device, a CPU or a GPU, equal to a mesh up to
rounding; only those of `qsdp` are a mesh. Losses are those of the replicas' mean. Bits are those of
the program compiled for a mesh of CPUs: repeat on a CPU what a GPU has trained, and its rows get
them.

Runs with a row in the file are skipped, and a row is written when its run ends, so you may stop and
start the program at any time. `--minutes` stops it, `--processes` shares the device.
"""

import argparse
import functools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import jax

from benchmarks import methods, scale_run, scale_tuning
from benchmarks import rows as rows_file
from benchmarks.scale_methods import METHODS, baseline_of
from benchmarks.scale_sizes import SIZES, by_recipe, config_of, data_of
from jaxcomp.launch.exits import clean_exits
from train.placement import devices

RESULTS = pathlib.Path("benchmarks/results")
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
    args.json = args.json or RESULTS / f"{args.size}.json"
    args.trials = args.json.with_name(f"{args.json.stem}_tuning.json")
    return args


def row_of(
    file: pathlib.Path,
    size: str,
    name: str,
    method: methods.Method,
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
      until: When to stop, see `scale_run.train`.
      counted: Whether to count the bytes.
      **key: "seed", "steps" and "learning_rate".
    """
    key = {"task": size, "method": name, **key}
    row = next((row for row in rows_file.read(file) if key.items() <= row.items()), None)
    config = config_of(size, method, key["seed"], key["steps"], key["learning_rate"])
    if row is None or "stopped_at" in row:
        print(f"{name}, rate {key['learning_rate']:g}, seed {key['seed']}", flush=True)
        row = scale_run.run_row(size, name, config, until) | {"baseline": baseline_of(method)}
        rows_file.add(file, row, key)
    if counted and "bits_per_parameter" not in row and jax.device_count() >= REPLICAS:
        row |= scale_run.sent(config)
        rows_file.add(file, row, key)
    return row


def run(args: argparse.Namespace) -> None:
    """Makes the missing rows of this process, one after the other."""
    until = time.monotonic() + 60 * args.minutes
    chosen = {name: by_recipe(METHODS[name], args.size) for name in args.methods}
    chosen |= {update: methods.Method(update) for update in args.updates}
    jobs = [(seed, name) for seed in (args.seeds if not args.tune else [0]) for name in chosen]
    for seed, name in jobs[args.part or 0 :: args.processes]:
        of_run = {"size": args.size, "name": name, "method": chosen[name], "seed": seed}
        make = functools.partial(row_of, **of_run, until=until, counted=not args.tune)
        if args.tune:
            scale_tuning.tune(args.size, chosen[name], functools.partial(make, args.trials))
        else:
            rate = args.rate or scale_tuning.best(args, name, METHODS)
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
