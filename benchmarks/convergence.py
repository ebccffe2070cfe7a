"""Trains the nano task, or another task below, with several methods; writes losses and bytes.

    python -m benchmarks.convergence [--task TASK] --methods NAME ... [--json FILE]

Each method runs at every learning rate of its grid with the tuning seeds (default: 0), then at its
best rate with the other seeds. Runs with a row in the file are skipped, so you may stop and start
the program at any time. Two halves of the methods can run at once on a core each (`taskset -c 0`,
another --json), about 15% faster than one after the other.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics

from benchmarks import rows as rows_file
from benchmarks.methods import METHODS
from configs import digits_dense, nano_bert_dense, nano_dense, nano_fine_tune_dense, nano_lamb
from jaxcomp.launch.exits import clean_exits
from train.config import Config
from train.placement import devices

KEY = ("task", "method", "steps", "learning_rate", "seed")

# Fine-tuning starts from the parameters of `python -m train configs/nano_dense.py`.
TASKS = {
    "nano": nano_dense,
    "nano_bert": nano_bert_dense,
    "nano_fine_tune": nano_fine_tune_dense,
    "nano_lamb": nano_lamb,
    "digits": digits_dense,
}


def config_of(task: str, method: str, rate: float, seed: int, steps: int) -> Config:
    """The run of one row: the task's dense config with another method, rate and seed."""
    dense = TASKS[task].get_config()
    optimizer = dataclasses.replace(
        dense.optimizer,
        update=METHODS[method].update,
        learning_rate=rate,
        warmup_steps=steps // 10,
        schedule=METHODS[method].schedule,
    )
    slug = f"{method.replace(' ', '_').replace('/', '_')}_{rate:g}_{seed}_{steps}"
    return dataclasses.replace(
        dense,
        name=f"convergence/{task}/{slug}",
        steps=steps,
        seed=seed,
        optimizer=optimizer,
        qsdp=METHODS[method].qsdp,
        replicas=replicas_of(task, method),
        fast=METHODS[method].fast,
        eval_every=max(1, steps // 10),
        eval_batches=16,
        checkpoint_every=steps,
    )


def replicas_of(task: str, method: str) -> int:
    """The task's number of replicas, or the method's own."""
    return METHODS[method].replicas or TASKS[task].get_config().replicas


def run_row(task: str, method: str, rate: float, seed: int, steps: int) -> dict:
    """Trains one row, or reads it if its run has ended before."""
    from train.loop import run

    config = config_of(task, method, rate, seed, steps)
    rows = run(config)
    record = json.loads(pathlib.Path(config.runs_dir, config.name, "config.json").read_text())
    plan = record["plan"]
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "steps": steps,
        "learning_rate": rate,
        "update": config.optimizer.update,
        "qsdp": config.qsdp,
        "val_loss": rows[-1]["val_loss"],
        "val_accuracy": rows[-1].get("val_accuracy"),
        "curve": [[row["step"], row["val_loss"]] for row in rows if "val_loss" in row],
        "sent_bytes_per_step": plan["sent_bytes_per_step"],
        "bits_per_parameter": rows_file.bits_per_parameter(
            plan["sent_bytes_per_step"], plan["parameters"], plan["replicas"]
        ),
        "replicas": plan["replicas"],
        "rounds": rows[-1]["rounds"],
        "skipped": rows[-1]["skipped"],
        "data_sha256": record["data"]["sha256"],
        **rows_file.machine(),
    }


def best_rate(rows: list[dict], seeds: list[int]) -> float:
    """The rate with the lowest mean loss over some seeds; NaN and infinities are the worst."""
    losses = {}
    for row in rows:
        if row["seed"] in seeds:
            loss = float("inf") if row["val_loss"] is None else row["val_loss"]
            losses.setdefault(row["learning_rate"], []).append(loss)
    return min(losses, key=lambda rate: statistics.fmean(losses[rate]))


def main() -> None:
    """Makes the missing runs, one after the other, and saves after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", default="nano", choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", required=True, choices=[*METHODS], metavar="NAME")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--tuning-seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--rates", nargs="*", type=float, help="instead of each method's grid")
    parser.add_argument("--json", type=pathlib.Path, default=rows_file.RESULTS / "convergence.json")
    args = parser.parse_args()
    steps = args.steps or TASKS[args.task].get_config().steps
    devices.start(max(replicas_of(args.task, method) for method in args.methods))

    def rows_of(method, **more):
        key = {"task": args.task, "method": method, "steps": steps} | more
        return [row for row in rows_file.read(args.json) if key.items() <= row.items()]

    def ensure(method, rate, seed):
        if rows_of(method, learning_rate=rate, seed=seed):
            return
        row = run_row(args.task, method, rate, seed, steps)
        print(f"{method}, rate {rate:g}, seed {seed}: {row['val_loss']}", flush=True)
        rows_file.add(args.json, row, {name: row[name] for name in KEY})

    for method in args.methods:
        for rate in args.rates or METHODS[method].rates:
            for seed in args.tuning_seeds:
                ensure(method, rate, seed)
        # Only the tuning seeds: the others would change the choice while they run.
        best = best_rate(rows_of(method), args.tuning_seeds)
        for seed in args.seeds:
            ensure(method, best, seed)


if __name__ == "__main__":
    with clean_exits():
        main()
