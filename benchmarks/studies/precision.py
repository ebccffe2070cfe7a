"""Trains with narrow parameters and states, against float32: last losses.

    python -m benchmarks.studies.precision --json FILE [--task nano] [--steps 600] [--seeds 0 1 2]

Both tasks predict the next byte of Python's standard library, with replicas simulated on one
device. `small` is a perceptron of 0.1 M parameters that reads 8 bytes, done in minutes; it computes
in the dtype of its parameters. `nano` is the GPT of configs/nano_dense.py, at its batch, rate and
schedule; it computes in float32 from narrow parameters, since XLA:CPU multiplies no float16.
Rows that are in the file already are not run again.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks import rows as rows_file
from configs import nano_dense
from train import examples
from train.data import texts
from train.data.sources import Data
from train.placement import build, devices

CONTEXT, BATCH, RATE = 8, 128, 3e-3


class Way(NamedTuple):
    """A dtype of the parameters, and what is put around the method."""

    dtype: str
    around: tuple[str, ...] = ()


WAYS = {
    "float32": Way("float32"),
    "bfloat16, no masters": Way("bfloat16"),
    "bfloat16, masters": Way("bfloat16", ("masters",)),
    "bfloat16, masters of 16 bits": Way("bfloat16", ("masters", "remainder")),
    "float16, masters, no loss scale": Way("float16", ("masters",)),
    "float16, masters, loss scale": Way("float16", ("masters", "scale")),
    "residual of 8 bits": Way("float32", ("residual",)),
    "momentum of 16 bits": Way("float32", ("momentum",)),
    "residual of 8 bits, momentum of 16": Way("float32", ("residual", "momentum")),
}


def method(name: str, rate: optax.Schedule) -> tuple[optax.GradientTransformation, str]:
    """A method, and what it calls its momentum."""
    if name == "zero_one_adam":
        return jaxcomp.zero_one_adam(rate, "replica"), "momentum"
    mean = jaxcomp.compressed_mean(jaxcomp.quantize(4, block=32), "replica")
    return optax.chain(mean, optax.adam(rate)), "mu"


def transformation(name: str, way: Way, rate: optax.Schedule) -> optax.GradientTransformation:
    """The method with what a row puts around it."""
    tx, momentum = method(name, rate)
    for part in way.around:
        if part == "masters":
            tx = jaxcomp.master_weights(tx)
        elif part == "scale":
            tx = jaxcomp.loss_scale(tx, "replica", growth_steps=200)
        elif part == "momentum":
            tx = jaxcomp.compact(tx, 16, fields=(momentum,))
        else:
            bits = 8 if part == "residual" else 16
            tx = jaxcomp.compact(tx, bits, fields=(part,))
    return tx


def first_params(seed: int, dtype: str) -> dict[str, jax.Array]:
    """Of a perceptron: f[256, 16], f[128, 256], f[256, 256] and f[256]."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (256, 16), "up": (16 * CONTEXT, 256), "out": (256, 256)}
    normal = lambda shape: rng.normal(0, shape[0] ** -0.5, shape)
    params = {name: jnp.asarray(normal(shape), dtype) for name, shape in shapes.items()}
    return params | {"bias": jnp.zeros(256, dtype)}


def loss_fn(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """f32[]: nats a byte, of i32[rows, 9]."""
    x = params["embed"][tokens[:, :-1]].reshape(tokens.shape[0], -1)
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    logits = (hidden @ params["out"]).astype(jnp.float32)
    targets = tokens[:, -1]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


class Task(NamedTuple):
    """What is trained: a model, its batches by number, and the text that it is judged by."""

    replicas: int
    rate: float
    methods: tuple[str, ...]
    params: Callable[[str], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    batch: Callable[[int], np.ndarray]
    held_out: list[np.ndarray]


def small(seed: int, steps: int) -> Task:
    """The perceptron."""
    corpus = texts.read(Data(), CONTEXT)
    held_out = functools.partial(texts.validation_batch, corpus.validation)
    return Task(
        2,
        RATE,
        ("compressed_mean", "zero_one_adam"),
        functools.partial(first_params, seed),
        loss_fn,
        lambda step: texts.batch(corpus.train, seed, step, BATCH, CONTEXT),
        [held_out(i, 8, 512, CONTEXT) for i in range(8)],
    )


def nano(seed: int, steps: int) -> Task:
    """The GPT of 0.84 M parameters, as its dense config trains it."""
    config = dataclasses.replace(nano_dense.get_config(), seed=seed, steps=steps)
    text, every = examples.read(config), slice(None)
    narrow = lambda dtype: jax.tree.map(lambda x: x.astype(dtype), build.random_params(config))
    return Task(
        config.replicas,
        config.optimizer.learning_rate,
        ("compressed_mean",),
        narrow,
        build.loss_of(config),
        lambda step: text.train(step, every),
        [text.validation(i, every) for i in range(config.eval_batches)],
    )


TASKS = {"small": small, "nano": nano}


def run(task: Task, name: str, way: Way, steps: int) -> dict:
    """Trains once: the mean validation loss, steps left out, the scale at the end."""
    rate = optax.warmup_cosine_decay_schedule(0.0, task.rate, steps // 10, steps)
    tx = transformation(name, way, rate)
    init, step = jaxcomp.simulated_train_step(task.loss_fn, tx, task.replicas, "replica")
    params = task.params(way.dtype)
    state = init(params)
    for number in range(steps):
        params, state, _ = step(params, state, jnp.asarray(task.batch(number)))
    measure = jax.jit(task.loss_fn)
    loss = statistics.mean(float(measure(params, batch)) for batch in task.held_out)
    scale = optax.tree_utils.tree_get(state, "loss_scale")
    overflows = optax.tree_utils.tree_get(state, "overflows")
    numbers = {"loss_scale": scale, "overflows": overflows}
    return {"loss": loss} | {k: float(x) for k, x in numbers.items() if x is not None}


def main() -> None:
    """Runs what is missing, row by row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--task", default="small", choices=list(TASKS))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="instead of all")
    args = parser.parse_args()
    devices.start(1)
    rows = json.loads(args.json.read_text()) if args.json.is_file() else []
    for seed in args.seeds:
        task = TASKS[args.task](seed, args.steps)
        for name, way in itertools.product(task.methods, args.ways or WAYS):
            key = {"task": args.task, "method": name, "way": way, "seed": seed, "steps": args.steps}
            if any(key.items() <= row.items() for row in rows):
                continue
            row = key | run(task, name, WAYS[way], args.steps) | rows_file.machine()
            rows.append(row)
            rows_file.write(args.json, rows)
            print(name, way, seed, f"{row['loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
