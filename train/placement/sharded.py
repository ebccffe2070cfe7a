"""Runs with sharded parameters, gathered layer by layer."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh

import jaxcomp
from jaxcomp.replicas.shards import map_shards, natural
from jaxcomp.sharded import qsdp
from train.config import Config, expression
from train.config.run import AXIS_NAME, update
from train.models.decoder import STACKED, DecoderConfig
from train.placement import build
from train.placement.base import Functions, Placement
from train.placement.devices import fast_axis_of


def resolve(config: Config) -> Placement:
    """Evaluates `qsdp` and `optimizer.update`.

    Raises:
      ValueError: As `qsdp_of`, or if the update is not a transformation.
    """
    fsdp, tx = qsdp_of(config), update(config)

    def rounds(state: jaxcomp.QSDPState) -> dict[str, int]:
        if not state.rounds:  # no levels are learned
            return {}
        return {"all": config.steps, "levels": int(np.sum(fsdp.fit_at(np.arange(config.steps))))}

    return Placement(
        tx=tx,  # an optimizer of shards sees entries, not layers
        functions=functools.partial(_functions, config, fsdp, tx),
        rounds=rounds,
        replica_spread=None,
        row_axes=fsdp.axes,
        dense=(2 if fsdp.gather_once else 3 * config.accumulate, "sharded step"),
    )


def qsdp_of(config: Config) -> jaxcomp.QSDP:
    """Evaluates `config.qsdp`.

    Raises:
      ValueError: If it is not a call of `qsdp`, or conflicts with another field of the config.
    """
    if config.overlap:
        raise ValueError(
            f"overlap=True cannot be used with qsdp={config.qsdp!r}; set one of the two to False "
            "or None."
        )
    if config.trainable is not None:
        raise ValueError(
            f"trainable={config.trainable!r} excludes qsdp={config.qsdp!r}, which sends all "
            "gradients; write --qsdp None."
        )
    if not isinstance(config.model, DecoderConfig):
        raise ValueError(
            f"qsdp={config.qsdp!r} needs a model whose blocks can gather their weights: write "
            f"model=DecoderConfig(...), not {config.model}."
        )
    return _evaluated(config.qsdp, config.fast, config.steps)


def _evaluated(text: str, fast: int, steps: int) -> jaxcomp.QSDP:
    fast_axis = fast_axis_of(fast)
    fsdp = expression.evaluate(
        text, {"axis_name": AXIS_NAME, "fast_axis": fast_axis, "steps": steps}
    )
    if not isinstance(fsdp, jaxcomp.QSDP):
        raise ValueError(
            f"qsdp={text!r} is a {type(fsdp).__name__}; write qsdp(axis_name, quantize(8))."
        )
    if fsdp.fast_axis != fast_axis:
        raise ValueError(
            f"qsdp={text!r} has the fast axis {fsdp.fast_axis!r}, but fast={fast} makes "
            f"{fast_axis!r}; write qsdp(axis_name, fast_axis=fast_axis)."
        )
    return fsdp


def saved(config: dict[str, Any], params: Any, num_shards: int) -> Any:
    """Shapes, dtypes and codes of a checkpoint's shards.

    Args:
      config: The recorded config of its run.
      params: Shapes and dtypes of whole parameters.
      num_shards: In the checkpoint.

    Raises:
      ValueError: If the config's `qsdp` is not a call of `qsdp`.
    """
    if num_shards < 1:
        raise ValueError(f"a checkpoint of {num_shards} shards has no parameters.")
    fsdp = _evaluated(config["qsdp"], config.get("fast", 1), config["steps"])
    fsdp = dataclasses.replace(fsdp, fast_axis=None)  # shards of two axes lie as those of one
    mesh = AbstractMesh((num_shards,), (AXIS_NAME,), (AxisType.Auto,))
    return jax.eval_shape(lambda params: fsdp.shard(params, mesh, _stacked), params)


@jax.jit
def whole(shards: Any, levels: Any) -> Any:
    """Whole parameters to deploy, from shards that every device holds; see `QSDP.deployed`."""
    one = lambda shard: natural(shard.data, shard.shape)
    return map_shards(one, qsdp.decoded_shards(shards, levels))


def _functions(
    config: Config, fsdp: jaxcomp.QSDP, tx: optax.GradientTransformation, mesh: Mesh
) -> Functions:
    layers = functools.partial(fsdp.layers, dtype=config.model.dtype)
    loss_fn = build.loss_of(config, layers=layers)

    def sharded_loss(shards, batch):
        # Blocks, `params["block_0"]` and so on or, stacked, `params["blocks"]`, gather themselves.
        return loss_fn(fsdp.gather(shards, but="^block"), batch)

    made = jaxcomp.qsdp_train_step(sharded_loss, tx, mesh, fsdp, accumulate=config.accumulate)

    def init(params):
        shards = fsdp.shard(params, mesh, _stacked)
        return shards, made.init(shards)

    deployed = jax.jit(lambda shards, state: fsdp.deployed(shards, state, mesh))
    return Functions(
        init=init,
        step=made.step,
        evaluated=lambda shards, state: (deployed(shards, state), ()),
        deployed=deployed,
        eval_step=lambda measure: jaxcomp.eval_step(
            measure, mesh, AXIS_NAME, fast_axis=fsdp.fast_axis
        ),
        shardings=lambda params: jax.jit(init).lower(params).compile().output_shardings,
    )


_stacked = jaxcomp.by_path((STACKED, True), (".*", False))
