"""What one run trains, made from its config: model, loss, transformation, data and functions."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.shards import is_shard
from train import advice, data, devices, plan, sharded
from train import config as configs
from train.config import AXIS_NAME, Config
from train.models.gpt import GPT
from train.objectives import OBJECTIVES


class Task(NamedTuple):
    """The functions and facts of one run; arrays are global ones on `mesh`."""

    config: Config
    mesh: Mesh
    corpus: data.Corpus
    init: Callable[..., tuple[Any, Any]]  # (params or random ones) -> params, state
    step: Callable[..., tuple[Any, Any, dict]]  # params, state, batch -> params, state, metrics
    programs: tuple[jax.stages.Compiled, ...]  # that a step runs
    batch: Callable[[int], jax.Array]  # step -> i32[batch, ...], see `objectives`
    evaluate: Callable[[Any], jax.Array]  # consensus params -> f32[], nats per token
    mean_losses: Callable[[list], list[float]]  # each step's f32[num_replicas] -> its mean
    left_out: Callable[[Any], int]  # state -> steps that single replicas have left out
    like: Any  # {"params", "state"}: shapes, dtypes and shardings
    sent: dict[str, float]  # bytes of each part of a step's exchange, from the compiled program
    rounds: dict[str, int]  # how often the run sends each part; {} for all in every step
    sent_bytes: float  # that one replica sends in a step, in the mean over the run


def make_task(config: Config) -> Task:
    """Builds and compiles everything that a run needs; trains nothing.

    Raises:
      ValueError: If the text, the devices or the expression of the update do not fit.
    """
    mesh = devices.make_mesh(config.replicas)
    configs.microbatch(config, mesh.size)
    corpus = data.read(config.data, config.model.context)
    objective = OBJECTIVES[config.objective]
    model = GPT(config.model, objective.causal)
    loss_fn = _loss(config, model)
    everywhere = NamedSharding(mesh, P())
    tokens = jax.ShapeDtypeStruct((1, config.model.context), "int32")

    @functools.partial(jax.jit, out_shardings=everywhere)
    def init_params():
        return model.init(jax.random.key(config.seed), np.zeros(tokens.shape, "int32"))["params"]

    functions = _functions(config, mesh)

    def init(params=None):
        return functions.init(init_params() if params is None else params)

    like = _shapes(config, functions.init, jax.eval_shape(init_params), mesh)
    rows = NamedSharding(mesh, P(AXIS_NAME))
    shape = (config.data.batch, *objective.shape(config.model.context))
    abstract_batch = jax.ShapeDtypeStruct(shape, "int32", sharding=rows)
    step, programs = _compiled(functions.step, like["params"], like["state"], abstract_batch)

    def batch(step):
        # Each device's rows are made by the process that feeds it, and by no other.
        make = functools.partial(data.batch, corpus.train, config.seed, step, *_sizes(config))
        return _placed(config, rows, make, [config.seed, step])

    evaluate_batch = jax.jit(loss_fn)

    def evaluate(params):
        params = functions.whole(params)
        total = sum(evaluate_batch(params, batch) for batch in _validation(config, corpus, rows))
        return total / config.eval_batches

    gather = gather_losses(mesh)

    def mean_losses(losses):
        # Filled up, so that one program serves the few steps before a stop too.
        filled = [*losses, *[losses[-1]] * (_most_between_rows(config) - len(losses))]
        columns = np.asarray(gather(filled), np.float64)[:, : len(losses)]
        return columns.mean(axis=0).tolist()

    total = jax.jit(jnp.sum, out_shardings=everywhere)

    def left_out(state):
        skipped = optax.tree_utils.tree_get(state, "skipped")
        return 0 if skipped is None else int(total(skipped))

    sent = jaxcomp.report.sent_bytes_by_part(programs, mesh, AXIS_NAME)
    rounds = plan.rounds(configs.transformation(config), config.steps)
    mean = plan.total_bytes(sent, rounds, config.steps) / config.steps
    return Task(
        config=config,
        mesh=mesh,
        corpus=corpus,
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
        rows = NamedSharding(mesh, P(AXIS_NAME))
        return jax.lax.with_sharding_constraint(jnp.stack(losses, axis=1), rows)

    return gather


def _most_between_rows(config: Config) -> int:
    return min(config.log_every, config.eval_every, config.checksum_every, config.checkpoint_every)


def _sizes(config: Config) -> tuple[int, int]:
    return config.data.batch, config.model.context


def _validation(config, corpus, rows) -> Iterator[jax.Array]:
    for number in range(config.eval_batches):
        make = functools.partial(
            data.validation_batch, corpus.validation, number, config.eval_batches, *_sizes(config)
        )
        yield _placed(config, rows, make, [number])


def _placed(config: Config, sharding: NamedSharding, make: Callable, key: list[int]) -> jax.Array:
    """A batch on its devices, whose rows are what the objective makes of those of the text."""
    objective, size = OBJECTIVES[config.objective], config.data.batch

    def part(index):
        numbers = range(*index[0].indices(size))
        return objective.prepare(make(rows=index[0]), [[*key, number] for number in numbers])

    shape = (size, *objective.shape(config.model.context))
    return jax.make_array_from_callback(shape, sharding, part)


def _loss(config: Config, model: GPT) -> Callable[[Any, Any], jax.Array]:
    objective = OBJECTIVES[config.objective]

    def loss_fn(params, batch):
        return objective.loss(lambda tokens: model.apply({"params": params}, tokens), batch)

    return loss_fn


def _functions(config: Config, mesh: Mesh) -> sharded.Sharded:
    """How the run begins and steps, and what its parameters are in natural shapes."""
    tx, causal = configs.transformation(config), OBJECTIVES[config.objective].causal
    fsdp = sharded.method(config)
    if fsdp is not None:
        loss_fn = _loss(config, GPT(config.model, causal, fsdp.layer))
        return sharded.functions(config, fsdp, loss_fn, tx, mesh)
    make = jaxcomp.overlapped_train_step if config.overlap else jaxcomp.train_step
    loss_fn = _loss(config, GPT(config.model, causal))
    made = make(loss_fn, tx, mesh, AXIS_NAME, accumulate=config.accumulate)
    init = lambda params: (params, made.init(params))
    return sharded.Sharded(init, made.step, lambda params: params)


def _shapes(config: Config, init, params, mesh: Mesh) -> dict[str, Any]:
    """Shapes, dtypes and shardings of parameters and state, without computing them."""
    placed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    params = jax.tree.map(lambda x: placed(x, NamedSharding(mesh, P())), params)
    like = jax.eval_shape(init, params)
    if config.qsdp is not None:
        shardings = jax.jit(init).lower(params).compile().output_shardings
        return dict(zip(("params", "state"), jax.tree.map(placed, like, shardings), strict=True))
    tx = jaxcomp.per_replica(configs.transformation(config), AXIS_NAME)
    specs = jaxcomp.state_specs(tx, params, mesh, AXIS_NAME)
    state = jax.tree.map(lambda x, spec: placed(x, NamedSharding(mesh, spec)), like[1], specs)
    return {"params": params, "state": state}


def shapes_of(task: Task, num_replicas: int) -> dict[str, Any]:
    """Shapes and dtypes of the run's parameters and state, as so many replicas would hold them."""
    mesh = AbstractMesh((num_replicas,), (AXIS_NAME,), axis_types=(AxisType.Auto,))
    natural = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.tree.leaves(x)[0].dtype),
        task.like["params"],
        is_leaf=is_shard,
    )
    params, state = jax.eval_shape(_functions(task.config, mesh).init, natural)
    return {"params": params, "state": state}


