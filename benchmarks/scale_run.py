"""One run of `benchmarks.scale`: replicas that one device simulates, and its row."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxcomp
from benchmarks import rows as rows_file
from jaxcomp.replicas import protocol
from train import examples
from train.config import Config
from train.config.run import AXIS_NAME, update
from train.examples import Examples
from train.placement import build
from train.task import Task, make_task, num_parameters

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
        # Per direction of an all-reduce, as in `benchmarks.convergence`.
        "bits_per_parameter": task.sent_bytes * 8 / parameters / (2 * (size - 1) / size),
    }
