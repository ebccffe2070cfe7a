"""Trains a small model with our methods and with peers, from the same weights on the same rows.

    python -m benchmarks.peers_loss --torch-python PEERS/bin/python [--peer-code FOLDER]

`train` draws the weights and orders the text for both; the first loss of a peer must be ours. Four
hosts are four processes on this machine's loopback, ours four devices of one process. Each method
runs at each rate of its optimizer, with a warm-up of a tenth and a cosine; a peer begins to
compress when ours does. Runs whose row is in the file already are not run again.

The table has their losses, and times and bytes of rows of benchmarks.slow_network.
"""

import argparse
import dataclasses
import os
import pathlib
import socket
import sys
import tempfile
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import commands, slow_network
from benchmarks import rows as rows_file
from benchmarks.peers import PEERS
from benchmarks.slow_network import ENVIRONMENT, SECONDS, write_work
from benchmarks.slow_network_figure import by_method, seconds, written
from benchmarks.worker import DENSE, LAMB, MODELS, UPDATES, config_of
from jaxcomp.launch.exits import clean_exits
from train.config import Config
from train.config.optimizer import schedule
from train.placement import build, devices
from train.task import make_task

MODEL, HOSTS, SEQUENCES, SEED = "0.5M", 4, 4, 0
RATES = {
    # by optimizer
    "adam": (3e-3, 6e-3),
    "lamb": (1e-2, 2e-2),
    "sign": (1e-3, 2e-3),
    "dion": (1e-2, 2e-2),
}


class Row(NamedTuple):
    """One method: ours as `optimizer.update` of a config, or a peer's name in `PEERS`."""

    rates: str  # of RATES
    update: str | None = None


OURS = {
    DENSE: Row("adam", UPDATES[DENSE]),
    "dense bfloat16": Row("adam", UPDATES["dense bfloat16"]),
    **{
        name: Row("adam", UPDATES[name].replace("warmup_steps=2", "warmup_steps=warmup_steps"))
        for name in UPDATES
        if name.startswith("PowerSGD") and name.endswith("Adam")
    },
    "1-bit Adam": Row("adam", "one_bit_adam(learning_rate, axis_name, freeze_step=warmup_steps)"),
    "0/1 Adam, every 4th": Row(
        "adam",
        "zero_one_adam(learning_rate, axis_name, warmup_steps=warmup_steps, "
        "sync_at=schedules.every(4, steps, after=warmup_steps))",
    ),
    "CocktailSGD": Row("adam", UPDATES["CocktailSGD"]),
    "CocktailSGD, 1 bit of 1/8": Row("adam", UPDATES["CocktailSGD, 1 bit of 1/8"]),
    "DeMo": Row("sign", UPDATES["DeMo"]),
    # 1/16 of this model's width, as the authors' code takes it.
    "Dion": Row("dion", UPDATES["Dion"].replace("rank=24", "rank=8")),
    LAMB: Row("lamb", UPDATES[LAMB]),
    "SLAMB": Row("lamb", UPDATES["SLAMB"]),
    "sharded Adam, 4 bits": Row("adam", UPDATES["sharded Adam, 4 bits"]),
    "DiLoCo, 4 bits, every 32nd": Row("adam", UPDATES["DiLoCo, 4 bits, every 32nd"]),
    "SparseLoCo, every 16th": Row("adam", UPDATES["SparseLoCo, every 16th"]),
}
KINDS = {"DeMo's code": "sign", "Dion's code": "dion", "SLAMB's code": "lamb"}
COMPARED = [name for name in PEERS if PEERS[name].options != {"exchange": "none"}]
ROWS = OURS | {name: Row(KINDS.get(name, "adam")) for name in COMPARED}


def run_of(name: str, rate: float, steps: int) -> Config:
    """The run of a row; of a peer's, what its rows and its rates are taken from."""
    config = config_of(ROWS[name].update or UPDATES[DENSE], MODELS[MODEL], HOSTS, SEQUENCES)
    optimizer = dataclasses.replace(
        config.optimizer, learning_rate=rate, warmup_steps=steps // 10, schedule="cosine"
    )
    return dataclasses.replace(
        config, name="peers_loss", steps=steps, optimizer=optimizer, seed=SEED, eval_batches=64
    )


