"""Times codes and updates of this checkout against those of another, on CPUs, alternating.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.studies.before_after /tmp/before --json FILE [--turns 40]

A process of each checkout answers in turn, before and after, so that a busy machine slows both
alike. `codec` is the encoding and decoding of one array, `update` four steps of four replicas on
four CPU devices, of a loss whose gradient costs nothing. `ratio` compares the least seconds of all
turns, `ratio_median` the medians, `ratio_cpu` the least CPU seconds: after over before. `again` is
the same of two processes of the other checkout: what the machine does to equal programs.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.compressors.base import Key
from jaxcomp.compressors.packing import fold
from train.config import Config, Optimizer
from train.config.run import AXIS_NAME, update
from train.placement import devices

BOUND = 1.1
NUMEL = 2**22  # float32 values of an array, and parameters of a step
REPLICAS = 4
STEPS = 4  # of one call: 0/1 Adam sends in one of them
CODES = {
    "4 bits": lambda: jaxcomp.quantize(4),
    "sign": jaxcomp.sign,
    "random 1/10": lambda: jaxcomp.random_k(0.1),
    "CocktailSGD": jaxcomp.cocktail,
}
UPDATES = {
    # a name of `worker.UPDATES`
    "dense": "dense float32",
    "4 bits": "4 bits",
    "sign": "1 bit",
    "CocktailSGD": "CocktailSGD",
    "0/1 Adam": "0/1 Adam, every 4th",
}


def codec_call(name: str) -> Callable[[], object]:
    """Encodes and decodes an array, one after the other."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal(NUMEL, np.float32))
    shared = Key(jnp.int32(3), jnp.uint32(7))
    code, private = CODES[name](), fold(shared, 1)
    encode, decode = jax.jit(code.encode), jax.jit(code.decode)
    payload = encode(x, shared, private)
    halves = lambda: encode(x, shared, private), lambda: decode(payload, shared)
    return lambda: [jax.block_until_ready(half()) for half in halves]


def update_call(written: str) -> Callable[[], object]:
    """Four steps of all replicas with an `optimizer.update`; the gradient is the parameters."""
    optimizer = Optimizer(update=written, learning_rate=1e-4, schedule="constant")
    tx = update(Config(name="before_after", steps=10**4, replicas=REPLICAS, optimizer=optimizer))
    mesh = devices.make_mesh(REPLICAS)
    loss_fn = lambda params, batch: (optax.tree.norm(params, squared=True) + jnp.sum(batch)) / 2
    made = jaxcomp.train_step(loss_fn, tx, mesh, AXIS_NAME)
    half = np.random.default_rng(0).standard_normal((NUMEL // 2048, 1024), np.float32)
    params = jax.device_put({"a": half, "b": half}, NamedSharding(mesh, P()))
    held, batch = [params, made.init(params)], jnp.zeros(REPLICAS)

    def call():
        for _ in range(STEPS):
            held[:] = made.step(*held, batch)[:2]
        jax.block_until_ready(held)

    return call


def answer(kind: str, name: str) -> None:
    """Times a call as often as a line comes in; a line out has its wall and its CPU seconds."""
    devices.start(REPLICAS)
    call = codec_call(name) if kind == "codec" else update_call(name)
    for _ in range(3):
        call()
    print("ready", flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)


def started(checkout: pathlib.Path, *arguments: str) -> subprocess.Popen:
    """A process that answers with a checkout's code, when it is ready."""
    # -P: this file's folder is not on the path, the checkout is.
    command = [sys.executable, "-P", __file__, str(checkout), "--answer", *arguments]
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
    line = process.stdout.readline()
    if line != "ready\n":
        raise RuntimeError(f"{' '.join(command)} ended with {process.wait()}; see above")
    return process


def asked(process: subprocess.Popen) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    process.stdin.write("\n")
    process.stdin.flush()
    wall, cpu = process.stdout.readline().split()
    return float(wall), float(cpu)


def row(kind: str, name: str, turns: list[list[tuple[float, float]]]) -> dict:
    """The row of turns, of each the times before, after, and before once more."""
    before, after, again = zip(*turns, strict=True)
    least = lambda which, times: min(time[which] for time in times)
    median = lambda times: statistics.median(wall for wall, _ in times)
    return {
        "kind": kind,
        "code" if kind == "codec" else "method": name,
        "before_seconds": least(0, before),
        "after_seconds": least(0, after),
        "ratio": least(0, after) / least(0, before),
        "ratio_median": median(after) / median(before),
        "ratio_cpu": least(1, after) / least(1, before),
        "again": least(0, again) / least(0, before),
        "bound": BOUND,
        "turns": len(turns),
    }


def measured(other: pathlib.Path, kind: str, name: str, turns: int) -> dict:
    """Starts a process of each checkout, and asks them in turn."""
    from benchmarks import worker  # of this checkout: the other's may be older

    this = pathlib.Path(__file__).parents[2]
    call = worker.UPDATES[UPDATES[name]] if kind == "update" else name
    processes = []
    try:
        for checkout in (other, this, other):
            processes.append(started(checkout.resolve(), kind, call))
        return row(kind, name, [[asked(one) for one in processes] for _ in range(turns)])
    finally:
        for process in processes:
            process.stdin.close()
            process.wait()


def main() -> None:
    """Measures one call after the other, and saves after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=pathlib.Path, help="the checkout to compare with")
    parser.add_argument("--kinds", nargs="+", default=["codec", "update"])
    parser.add_argument("--names", nargs="+", help="by default all of a kind")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--answer", nargs=2, metavar=("KIND", "NAME"), help="used inside")
    options = parser.parse_args()
    if options.answer:
        answer(*options.answer)
        return

    from benchmarks import rows as rows_file

    rows = []
    for kind in options.kinds:
        for name in options.names or (CODES if kind == "codec" else UPDATES):
            new = measured(options.other, kind, name, options.turns)
            rows.append(new | rows_file.machine() | {"numel": NUMEL})
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                rows_file.write(options.json, rows)


if __name__ == "__main__":
    main()
