"""Builds a run from its config: model, loss, transformation, data and compiled functions."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas import protocol
from train import examples, island
from train.config import Config
from train.config import run as configs
from train.config.run import AXIS_NAME
from train.examples import Examples
from train.placement import build, counts, devices
from train.placement.base import Functions, Placement
from train.placement.resolve import resolve

# Losses per message: a program with thousands of arguments takes minutes to compile.
_MOST_GATHERED = 64


class Task(NamedTuple):
    """The functions and facts of one run; arrays are global arrays on `mesh`."""

    config: Config
    mesh: Mesh
    placement: Placement
    examples: Examples
    init: Callable[..., tuple[Any, Any]]  # (params or None for random ones) -> params, state
    step: Callable[..., tuple[Any, Any, dict]]  # params, state, batch -> params, state, metrics
    programs: tuple[jax.stages.Compiled, ...]  # of a step
    batch: Callable[..., Any]  # step, seen=None -> pytree of [batch, ...], see `Examples`
    # params, state -> natural parameters that the run ends with, and the bytes one sends for them
    deployed: Callable[[Any, Any], tuple[Any, float]]
    # params, state -> the objective's measures during the run; without state, of natural parameters
    evaluate: Callable[..., dict[str, float]]
    mean_losses: Callable[[list], list[float]]  # each step's f32[num_replicas] -> its mean
    left_out: Callable[[Any], int]  # state -> steps that single replicas have skipped
    natural: Any  # shapes and dtypes of the unsharded parameters
    places: Any  # their shardings for `init`
    like: Any  # {"params", "state"}: shapes, dtypes and shardings
    sent: dict[str, float]  # bytes of each part of a step's exchange, from the compiled program
    rounds: dict[str, int]  # how often the run sends each part; {} if every step sends all
    sent_bytes: float  # that one replica sends per step, averaged over the run


def make_task(config: Config, read: Callable[[Config], Examples] = examples.read) -> Task:
    """Builds and compiles everything that a run needs; trains nothing.

    Args:
      config: The run.
      read: Reads the text or the images: `examples.none` for a task that is not trained.

    Returns:
      The task.

    Raises:
      ValueError: If the data, the devices or the update's expression do not fit.
    """
    mesh = devices.make_mesh(config.replicas, config.fast)
    configs.microbatch(config.data.batch, mesh.size, config.accumulate)
    made, placement = read(island.with_own_order(config)), resolve(config)
    functions, everywhere = placement.functions(mesh), NamedSharding(mesh, P())
    natural, batch = build.param_shapes(config), build.batch_of(config, mesh)
    places = jax.tree.map(lambda _: everywhere, natural)
    if functions.places is not None:
        places = functions.places(natural)
    first_params = jax.jit(lambda: build.random_params(config), out_shardings=places)
    like = _shapes(config.optimizer.update, functions, build.placed(natural, places))
    step, programs = _compiled(functions.step, like["params"], like["state"], batch)
    sent = jaxcomp.report.sent_bytes_by_part(programs, mesh, AXIS_NAME)
    rounds = placement.rounds(like["state"])
    return Task(
        config=config,
        mesh=mesh,
        placement=placement,
        examples=made,
        init=lambda params=None: functions.init(first_params() if params is None else params),
        step=step,
        programs=programs,
        batch=lambda step, seen=None: _fed(batch, lambda rows: made.train(step, rows, seen)),
        deployed=functools.partial(_deployed, functions.deployed, mesh),
        evaluate=_evaluate_of(build.totals_of(config), config.eval_batches, made, functions, batch),
        mean_losses=functools.partial(_mean_losses, _row_steps(config), gather_losses(mesh)),
        left_out=functools.partial(_left_out, jax.jit(jnp.sum, out_shardings=everywhere)),
        natural=natural,
        places=places,
        like=like,
        sent=sent,
        rounds=rounds,
        sent_bytes=counts.total_bytes(sent, rounds, config.steps) / config.steps,
    )


def _shapes(update: str, functions: Functions, params: Any) -> dict[str, Any]:
    """Shapes, dtypes and shardings of parameters and state, without computing them."""
    try:
        like = jax.eval_shape(functions.init, params)  # also traces the update
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"optimizer.update={update!r} does not fit gradients: {reason}") from error
    first, state = build.placed(like, functions.shardings(params))
    return {"params": first, "state": state}


def _compiled(step, *args):
    """A step compiled ahead of time, and its programs."""
    if isinstance(step, jaxcomp.OverlappedStep):
        step = step.compile(*args)
        return step, step.programs
    step = step.lower(*args).compile()
    return step, (step,)


def _fed(like: Any, make: Callable[[slice], Any]) -> Any:
    """A batch on its devices; each process makes only the rows for its own devices."""
    made = functools.cache(lambda start, stop: jax.tree.leaves(make(slice(start, stop))))
    leaves, tree = jax.tree.flatten(like)

    def place(number, leaf):
        part = lambda index: made(*index[0].indices(leaf.shape[0])[:2])[number]
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return tree.unflatten([place(number, leaf) for number, leaf in enumerate(leaves)])


def _deployed(deployed, mesh: Mesh, params: Any, state: Any) -> tuple[Any, float]:
    if not protocol.drifts(state):
        return deployed(params, state), 0.0
    program = jax.jit(deployed).lower(params, state).compile()
    return program(params, state), jaxcomp.report.sent_bytes(program, mesh, AXIS_NAME)


def _evaluate_of(
    totals: Callable, eval_batches: int, made: Examples, functions: Functions, batch: Any
) -> Callable:
    """The one evaluation of all methods: sums over all targets, divided once."""
    totals_of = functions.eval_step(totals)

    def evaluate(params, state=None):
        params, state = (params, ()) if state is None else functions.evaluated(params, state)
        makes = (functools.partial(made.validation, n) for n in range(eval_batches))
        found = [totals_of(params, state, _fed(batch, make)) for make in makes]
        # Of batches in turn, in float64: as if all were one.
        add = lambda *values: math.fsum(float(x) for x in values)
        sums, count = jax.tree.map(add, *found)
        return {name: total / count for name, total in sums.items()}

    return evaluate


def gather_losses(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    """Makes a jitted function that gathers the losses of several steps on all processes.

    Args:
      mesh: Mesh of the run.

    Returns:
      A function of `steps` arrays f32[num_replicas], as returned by steps, that returns
      f32[num_replicas, steps] on every device, in one message.
    """

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def gather(losses):
        # Stacked first: one column of all steps is sent instead of one scalar per step. The devices
        # of a sharded replica have one loss.
        own = mesh.axis_names if len(losses[0]) == mesh.size else mesh.axis_names[:1]
        rows = NamedSharding(mesh, P(own))
        return jax.lax.with_sharding_constraint(jnp.stack(losses, axis=1), rows)

    return gather


def _row_steps(config: Config) -> int:
    """The steps whose losses are gathered together."""
    most = min(config.log_every, config.eval_every, config.checksum_every, config.checkpoint_every)
    return min(most, config.emergency_every or most, _MOST_GATHERED)


def _mean_losses(size: int, gather: Callable, losses: list[jax.Array]) -> list[float]:
    # Padded, so that one program also serves the few steps before a stop.
    filled = [*losses, *[losses[-1]] * (-len(losses) % size)]
    pieces = [gather(filled[at : at + size]) for at in range(0, len(filled), size)]
    columns = np.concatenate([np.asarray(piece, np.float64) for piece in pieces], axis=1)
    return columns[:, : len(losses)].mean(axis=0).tolist()


def _left_out(total: Callable[[Any], jax.Array], state: Any) -> int:
    return sum(int(total(skipped)) for skipped in protocol.skipped(state))


def num_parameters(task: Task) -> int:
    """Elements of all parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(task.natural))


def num_trained(task: Task) -> int:
    """Elements of the parameters that are trained; the others are never sent."""
    leaves = jax.tree.leaves_with_path(task.natural)
    return sum(math.prod(x.shape) for key, x in leaves if task.placement.trains(path_of(key)))
