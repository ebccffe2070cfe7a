"""Runs whose replicas hold all parameters: any transformation that averages over them."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas import protocol
from train.config import Config
from train.config.run import AXIS_NAME, update
from train.models import modules, sharding
from train.models.decoder import DecoderConfig
from train.placement import build, counts
from train.placement.base import Functions, Placement
from train.placement.devices import FAST_AXIS, fast_axis_of


def resolve(config: Config) -> Placement:
    """Evaluates `optimizer.update`.

    With `in_shards` the devices of a host are one replica, over which parameters are cut.

    Raises:
      ValueError: If it is not a transformation, or the model has no rules for `in_shards`.
    """
    if config.in_shards and not isinstance(config.model, DecoderConfig):
        raise ValueError(
            f"in_shards=True needs model=DecoderConfig(...), not {config.model}; write "
            "--no-in-shards."
        )
    alone = update(config)
    tx = jaxcomp.per_replica(_around(config, alone), AXIS_NAME)

    def rounds(state: Any) -> dict[str, int]:
        # A leaf of each kind is enough, and faster, if no fragment depends on the tree.
        if "synchronize_0" not in protocol.rounds(state):
            return counts.rounds(alone, config.steps)
        tx, params = counted(config)
        return counts.rounds(tx, config.steps, params)

    def replica_spread(params: Any, mesh: Mesh) -> jax.Array:
        axes = AXIS_NAME if config.in_shards else mesh.axis_names
        return jaxcomp.replica_spread(params, mesh, axes)

    return Placement(
        tx=tx,
        functions=functools.partial(_functions, config, tx),
        rounds=rounds,
        replica_spread=replica_spread,
        row_axes=(AXIS_NAME,),
        dense=(2, "ring all-reduce"),  # a scatter and a gather
        trains=re.compile(config.trainable or "").search,
    )


def counted(config: Config) -> tuple[optax.GradientTransformation, Any]:
    """The transformation and the small parameters with which `counts` counts messages."""
    stacked = re.compile(config.model.stacked or "$^")

    def few(key, like):
        # Stacked layers may be separate fragments.
        layers = like.shape[:1] if stacked.search(path_of(key)) else ()
        sides = (min(side, 2) for side in like.shape[len(layers) :])  # a leaf keeps its kind
        return jnp.zeros((*layers, *sides), like.dtype)

    params = jax.tree_util.tree_map_with_path(few, build.param_shapes(config))
    return _around(config, update(config)), params


def _around(config: Config, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The transformation as it sees the model: one layer at a time, and what is trained of it."""
    if config.model.stacked is not None and config.per_layer:
        layers = jaxcomp.by_path((config.model.stacked, True), (".*", False))
        tx = jaxcomp.per_layer(tx, layers)
    if config.trainable is None:
        return tx
    return _train_only(tx, config.trainable, build.param_shapes(config))


def _train_only(
    tx: optax.GradientTransformation, trainable: str, shapes: Any
) -> optax.GradientTransformation:
    trains = lambda key, _: bool(re.search(trainable, path_of(key)))
    labels = lambda params: jax.tree_util.tree_map_with_path(trains, params)
    found = jax.tree.leaves(labels(shapes))
    if all(found):
        return tx
    if not any(found):
        raise ValueError(
            f"trainable={trainable!r} matches no parameter's path; write a part of one, as "
            "--trainable 'lora_[ab]$' with --model.lora 8."
        )
    # The mean of frozen leaves is unused, so XLA never sends it.
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), AXIS_NAME)
    return optax.partition({True: tx, False: optax.chain(mean, optax.set_to_zero())}, labels)


def _functions(config: Config, tx: optax.GradientTransformation, mesh: Mesh) -> Functions:
    """The functions of a run on one mesh."""
    if config.in_shards:
        loss_fn, fast_axis = build.loss_of(config, layers=_with_rows_apart), None
        specs = sharding.specs(build.param_shapes(config), mesh, FAST_AXIS)
        batch_specs = P((AXIS_NAME, FAST_AXIS))  # so that XLA gathers parameters, not activations
    else:
        loss_fn, fast_axis = build.loss_of(config), fast_axis_of(config.fast)
        specs = batch_specs = None
    make = functools.partial(jaxcomp.train_step, param_specs=specs)
    make = jaxcomp.overlapped_train_step if config.overlap else make
    how = {"fast_axis": fast_axis, "batch_specs": batch_specs}
    made = make(loss_fn, tx, mesh, AXIS_NAME, accumulate=config.accumulate, **how)
    place = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))

    def shardings(params):
        param_specs = jax.tree.map(lambda _: P(), params) if specs is None else specs
        own_specs = jaxcomp.state_specs(tx, params, mesh, AXIS_NAME, specs, fast_axis=fast_axis)
        return place(param_specs), place(own_specs)

    return Functions(
        init=lambda params: (params, made.init(params)),
        step=made.step,
        # Without a drift as at the end of the run, so that one program serves both.
        evaluated=lambda params, state: (params, state if protocol.evaluated_drifts(state) else ()),
        deployed=lambda params, state: jaxcomp.mean_params(
            params, state, mesh, AXIS_NAME, param_specs=specs, fast_axis=fast_axis
        ),
        eval_step=lambda measure: jaxcomp.eval_step(
            measure, mesh, AXIS_NAME, param_specs=specs, **how
        ),
        shardings=shardings,
        places=None if specs is None else lambda _: place(specs),
    )


def _with_rows_apart(function: Callable) -> Callable:
    """Runs blocks with the rows of tokens cut over the devices of the host, like the batch.

    Otherwise XLA would gather the tokens of all devices for parameters that are cut along the same
    axis, and each device would compute the host's whole batch.
    """
    apart = lambda x: jax.lax.with_sharding_constraint(x, P(FAST_AXIS))
    return modules.in_turn(lambda params, x: apart(function(params, apart(x))))
