"""What one run trains, made from its config: model, loss, transformation, data and functions."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas.shards import is_shard
from jaxcomp.replicas.state import fields
from train import sharded
from train.config import Config
from train.config import run as configs
from train.config.run import AXIS_NAME
from train.data import examples
from train.data.examples import Examples
from train.models.objectives import OBJECTIVES
from train.plan import counts
from train.processes import devices

# Losses in one message: a program of thousands of arguments takes minutes to compile.
_MOST_GATHERED = 64


class Task(NamedTuple):
    """The functions and facts of one run; arrays are global ones on `mesh`."""

    config: Config
    mesh: Mesh
    examples: Examples
    init: Callable[..., tuple[Any, Any]]  # (params or random ones) -> params, state
    step: Callable[..., tuple[Any, Any, dict]]  # params, state, batch -> params, state, metrics
    programs: tuple[jax.stages.Compiled, ...]  # that a step runs
    batch: Callable[[int], Any]  # step -> pytree of [batch, ...], see `objectives`
    evaluate: Callable[[Any], dict[str, jax.Array]]  # consensus params -> the objective's measures
    mean_losses: Callable[[list], list[float]]  # each step's f32[num_replicas] -> its mean
    left_out: Callable[[Any], int]  # state -> steps that single replicas have left out
    like: Any  # {"params", "state"}: shapes, dtypes and shardings
    sent: dict[str, float]  # bytes of each part of a step's exchange, from the compiled program
    rounds: dict[str, int]  # how often the run sends each part; {} for all in every step
    sent_bytes: float  # that one replica sends in a step, in the mean over the run


def make_task(config: Config, read: Callable[[Config], Examples] = examples.read) -> Task:
    """Builds and compiles everything that a run needs; trains nothing.

    Args:
      config: The run.
      read: What reads the text or the images: `examples.none` for a task that is not trained.

    Returns:
      The task.

    Raises:
      ValueError: If the data, the devices or the expression of the update do not fit.
    """
    mesh = devices.make_mesh(config.replicas, config.fast)
    configs.microbatch(config, mesh.size)
    made = read(config)
    measure = measure_of(config, model_of(config))
    everywhere = NamedSharding(mesh, P())
    init_params = jax.jit(functools.partial(random_params, config), out_shardings=everywhere)
    functions = _functions(config, mesh)

    def init(params=None):
        return functions.init(init_params() if params is None else params)

    like = _shapes(config, functions.init, jax.eval_shape(init_params), mesh)
    abstract_batch = batch_of(config, mesh)
    step, programs = _compiled(functions.step, like["params"], like["state"], abstract_batch)

    def batch(step):
        return _placed(abstract_batch, functools.partial(made.train, step))

    evaluate_batch = jax.jit(measure)

    def evaluate(params):
        params = functions.whole(params)
        makes = (functools.partial(made.validation, n) for n in range(config.eval_batches))
        found = [evaluate_batch(params, _placed(abstract_batch, make)) for make in makes]
        return jax.tree.map(lambda *values: sum(values) / config.eval_batches, *found)

    gather = gather_losses(mesh)

    def mean_losses(losses):
        # Filled up, so that one program serves the few steps before a stop too.
        size = min(_most_between_rows(config), _MOST_GATHERED)
        filled = [*losses, *[losses[-1]] * (-len(losses) % size)]
        pieces = [gather(filled[at : at + size]) for at in range(0, len(filled), size)]
        columns = np.concatenate([np.asarray(piece, np.float64) for piece in pieces], axis=1)
        return columns[:, : len(losses)].mean(axis=0).tolist()

    total = jax.jit(jnp.sum, out_shardings=everywhere)

    def left_out(state):
        return sum(int(total(skipped)) for skipped in fields(state, "skipped"))

    sent = jaxcomp.report.sent_bytes_by_part(programs, mesh, AXIS_NAME)
    if config.qsdp is None:
        rounds = counts.rounds(configs.update(config), config.steps)
    else:
        rounds = sharded.rounds(config, like["state"])
    mean = counts.total_bytes(sent, rounds, config.steps) / config.steps
    return Task(
        config=config,
        mesh=mesh,
        examples=made,
        init=init,
        step=step,
        programs=programs,
        batch=batch,
        evaluate=evaluate,
        mean_losses=mean_losses,
        left_out=left_out,
        like=like,
        sent=sent,
        rounds=rounds,
        sent_bytes=mean,
    )


def _compiled(step, *args):
    """A step compiled ahead of time, and the programs that it consists of."""
    if isinstance(step, jaxcomp.OverlappedStep):
        step = step.compile(*args)
        return step, step.programs
    step = step.lower(*args).compile()
    return step, (step,)


def gather_losses(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    """Makes the jitted function that brings losses of several steps to all processes.

    Args:
      mesh: Of the run.

    Returns:
      A function of `steps` arrays f32[num_replicas], as a step returns them, that gives
      f32[num_replicas, steps] on every device, in one message.
    """

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def gather(losses):
        # Stacked where they are: one column of all steps travels instead of one number a step.
        rows = NamedSharding(mesh, P(mesh.axis_names))
        return jax.lax.with_sharding_constraint(jnp.stack(losses, axis=1), rows)

    return gather


def _most_between_rows(config: Config) -> int:
    return min(config.log_every, config.eval_every, config.checksum_every, config.checkpoint_every)


def _placed(like: Any, make: Callable[[slice], Any]) -> Any:
    """A batch on its devices; each row is made by the process that feeds it, and by no other."""
    made = functools.cache(lambda start, stop: jax.tree.leaves(make(slice(start, stop))))
    leaves, tree = jax.tree.flatten(like)

    def place(number, leaf):
        part = lambda index: made(*index[0].indices(leaf.shape[0])[:2])[number]
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return tree.unflatten([place(number, leaf) for number, leaf in enumerate(leaves)])


def batch_of(config: Config, mesh: Mesh) -> Any:
    """Shapes, dtypes and shardings of a batch of all replicas."""
    rows, size = NamedSharding(mesh, P(mesh.axis_names)), config.data.batch
    return jax.tree.map(
        lambda row: jax.ShapeDtypeStruct((size, *row.shape), row.dtype, sharding=rows),
        OBJECTIVES[config.objective].row(config.model),
    )


def random_params(config: Config) -> Any:
    """The parameters that a run begins with, in natural shapes."""
    inputs = config.model.inputs
    key, zeros = jax.random.key(config.seed), np.zeros(inputs.shape, inputs.dtype)
    return model_of(config).init(key, zeros)["params"]


def model_of(config: Config) -> nn.Module:
    """The model of a run."""
    return OBJECTIVES[config.objective].models[type(config.model)](config.model)


def measure_of(config: Config, model: nn.Module) -> Callable[[Any, Any], dict[str, jax.Array]]:
    """What a run's objective measures of parameters and a batch; "loss" is minimized."""
    objective = OBJECTIVES[config.objective]

    def measure(params, batch):
        return objective.measure(lambda inputs: model.apply({"params": params}, inputs), batch)

    return measure