def num_parameters(task: Task) -> int:
    """Elements of all parameters."""
    leaves = jax.tree.leaves(task.like["params"], is_leaf=is_shard)
    return sum(math.prod(leaf.shape) for leaf in leaves)


def report(task: Task) -> str:
    """What one step of the run sends, as text: from the compiled program, nothing is run."""
    numel, num_replicas = num_parameters(task), task.mesh.size
    # Shards are gathered twice and scattered once; an all-reduce is one of each.
    passes, plain = (2, "ring all-reduce") if task.config.qsdp is None else (3, "sharded step")
    dense = passes * 4 * numel * (num_replicas - 1) / num_replicas
    exact = jaxcomp.report.exact_leaves(task.like["params"], task.like["state"])
    lines = [
        jaxcomp.report.table(task.programs, task.mesh),
        f"{numel:,} parameters on {num_replicas} replicas; one replica sends "
        f"{task.sent_bytes:,.0f} bytes a step{' in the mean' if task.rounds else ''},",
        f"{dense / task.sent_bytes:.1f}x fewer than a float32 {plain}, "
        f"{dense / 2 / task.sent_bytes:.1f}x fewer than a float16 one."
        if task.sent_bytes
        else "nothing to send with one replica.",
        *_rounds(task),
        *_memory(task),
        *([] if exact is None else [f"travel exact: {', '.join(exact) or 'none'}"]),
        *advice.notes(task.config.optimizer.update),
    ]
    return "\n".join(lines)


def _memory(task: Task) -> list[str]:
    """What a device holds, as XLA plans it."""
    plans = [program.memory_analysis() for program in task.programs]
    if None in plans:
        return []
    held = max(plan.argument_size_in_bytes for plan in plans)
    more = max(plan.temp_size_in_bytes for plan in plans)
    return [
        f"a device holds {held / 2**20:,.0f} MiB of parameters, state and batch, and "
        f"{more / 2**20:,.0f} MiB more during a step, by XLA's plan for this machine."
    ]


def _rounds(task: Task) -> list[str]:
    """What a run whose steps differ sends, part by part."""
    steps = task.config.steps
    parts = [
        f"{part} {count:,} times ({task.sent.get(part, 0.0):,.0f} bytes)"
        for part, count in task.rounds.items()
        if part != "all"
    ]
    if not parts:
        return []
    return [
        f"of {steps:,} steps {task.rounds['all']:,} send anything: {', '.join(parts)};",
        f"{steps * task.sent_bytes:,.0f} bytes over the run.",
    ]
