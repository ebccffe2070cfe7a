"""Runs whose replicas are hosts: each parameter is sharded over the host's devices."""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcomp
from train.config import Config
from train.config.run import AXIS_NAME
from train.models import modules, sharding
from train.models.decoder import DecoderConfig
from train.placement import build, replicated
from train.placement.base import Functions, Placement
from train.placement.devices import FAST_AXIS


def resolve(config: Config) -> Placement:
    """Evaluates `optimizer.update`.

    Raises:
      ValueError: If it is not a transformation, or the model has no sharding rules.
    """
    if not isinstance(config.model, DecoderConfig):
        raise ValueError(
            f"in_shards=True needs model=DecoderConfig(...), not {config.model}; write "
            "--no-in-shards."
        )
    whole = replicated.resolve(config)

    def functions(mesh: Mesh) -> Functions:
        batch_specs = P((AXIS_NAME, FAST_AXIS))  # so that XLA gathers parameters, not activations
        specs = sharding.specs(build.param_shapes(config), mesh, fsdp=FAST_AXIS)
        made = jaxcomp.train_step(
            build.loss_of(config, layers=_with_rows_apart),
            whole.tx,
            mesh,
            AXIS_NAME,
            param_specs=specs,
            accumulate=config.accumulate,
            batch_specs=batch_specs,
        )
        return replicated.functions_of(made, whole.tx, mesh, specs=specs, batch_specs=batch_specs)

    replica_spread = lambda params, mesh: jaxcomp.replica_spread(params, mesh, AXIS_NAME)
    return whole._replace(functions=functions, replica_spread=replica_spread)


def _with_rows_apart(function: Callable) -> Callable:
    """Runs blocks with the rows of tokens cut over the devices of the host, like the batch.

    Otherwise XLA would gather the tokens of all devices for parameters that are cut along the same
    axis, and each device would compute the host's whole batch.
    """
    apart = lambda x: jax.lax.with_sharding_constraint(x, P(FAST_AXIS))
    return modules.in_turn(lambda params, x: apart(function(params, apart(x))))
