"""Runs whose replicas hold all parameters: any transformation that averages over them."""

import functools
import re
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
from train.placement import build, counts
from train.placement.base import Functions, Placement
from train.placement.devices import fast_axis_of


def resolve(config: Config) -> Placement:
    """Evaluates `optimizer.update`.

    Raises:
      ValueError: If it is not a transformation.
    """
    alone = update(config)
    tx = jaxcomp.per_replica(_around(config, alone), AXIS_NAME)

    def functions(mesh: Mesh) -> Functions:
        make = jaxcomp.overlapped_train_step if config.overlap else jaxcomp.train_step
        loss_fn, fast_axis = build.loss_of(config), fast_axis_of(config.fast)
        made = make(loss_fn, tx, mesh, AXIS_NAME, fast_axis=fast_axis, accumulate=config.accumulate)
        return functions_of(made, tx, mesh, fast_axis=fast_axis)

    def rounds(state: Any) -> dict[str, int]:
        # A leaf of each kind is enough, and faster, if no fragment depends on the tree.
        if "synchronize_0" not in protocol.rounds(state):
            return counts.rounds(alone, config.steps)
        tx, params = counted(config)
        return counts.rounds(tx, config.steps, params)

    return Placement(
        tx=tx,
        functions=functions,
        rounds=rounds,
        replica_spread=lambda params, mesh: jaxcomp.replica_spread(params, mesh, mesh.axis_names),
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


def functions_of(
    made: jaxcomp.TrainStep,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    fast_axis: str | None = None,
    specs: Any = None,
    batch_specs: Any = None,
) -> Functions:
    """Makes the functions of a run from its step.

    Args:
      made: The step, of `tx` on this mesh.
      tx: The transformation.
      mesh: The mesh.
      fast_axis: As in `jaxcomp.train_step`.
      specs: PartitionSpec of each parameter on the devices of a host; None: not sharded.
      batch_specs: As in `jaxcomp.train_step`.
    """

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
            measure,
            mesh,
            AXIS_NAME,
            param_specs=specs,
            fast_axis=fast_axis,
            batch_specs=batch_specs,
        ),
        shardings=shardings,
        places=None if specs is None else lambda _: place(specs),
    )
