"""The state of another number of replicas as shapes, for whoever restores a checkpoint of it."""

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
    """The shapes, dtypes and shardings of a state of `num_replicas`, on a mesh of any number.

    A library that restores a checkpoint wants to be told what is in it. In a new process the
    devices that wrote it may be gone: here they need not exist. `jaxcomp.resize` then makes of
    what was restored a state for the replicas of `mesh`. With their own number it is what `init`
    of `jaxcomp.train_step` returns, as shapes.

    Args:
      tx: The transformation of the run that wrote the state.
      params: Global parameters, or their shapes and dtypes.
      num_replicas: Replicas of that run.
      mesh: Mesh of this process. Its other axes have the sizes that they had in that run.
      axis_name: The axis of the replicas.
      param_specs: As for `jaxcomp.train_step`, like `fast_axis`.
      fast_axis: As there.

    Returns:
      A tree like the state, of `jax.ShapeDtypeStruct`. The rows of replicas are spread over
      `axis_name`, evenly; where its size does not divide their number, each device gets them all.

    Raises:
      ValueError: If `num_replicas` is below 1; as `jaxcomp.state_specs`.
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
