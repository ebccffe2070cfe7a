"""The shapes of a state for another number of replicas, to restore its checkpoint."""

import functools
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.specs import state_specs
from jaxcomp.replicas.state import per_replica
from jaxcomp.steps.update import Update, init_state


def state_shapes(
    tx: optax.GradientTransformation,
    params: Any,
    num_replicas: int,
    mesh: Mesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
) -> Any:
    """The shapes, dtypes and shardings of a state of `num_replicas`, on any mesh.

    To restore a checkpoint, libraries need its shapes and shardings. The devices that wrote it need
    not exist. `jaxcomp.resize` then turns the restored state into one for the replicas of `mesh`.
    If the number of replicas is the same, these are the shapes of what `init` of
    `jaxcomp.train_step` returns.

    Args:
      tx: The transformation of the run that wrote the state.
      params: Global parameters, or their shapes and dtypes.
      num_replicas: Replicas of that run.
      mesh: Mesh of this process. Its other axes must have the sizes of that run.
      axis_name: The axis of the replicas.
      param_specs: As for `jaxcomp.train_step`, like `fast_axis`.
      fast_axis: As for `jaxcomp.train_step`.

    Returns:
      A tree like the state, of `jax.ShapeDtypeStruct`. The rows of replicas are spread evenly over
      `axis_name`; if its size does not divide their number, each device gets all rows.

    Raises:
      ValueError: If `num_replicas` is below 1; also the errors of `jaxcomp.state_specs`.
    """
    if num_replicas < 1:
        raise ValueError(f"state_shapes got num_replicas={num_replicas}; write at least 1.")
    tx = per_replica(tx, axis_name)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    sizes = tuple(num_replicas if name == axis_name else n for name, n in mesh.shape.items())
    types = (AxisType.Auto,) * len(sizes)
    as_saved = AbstractMesh(sizes, mesh.axis_names, axis_types=types)
    specs = state_specs(tx, params, as_saved, axis_name, param_specs, fast_axis)
    update = Update(tx, as_saved, axis_name, param_specs, fast_axis)
    shapes = jax.eval_shape(functools.partial(init_state, update), params)
    divides = num_replicas % mesh.shape[axis_name] == 0

    def placed(x, spec):
        spec = spec if divides or spec[:1] != (axis_name,) else P(None, *spec[1:])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, shapes, specs)