def own_losses(config: Config) -> dict[str, float]:
    """Trains with one of our methods, and measures the mean of the replicas' parameters."""
    task = make_task(config)
    params, state = task.init()
    first = None
    for step in range(config.steps):
        params, state, metrics = task.step(params, state, task.batch(step))
        first = float(np.mean(metrics["loss"])) if first is None else first
    params, _ = task.deployed(params, state)
    return {"first_loss": first, "val_loss": task.evaluate(params)["loss"]}


def peer_losses(name: str, config: Config, torch_python: str, code: str | None) -> dict[str, float]:
    """Trains with a peer, by four processes.

    Raises:
      RuntimeError: If its first losses are not those of the same weights and rows in JAX.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "work.npz")
        write_work(path, config, config.steps)
        with np.load(path) as arrays:
            first = jax.jit(build.loss_of(config))(build.random_params(config), arrays["train"][0])
        with commands.start(_hosts(torch_python), ENVIRONMENT, pathlib.Path(folder)) as workers:
            asked = PEERS[name]._asdict() | {"model": MODELS[MODEL], "work": str(path)}
            dense_steps = config.optimizer.warmup_steps
            asked |= {"dense_steps": dense_steps, "code": code, "warm_steps": 0}
            commands.call(workers, "build", SECONDS, **asked)
            at = schedule(config.optimizer, config.steps)
            rates = [float(at(step)) for step in range(config.steps)]
            answers = commands.call(workers, "train", 2 * SECONDS, rates=rates)
    mean = float(np.mean([answer["first_loss"] for answer in answers]))
    if abs(mean - first) > 1e-4 * first:
        raise RuntimeError(f"{name} begins at loss {mean}, JAX at {first}: the work differs.")
    return {"first_loss": mean, "val_loss": answers[0]["val_loss"]}


def _hosts(python: str) -> list[list[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [python, "-m", "benchmarks.peers.host", "--coordinator", f"127.0.0.1:{port}"]
    program += ["--num-processes", str(HOSTS), "--interface", "lo", "--process-id"]
    return [[*program, str(number)] for number in range(HOSTS)]


TIMED_AT = {rate: written(rate) for rate in slow_network.RATES}
"""Names of rates in rows, and in the table."""
PAIRS = (
    # theirs, ours
    ("PyTorch DDP float32", "dense float32"),
    ("PyTorch DDP bfloat16", "dense bfloat16"),
    ("PyTorch PowerSGD 1", "PowerSGD 1, Adam"),
    ("PyTorch PowerSGD 1", "PowerSGD 1, both sides, Adam"),
    ("PyTorch PowerSGD 4", "PowerSGD 4, Adam"),
    ("PyTorch PowerSGD 4", "PowerSGD 4, both sides, Adam"),
    ("DeepSpeed 1-bit Adam", "1-bit Adam"),
    ("DeepSpeed 1-bit Adam, one tensor", "1-bit Adam"),
    ("DeepSpeed 0/1 Adam, every 4th", "0/1 Adam, every 4th"),
    ("CocktailSGD's code", "CocktailSGD"),
    ("DeMo's code", "DeMo"),
    ("Dion's code", "Dion"),
    ("SLAMB's code", "SLAMB"),
)
# Ours for the same task, without a counterpart.
OTHERS = (
    "sharded Adam, 4 bits",
    "CocktailSGD, 1 bit of 1/8",
    "DiLoCo, 4 bits, every 32nd",
    "SparseLoCo, every 16th",
)
TIE, LOSS_TIE = 0.05, 0.01  # relative, of times and bytes, and of losses


class Found(NamedTuple):
    """The measurements of one method."""

    sent: float  # bytes per step
    times: dict[str, float]  # seconds per step by rate
    loss: float | None


def found(times: list[dict], losses: list[dict]) -> dict[str, Found]:
    """The methods with measured times; losses are the lowest over the rates, at equal steps."""
    lowest: dict[str, float] = {}
    for row in losses:
        name, loss = row["method"], row["val_loss"]
        if loss is not None and loss == loss:
            lowest[name] = min(loss, lowest.get(name, loss))
    return {
        name: Found(
            # At the last rate: dense steps at the start are timed at the first.
            list(at.values())[-1]["nic_bytes"]["sent"],
            {rate: seconds(row) for rate, row in at.items()},
            lowest.get(name),
        )
        for name, at in by_method(times).items()
    }


def worse(ours: Found, theirs: Found) -> list[str]:
    """What is worse in ours than in theirs, beyond a tie: bytes, times by rate, loss."""
    where = ["bytes"] if ours.sent > (1 + TIE) * theirs.sent else []
    slower = [
        name
        for rate, name in TIMED_AT.items()
        if rate in ours.times
        and rate in theirs.times
        and ours.times[rate] > (1 + TIE) * theirs.times[rate]
    ]
    if slower:
        where.append(
            "time: " + ("every rate" if len(slower) == len(TIMED_AT) else ", ".join(slower))
        )
    if None not in (ours.loss, theirs.loss) and ours.loss > (1 + LOSS_TIE) * theirs.loss:
        where.append("loss")
    return where


def table(times: list[dict], losses: list[dict]) -> str:
    """The rows as Markdown: theirs, then ours and what is worse in it."""
    methods = found(times, losses)
    lines = []
    for theirs, ours in PAIRS:
        if theirs in methods:
            lines.append(_line(theirs, methods[theirs], ""))
            if ours in methods:
                text = "; ".join(worse(methods[ours], methods[theirs])) or "nothing"
                lines.append(_line(f"ours: {ours}", methods[ours], text))
    lines += [_line(f"ours: {name}", methods[name], "") for name in OTHERS if name in methods]
    head = ["method", "kB a step", *TIMED_AT.values(), "loss", "ours is worse in"]
    return rows_file.markdown(head, lines)


def _line(name: str, row: Found, text: str) -> list[str]:
    cells = [f"{1e3 * row.times[rate]:,.0f}" if rate in row.times else "" for rate in TIMED_AT]
    loss = "" if row.loss is None else f"{row.loss:.3f}"
    return [name, f"{row.sent / 1e3:,.0f}", *cells, loss, text]


def main(args: list[str]) -> None:
    """Runs what is missing, and saves after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch-python", help="as of benchmarks.slow_network; without it no peers")
    parser.add_argument("--peer-code", help="folder of the authors' code, see benchmarks.peers")
    parser.add_argument("--methods", nargs="+", default=[*ROWS], choices=[*ROWS], metavar="NAME")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rates", type=int, default=2, help="how many of each optimizer's")
    parser.add_argument("--json", type=pathlib.Path, default=rows_file.RESULTS / "peers_loss.json")
    options = parser.parse_args(args)
    devices.start(HOSTS)
    for name in options.methods:
        if name in PEERS and not options.torch_python:
            continue
        for rate in RATES[ROWS[name].rates][: options.rates]:
            rows = rows_file.read(options.json)
            key = {"method": name, "learning_rate": rate, "steps": options.steps}
            if any(key.items() <= row.items() for row in rows):
                continue
            config = run_of(name, rate, options.steps)
            if name in PEERS:
                found = peer_losses(name, config, options.torch_python, options.peer_code)
            else:
                found = own_losses(config)
            print(f"{name}, rate {rate:g}: {found['val_loss']:.4f}", flush=True)
            facts = {"update": ROWS[name].update, "model": MODEL, "sequences": SEQUENCES}
            facts |= {"hosts": HOSTS, "cores": os.cpu_count(), **rows_file.machine()}
            rows_file.write(options.json, [*rows, key | facts | found])


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
