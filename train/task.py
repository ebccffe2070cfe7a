"""What one run trains, made from its config: model, loss, transformation, data and functions."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from train import advice, data, devices, losses
from train import config as configs
from train.config import AXIS_NAME, Config
from train.models.gpt import GPT


class Task(NamedTuple):
    """The functions and facts of one run; arrays are global ones on `mesh`."""

    config: Config
    mesh: Mesh
    corpus: data.Corpus
    init: Callable[[], tuple[Any, Any]]  # () -> params, state
    step: jax.stages.Compiled  # params, state, batch -> params, state, metrics
    batch: Callable[[int], jax.Array]  # step -> i32[batch, context + 1]
    evaluate: Callable[[Any], jax.Array]  # consensus params -> f32[], nats per token
    like: Any  # {"params", "state"}: shapes, dtypes and shardings
    sent_bytes: float  # that one replica sends in a step, read from the compiled program


def make_task(config: Config) -> Task:
    """Builds and compiles everything that a run needs; trains nothing.

    Raises:
      ValueError: If the text, the devices or the expression of the update do not fit.
    """
    mesh = devices.make_mesh(config.replicas)
    configs.microbatch(config, mesh.size)
    corpus = data.read(config.data, config.model.context)
    model = GPT(config.model)
    tx = configs.transformation(config)

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return losses.cross_entropy(logits, tokens[:, 1:])

    everywhere = NamedSharding(mesh, P())
    tokens = jax.ShapeDtypeStruct((1, config.model.context), "int32")

    @functools.partial(jax.jit, out_shardings=everywhere)
    def init_params():
        return model.init(jax.random.key(config.seed), np.zeros(tokens.shape, "int32"))["params"]

    functions = jaxcomp.train_step(loss_fn, tx, mesh, AXIS_NAME, accumulate=config.accumulate)

    def init():
        params = init_params()
        return params, functions.init(params)

    like = _shapes(init, mesh, tx)
    rows = NamedSharding(mesh, P(AXIS_NAME))
    shape = (config.data.batch, config.model.context + 1)
    abstract_batch = jax.ShapeDtypeStruct(shape, "int32", sharding=rows)
    step = functions.step.lower(like["params"], like["state"], abstract_batch).compile()

    def batch(step):
        # Each device's rows are made by the process that feeds it, and by no other.
        make = functools.partial(data.batch, corpus.train, config.seed, step, *_sizes(config))
        return jax.make_array_from_callback(shape, rows, lambda index: make(rows=index[0]))

    evaluate_batch = jax.jit(loss_fn)

    def evaluate(params):
        total = sum(evaluate_batch(params, tokens) for tokens in _validation(config, corpus, rows))
        return total / config.eval_batches

    sent = jaxcomp.report.sent_bytes(step, mesh, AXIS_NAME)
    return Task(config, mesh, corpus, init, step, batch, evaluate, like, sent)


def _sizes(config: Config) -> tuple[int, int]:
    return config.data.batch, config.model.context


def _validation(config, corpus, rows) -> Iterator[jax.Array]:
    shape = (config.data.batch, config.model.context + 1)
    for number in range(config.eval_batches):
        make = functools.partial(
            data.validation_batch, corpus.validation, number, config.eval_batches, *_sizes(config)
        )
        callback = lambda index, make=make: make(rows=index[0])
        yield jax.make_array_from_callback(shape, rows, callback)


def _shapes(init, mesh, tx) -> dict[str, Any]:
    """Shapes, dtypes and shardings of parameters and state, without computing them."""
    params, state = jax.eval_shape(init)
    tx = jaxcomp.per_replica(tx, AXIS_NAME)
    specs = jaxcomp.state_specs(tx, params, mesh, AXIS_NAME)

    def placed(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    params = jax.tree.map(lambda x: placed(x, P()), params)
    return {"params": params, "state": jax.tree.map(placed, state, specs)}


def state_shapes(task: Task, num_replicas: int) -> Any:
    """Shapes and dtypes of the run's state, as another number of replicas would hold it."""
    mesh = AbstractMesh((num_replicas,), (AXIS_NAME,), axis_types=(AxisType.Auto,))
    tx = configs.transformation(task.config)
    init = jaxcomp.train_step(lambda params, batch: 0.0, tx, mesh, AXIS_NAME).init
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), task.like["params"])
    return jax.eval_shape(init, shapes)


def num_parameters(task: Task) -> int:
    """Elements of all parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(task.like["params"]))


def report(task: Task) -> str:
    """What one step of the run sends, as text: from the compiled program, nothing is run."""
    numel, num_replicas = num_parameters(task), task.mesh.size
    dense = 2 * 4 * numel * (num_replicas - 1) / num_replicas
    exact = jaxcomp.report.exact_leaves(task.like["params"], task.like["state"])
    lines = [
        jaxcomp.report.table(task.step, task.mesh),
        f"{numel:,} parameters on {num_replicas} replicas; one replica sends "
        f"{task.sent_bytes:,.0f} bytes a step,",
        f"{dense / task.sent_bytes:.1f}x fewer than a float32 ring all-reduce, "
        f"{dense / 2 / task.sent_bytes:.1f}x fewer than a float16 one."
        if task.sent_bytes
        else "nothing to send with one replica.",
        f"travel exact: {'not known: no error feedback' if exact is None else ', '.join(exact)}",
        *advice.notes(task.config.optimizer.update),
    ]
    return "\n".join(lines)
