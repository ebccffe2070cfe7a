"""Compares what an accelerator computes with what a CPU computes, for every code and method.

    python -m benchmarks.studies.agreement --json FILE

Codes encode one random bucket and decode it. Methods take six steps: as four replicas that one
device simulates, and as the one replica of a mesh of the device. Gradients are random and the same
on both. A last bit that differs can flip a sign or a quantized value, which a residual keeps. So
the CPU also takes the steps with gradients whose last bits are changed: how far it then ends from
itself is what any two correct programs may differ by.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxcomp
from benchmarks import codes, methods
from benchmarks import rows as rows_file
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.sparse import top_k
from train.config import Config, Optimizer
from train.config.run import AXIS_NAME, update

REPLICAS, STEPS, RATE = 4, 6, 1e-3
NUMEL = 2**20
SHAPES = {"embed": (1000, 128), "blocks": (4, 128, 256), "bias": (256,)}

UPDATES = {
    name: methods.METHODS[known].update
    for name, known in {
        "dense Adam": "dense Adam",
        "8 bits": "8-bit Adam",
        "4 bits": "4-bit Adam",
        "signs": "sign momentum SGD",
        "top_k": "top_k momentum SGD",
        "group_top_1": "group_top_1 momentum SGD",
        "CocktailSGD": "CocktailSGD",
        "0/1 Adam": "0/1 Adam, plain",
        "1-bit Adam": "1-bit Adam, 2 dense steps",
        "1-bit LAMB": "1-bit LAMB, 2 dense steps",
        "sharded Adam": "sharded Adam",
        "PowerSGD": "PowerSGD",
        "DeMo": "DeMo",
    }.items()
} | {
    "SLAMB": "slamb(learning_rate, axis_name, sync_every=3)",
    "local steps": "local_steps(adam(learning_rate), axis_name, every=2)",
    # The default when its row was made.
    "Dion": "dion(learning_rate, axis_name, rank=16, "
    "others=adamw(learning_rate, b2=0.95, weight_decay=0.0))",
}


class Result(NamedTuple):
    """What one device computed: what the row says of it, the payload of a code, the values."""

    told: dict[str, Any]
    payload: list[np.ndarray]
    values: np.ndarray


def gradients(replicas: int, *, changed: bool = False) -> list[dict[str, np.ndarray]]:
    """f32[replicas, ...] of each step; `changed`: each by at most one part in 2^23."""
    random, bits = np.random.default_rng(0), np.random.default_rng(1)
    draw = lambda shape: random.standard_normal((replicas, *shape), np.float32)
    steps = [{name: draw(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]
    if not changed:
        return steps
    near = lambda x: np.nextafter(x, bits.choice([-np.inf, np.inf], x.shape).astype(x.dtype))
    return [{name: near(x) for name, x in step.items()} for step in steps]


def loss_fn(params: dict[str, jax.Array], grads: dict[str, jax.Array]) -> jax.Array:
    """f32[]: linear in the parameters, so that its gradient is the mean row of `grads`."""
    products = jax.tree.map(lambda p, g: jnp.sum(p * jnp.mean(g, 0)), params, grads)
    return sum(jax.tree.leaves(products))


def trained(name: str, replicas: int, *, changed: bool = False) -> np.ndarray:
    """f32[numel]: how far the parameters move in the steps, on the default device.

    Args:
      name: A key of `UPDATES`.
      replicas: 1: a mesh of the device; more: that many are simulated on it.
      changed: As of `gradients`.
    """
    optimizer = Optimizer(update=UPDATES[name], learning_rate=RATE)
    tx = update(Config(name="agreement", steps=STEPS, optimizer=optimizer))
    if replicas > 1:
        init, step = jaxcomp.simulated_train_step(loss_fn, tx, replicas, AXIS_NAME)
    else:
        mesh = jax.make_mesh((1,), (AXIS_NAME,), devices=jax.devices()[:1])
        init, step = jaxcomp.train_step(loss_fn, tx, mesh, AXIS_NAME)
    start = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    params = jax.tree.map(jnp.copy, start)
    state = init(params)
    for grads in gradients(replicas, changed=changed):
        params, state, _ = step(params, state, jax.tree.map(jnp.asarray, grads))
    moved = jax.tree.map(lambda new, old: np.asarray(new - old).ravel(), params, start)
    return np.concatenate(jax.tree.leaves(moved))


def coded(code: Compressor) -> tuple[list[np.ndarray], np.ndarray]:
    """A code's payload of a random bucket, and what that decodes to."""
    x = jnp.asarray(np.random.default_rng(2).standard_normal(NUMEL, np.float32))
    shared, private = codes.keys()
    payload = jax.jit(code.encode)(x, shared, private)
    decoded = jax.jit(code.decode)(payload, shared)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(payload)], np.asarray(decoded)


def computed(name: str | None, platforms: str | None, changed: bool) -> list[Result]:
    """What a device computes, in a process of its own.

    Args:
      name: A key of `UPDATES`, or None for all codes.
      platforms: "cpu", or None for JAX's default device.
      changed: As of `gradients`.
    """
    jax.config.update("jax_platforms", platforms)
    jax.config.update("jax_default_matmul_precision", "highest")
    machine = rows_file.machine()
    if name is None:
        coded_by = (*(row[0] for row in codes.CODES), top_k(0.125, block=4096))
        return [Result({"code": code.name} | machine, *coded(code)) for code in coded_by]
    told = lambda replicas: {"method": name, "replicas": replicas} | machine
    moved = lambda replicas: trained(name, replicas, changed=changed)
    return [Result(told(replicas), [], moved(replicas)) for replicas in (REPLICAS, 1)]


def distance(here: np.ndarray, there: np.ndarray) -> float:
    """The norm of the difference over that of `there`."""
    there = there.astype(np.float64)
    return float(np.linalg.norm(here - there) / np.linalg.norm(there))


def compared(here: Result, cpu: Result, near: Result) -> dict:
    """The row of one result."""
    row = here.told | {"distance": distance(here.values, cpu.values)}
    if not cpu.payload:
        return row | {"last_bits": distance(near.values, cpu.values)}
    pairs = zip(here.payload, cpu.payload, strict=True)
    differing = sum(int(np.sum(a != b)) for a, b in pairs)
    return row | {"differing": differing / sum(part.size for part in cpu.payload)}


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    head = ["", "replicas", "distance", "last bits changed", "payload that differs"]
    lines = []
    for row in rows:
        name = f"`{row['code']}`" if "code" in row else row["method"]
        near, share = row.get("last_bits"), row.get("differing")
        cells = [name, row.get("replicas", ""), _power(row["distance"]), _power(near)]
        lines.append([*cells, "" if share is None else f"{share:.2%}"])
    return rows_file.markdown(head, lines)


def _power(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}" if value else "0"


def main() -> None:
    """Computes on JAX's default device and twice on the CPU, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--methods", nargs="+", choices=list(UPDATES), default=list(UPDATES))
    options = parser.parse_args()
    ways = (None, False), ("cpu", False), ("cpu", True)
    rows = []
    with concurrent.futures.ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        names = [None, *options.methods]
        sides = [[pool.submit(computed, name, *way) for way in ways] for name in names]
        for side in sides:
            for results in zip(*(run.result() for run in side), strict=True):
                rows.append(compared(*results))
                print(json.dumps(rows[-1]), flush=True)
                if options.json:
                    rows_file.write(options.json, rows)


if __name__ == "__main__":
    main()
