"""Trains the nano task with every method; writes losses, bytes and figures.

    python -m benchmarks.convergence [--methods NAME ...] [--json FILE]

Each method is run at every rate of its grid with the tuning seeds (0, unless told), then at its
best rate with the other seeds. Runs whose row is in the file already are not run again, so that it
can be stopped and started at will, and two halves of the methods can run beside each other on a
core each (`taskset -c 0`, another --json): about 15% faster than one after the other.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics

from benchmarks import rows as rows_file
from configs import nano_dense
from train import devices
from train.config import Optimizer
from train.exits import clean_exits

MEAN = "compressed_mean({}, axis_name)"
ADAM = "adam(learning_rate)"
SGD = "sgd(learning_rate, momentum=0.9)"
ADAM_RATES, SGD_RATES = (3e-3, 6e-3), (0.03, 0.1)

METHODS = {
    # name: (compressor, optimizer, learning rates)
    "dense Adam": ("identity()", ADAM, (*ADAM_RATES, 1.2e-2)),
    "4-bit Adam": ("quantize(4)", ADAM, ADAM_RATES),
    "4-bit Adam, blocks of 32": ("quantize(4, block=32)", ADAM, ADAM_RATES),
    "8-bit Adam": ("quantize(8)", ADAM, ADAM_RATES),
    "dense momentum SGD": ("identity()", SGD, SGD_RATES),
    "sign Adam": ("sign(block=128)", ADAM, ADAM_RATES),
    "group_top_1 Adam": ("group_top_1(8)", ADAM, ADAM_RATES),
    "top_k Adam": ("top_k(0.125, block=4096)", ADAM, ADAM_RATES),
    "sign momentum SGD": ("sign(block=128)", SGD, SGD_RATES),
    "group_top_1 momentum SGD": ("group_top_1(8)", SGD, SGD_RATES),
    "top_k momentum SGD": ("top_k(0.125, block=4096)", SGD, SGD_RATES),
}


def config_of(method: str, rate: float, seed: int, steps: int):
    """The run of one row: the nano config with another update, rate and seed."""
    compressor, optimizer, _ = METHODS[method]
    update = f"chain({MEAN.format(compressor)}, {optimizer})"
    slug = f"{method.replace(' ', '_')}_{rate:g}_{seed}_{steps}"
    return dataclasses.replace(
        nano_dense.get_config(),
        name=f"convergence/{slug}",
        steps=steps,
        seed=seed,
        optimizer=Optimizer(update=update, learning_rate=rate, warmup_steps=steps // 10),
        eval_every=max(1, steps // 10),
        eval_batches=16,
        checkpoint_every=steps,
    )


def run_row(method: str, rate: float, seed: int, steps: int) -> dict:
    """Trains one row, or reads it if its run has ended before."""
    from train.loop import run

    config = config_of(method, rate, seed, steps)
    rows = run(config)
    record = json.loads(pathlib.Path(config.runs_dir, config.name, "config.json").read_text())
    plan = record["plan"]
    return {
        "task": "nano",
        "method": method,
        "seed": seed,
        "steps": steps,
        "learning_rate": rate,
        "update": config.optimizer.update,
        "val_loss": rows[-1]["val_loss"],
        "curve": [[row["step"], row["val_loss"]] for row in rows if "val_loss" in row],
        "sent_bytes_per_step": plan["sent_bytes_per_step"],
        # Per direction of an all-reduce: a ring sends 2 (R-1)/R of what it reduces.
        "bits_per_parameter": plan["sent_bytes_per_step"]
        * 8
        / plan["parameters"]
        / (2 * (plan["replicas"] - 1) / plan["replicas"]),
        "replicas": plan["replicas"],
        "skipped": rows[-1]["skipped"],
        "data_sha256": record["data"]["sha256"],
        "versions": record["versions"],
        "hardware": record["hardware"],
    }


def best_rate(rows: list[dict], method: str, steps: int, seeds: list[int]) -> float:
    """The rate of the lowest mean loss over some seeds; one that is not finite is the worst."""
    losses = {}
    for row in rows:
        if (row["method"], row["steps"]) == (method, steps) and row["seed"] in seeds:
            loss = float("inf") if row["val_loss"] is None else row["val_loss"]
            losses.setdefault(row["learning_rate"], []).append(loss)
    return min(losses, key=lambda rate: statistics.fmean(losses[rate]))


def main() -> None:
    """Runs what is missing, one after the other, and saves after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--tuning-seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rates", nargs="*", type=float, help="instead of each method's grid")
    parser.add_argument(
        "--json", type=pathlib.Path, default=pathlib.Path("benchmarks/results/convergence.json")
    )
    args = parser.parse_args()
    devices.start(nano_dense.get_config().replicas)

    def rows():
        return json.loads(args.json.read_text()) if args.json.exists() else []

    def ensure(method, rate, seed):
        key = (method, rate, seed, args.steps)
        if key in [(r["method"], r["learning_rate"], r["seed"], r["steps"]) for r in rows()]:
            return
        row = run_row(*key)
        print(f"{method}, rate {rate:g}, seed {seed}: {row['val_loss']}", flush=True)
        rows_file.write(args.json, [*rows(), row])

    for method in args.methods:
        for rate in args.rates or METHODS[method][2]:
            for seed in args.tuning_seeds:
                ensure(method, rate, seed)
        # Of the tuning seeds alone, else the others would move the choice while they are run.
        best = best_rate(rows(), method, args.steps, args.tuning_seeds)
        for seed in args.seeds:
            ensure(method, best, seed)


if __name__ == "__main__":
    with clean_exits():
        main()