def _functions(config: Config, mesh: Mesh) -> sharded.Sharded:
    """How the run begins and steps, and what its parameters are in natural shapes."""
    tx, model, fsdp = configs.transformation(config), model_of(config), sharded.method(config)
    measure = measure_of(config, model if fsdp is None else model.clone(layer=fsdp.layer))
    loss_fn = lambda params, batch: measure(params, batch)["loss"]
    if fsdp is not None:
        return sharded.functions(config, fsdp, loss_fn, tx, mesh)
    make = jaxcomp.overlapped_train_step if config.overlap else jaxcomp.train_step
    made = make(loss_fn, tx, mesh, AXIS_NAME, accumulate=config.accumulate)
    init = lambda params: (params, made.init(params))
    return sharded.Sharded(init, made.step, lambda params: params)


def _shapes(config: Config, init, params, mesh: Mesh) -> dict[str, Any]:
    """Shapes, dtypes and shardings of parameters and state, without computing them."""
    placed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    params = jax.tree.map(lambda x: placed(x, NamedSharding(mesh, P())), params)
    try:
        like = jax.eval_shape(init, params)  # traces the update, too
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"optimizer.update={config.optimizer.update!r} does not fit gradients: {reason}"
        ) from error
    if config.qsdp is not None:
        shardings = jax.jit(init).lower(params).compile().output_shardings
        return dict(zip(("params", "state"), jax.tree.map(placed, like, shardings), strict=True))
    tx = jaxcomp.per_replica(configs.transformation(config), AXIS_NAME)
    specs = jaxcomp.state_specs(tx, params, mesh, AXIS_NAME)
    state = jax.tree.map(lambda x, spec: placed(x, NamedSharding(mesh, spec)), like[1], specs)
    return {"params": params, "state": state}


def shapes_of(task: Task, num_replicas: int) -> dict[str, Any]:
    """Shapes and dtypes of the run's parameters and state, as so many replicas would hold them."""
    names = task.mesh.axis_names
    mesh = AbstractMesh((num_replicas, 1)[: len(names)], names, (AxisType.Auto,) * len(names))
    params, state = jax.eval_shape(_functions(task.config, mesh).init, natural(task))
    return {"params": params, "state": state}


def natural(task: Task) -> Any:
    """Shapes and dtypes of the run's parameters where they are in no shards."""
    like = lambda x: jax.ShapeDtypeStruct(_shape(x), jax.tree.leaves(x)[0].dtype)
    return jax.tree.map(like, task.like["params"], is_leaf=is_shard)


def num_parameters(task: Task) -> int:
    """Elements of all parameters."""
    leaves = jax.tree.leaves(task.like["params"], is_leaf=is_shard)
    return sum(math.prod(_shape(leaf)) for leaf in leaves)


def _shape(leaf: Any) -> tuple[int, ...]:
    return leaf.full_shape if is_shard(leaf) else leaf.shape
