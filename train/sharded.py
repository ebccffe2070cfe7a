"""Runs whose parameters live in shards: what they train with, and the shapes of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

import jaxcomp
from jaxcomp.replicas.shards import map_shards, natural
from train.config import Config, expression
from train.config.run import AXIS_NAME
from train.models.gpt import STACKED, GPTConfig
from train.processes.devices import FAST_AXIS


class Sharded(NamedTuple):
    """The functions of a run in shards."""

    init: Callable[[Any], tuple[Any, Any]]  # natural parameters -> shards, state
    step: Callable[[Any, Any, Any], tuple[Any, Any, dict]]  # as of `jaxcomp.qsdp_train_step`
    whole: Callable[[Any], Any]  # shards -> natural parameters, everywhere


def method(config: Config) -> jaxcomp.QSDP | None:
    """Makes what `config.qsdp` describes; None for a run whose replicas hold all parameters.

    Raises:
      ValueError: If it is no call of `qsdp`, or excludes another field of the config.
    """
    if config.qsdp is None and config.fast > 1:
        raise ValueError(
            f"fast={config.fast} needs parameters in shards; write --fast 1, or --qsdp "
            "'qsdp(axis_name, fast_axis=fast_axis)'."
        )
    if config.qsdp is None:
        return None
    if config.overlap:
        raise ValueError(
            f"overlap=True cannot be used with qsdp={config.qsdp!r}; set one of the two to False "
            "or None."
        )
    if not isinstance(config.model, GPTConfig):
        raise ValueError(
            f"qsdp={config.qsdp!r} needs a model whose blocks can gather for themselves: write "
            f"model=GPTConfig(...), not {config.model}."
        )
    fast_axis = FAST_AXIS if config.fast > 1 else None
    values = {"axis_name": AXIS_NAME, "fast_axis": fast_axis, "steps": config.steps}
    fsdp = expression.evaluate(config.qsdp, values)
    if not isinstance(fsdp, jaxcomp.QSDP):
        raise ValueError(
            f"qsdp={config.qsdp!r} is a {type(fsdp).__name__}; write qsdp(axis_name, quantize(8))."
        )
    if fsdp.fast_axis != fast_axis:
        raise ValueError(
            f"qsdp={config.qsdp!r} has the fast axis {fsdp.fast_axis!r}, but fast={config.fast} "
            f"makes {fast_axis!r}; write qsdp(axis_name, fast_axis=fast_axis)."
        )
    return fsdp


def rounds(config: Config, state: jaxcomp.QSDPState) -> dict[str, int]:
    """Counts how often a run will send each part; {} for one whose levels are not learned.

    Args:
      config: Of the run.
      state: Its state, or the shapes of it.
    """
    if not state.rounds:
        return {}
    due = method(config).fit_at(np.arange(config.steps))
    return {"all": config.steps, "levels": int(np.sum(due))}


def dense_passes(config: Config) -> tuple[int, str]:
    """How often parameters or gradients leave a replica without compression, and by what."""
    fsdp = method(config)
    if fsdp is None:
        return 2, "ring all-reduce"  # a scatter and a gather
    return 2 if fsdp.gather_once else 3 * config.accumulate, "sharded step"


def functions(
    config: Config,
    fsdp: jaxcomp.QSDP,
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    mesh: Mesh,
) -> Sharded:
    """Makes the functions of a run.

    Args:
      config: Of the run.
      fsdp: Its `method`.
      loss_fn: `(params, batch) -> f32[]` of a model whose blocks, `params["block_0"]` and so on
        or, stacked, `params["blocks"]`, are shards, and all else whole.
      tx: The optimizer.
      mesh: Of the run, or an abstract one, for shapes.

    Returns:
      The functions, of which `whole` is jitted.
    """

    def sharded_loss(shards, batch):
        return loss_fn(fsdp.gather(shards, but="^block"), batch)

    made = jaxcomp.qsdp_train_step(sharded_loss, tx, mesh, fsdp, accumulate=config.accumulate)

    def init(params):
        shards = fsdp.shard(params, mesh, _stacked)
        return shards, made.init(shards)

    return Sharded(init, made.step, jax.jit(lambda shards: fsdp.unshard(shards, mesh)))


def shapes(params: Any, num_shards: int) -> Any:
    """Shapes and dtypes of parameters in so many shards, from those of whole ones."""
    mesh = AbstractMesh((num_shards,), (AXIS_NAME,), (AxisType.Auto,))
    cut = lambda params: jaxcomp.qsdp(AXIS_NAME).shard(params, mesh, _stacked)
    return jax.eval_shape(cut, params)


@jax.jit
def joined(shards: Any) -> Any:
    """Whole parameters, of shards that each device holds all of."""
    return map_shards(lambda shard: natural(shard.data, shard.shape), shards)


_stacked = jaxcomp.by_path((STACKED, True), (".*", False))
