"""A whole training step over a mesh: local gradients, exchange, update; and its state's shapes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas import protocol
from jaxcomp.replicas.specs import require_axis
from jaxcomp.replicas.state import per_replica
from jaxcomp.replicas.types import names_of
from jaxcomp.steps import untyped
from jaxcomp.steps.compiling import ByState, Donating, Initial, compiler_options, is_of_gpus
from jaxcomp.steps.early import early
from jaxcomp.steps.gradient import (
    Given,
    Gradient,
    all_gradients,
    check_accumulate,
    metrics_of,
    placed_given,
    specs_of_extra,
)
from jaxcomp.steps.interleaved import interleaved, interleaved_shards
from jaxcomp.steps.update import (
    Update,
    all_updates,
    init_state,
    placed_params,
    placed_state,
    shardings_of,
    update_specs,
    whole_drifts,
    with_shares,
)


class TrainStep(NamedTuple):
    """The jitted functions of one training run."""

    init: Callable[[Any], Any]  # params -> state
    step: Any  # params, state, batch, ... -> params, state, metrics; jitted, or similar


def train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
    accumulate: int = 1,
    has_aux: bool = False,
    batch_specs: Any = None,
) -> TrainStep:
    """Makes jitted `init` and `step` from a loss and a transformation, over the replicas of a mesh.

    Gradients are taken at each replica's own parameters and never summed by JAX. The
    transformation runs with all mesh axes manual, on local shards.

    If the update is not finite, all replicas keep parameters and state. With methods that count
    `skipped` in their state (`cocktail_sgd`, `slamb`, `zero_one_adam`), only the replica whose
    gradient is not finite skips its step, and the others go on; unless another method next to them,
    for example in `optax.partition`, needs the common skip.

    Args:
      loss_fn: `(params, batch) -> f32[]`, the mean loss over the replica's own batch, without
        `jax.lax.pmean`. It also gets `rng=` and `model_state=` if `step` is called with them. It
        returns a tuple if there is more than the loss: the loss, `aux` with `has_aux`, the new
        model state.
      tx: Transformation that averages over `axis_name`; it is wrapped in `per_replica`. Its
        `update` gets extra arguments: `axis_name`, and `value`, the mean loss of all replicas, for
        `optax.contrib.reduce_on_plateau`; if used, it costs 4 bytes.
      mesh: Its axis `axis_name` is the slow one. `param_specs` say how parameters are sharded over
        other axes, and XLA partitions `loss_fn` over these, with type Auto.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters, a tree or a prefix; replicated by default.
      fast_axis: The mesh axis of a replica's devices, for example those of a host; they share its
        batch. Each of F devices averages the gradient of its 1/F of every parameter over the
        others, sends and updates it, keeps its state, and gets the rest of the new parameters from
        the others. Together they send as much as one device would. `tx` sees these shares. A
        parameter is cut along the axis that needs the least padding, never the first of several.
      accumulate: Microbatches that a device's batch is cut into; one exchange per step.
      has_aux: Whether the loss also returns `aux`, any tree of arrays.
      batch_specs: PartitionSpecs of the batch, a tree or a prefix; by default the first axis is cut
        over the replicas. `P()` is for leaves that all replicas and microbatches share. Other axes
        may follow the replica axis in a spec: `P(("replica", "fsdp"))` divides a replica's batch
        among the devices that share its weights.

    Returns:
      `init(params) -> state` and `step(params, state, batch, rng=None, model_state=None,
      extra_args=None) -> (params, state, metrics)`, which donates params and state. `batch` is a
      pytree of global arrays whose first axis is divisible by num_replicas * accumulate. `rng` is a
      key, or a tree of keys. Pass new ones in each step, for example
      `jax.random.fold_in(key, step)`; the loss gets them folded with the replica and the
      microbatch. `model_state` is a tree that the loss returns updated, such as BatchNorm
      statistics; it passes from one microbatch to the next. `extra_args` are further arguments of
      the update of `tx`, equal on all replicas, or your own `value`. `init` fails for those without
      a default, except `value`.
      Metrics: `loss`, f32[num_replicas], the loss on each replica's part of the batch before the
      update, not averaged, so that it costs no message; `skipped`, bool[], whether all replicas
      skipped the step, False for methods whose state counts `skipped`; `aux`, with a leading axis
      of num_replicas * accumulate, one row for each call of the loss; `model_state`, the mean over
      the replicas in one float32 message, the part `model_state` in the report. A replica whose
      model state is not finite contributes the old one; a skipped step returns the old one. With a
      fast axis of size F, batch, `loss` and `aux` have num_replicas * F parts, over both axes.

    Raises:
      ValueError: At construction for `accumulate` below 1, or if the mesh lacks `axis_name`. At the
        first call, if it lacks `fast_axis`, `param_specs` use that, the batch cannot be divided,
        the loss is equal on all replicas or returns the wrong values, or the incoming or outgoing
        updates of `tx` are invalid.
    """
    check_accumulate(accumulate)
    require_axis(mesh, axis_name)
    update = Update(per_replica(tx, axis_name), mesh, axis_name, param_specs, fast_axis)
    gradient = Gradient(loss_fn, mesh, update.axes, accumulate, has_aux, batch_specs)
    step = untyped.as_needed(_step, gradient, update)

    def jitted(state):
        options = compiler_options(mesh, early=sends_early(mesh, update.axes, state))
        return jax.jit(step, donate_argnums=(0, 1), compiler_options=options)

    init = Initial(jax.jit(functools.partial(init_state, update)), mesh)
    has_devices = isinstance(mesh, Mesh)
    shardings = functools.partial(shardings_of, update) if has_devices else None
    return TrainStep(init, Donating(ByState(jitted), mesh, shardings))


def sends_early(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...], state: Any) -> bool:
    """Whether a step sends what it needs of the gradient while the rest is computed."""
    return is_of_gpus(mesh) and _are_all(mesh, axes) and not _sends_ahead(state)


def _are_all(mesh, axes):
    return set(mesh.axis_names) == {*names_of(axes)}


def _sends_ahead(state):
    return protocol.exchanges_ahead(state) and protocol.loss_scale(state) is None


def _step(gradient, update, params, state, batch, rng=None, model_state=None, extra_args=None):
    params = placed_params(update, params)
    state = placed_state(update, params, state)
    drifts = whole_drifts(update, params, protocol.drifts(state))
    given = Given(drifts, batch, rng, model_state, protocol.loss_scale(state))
    args = gradient, update, params, state, given, extra_args
    if _sends_ahead(state) and _are_all(update.mesh, update.axes):
        new = _manual(interleaved, *args)
    elif _sends_ahead(state):
        new = interleaved_shards(*args)
    elif sends_early(update.mesh, update.axes, state):
        new = _manual(early, *args)
    else:
        loss, grads, extra = all_gradients(gradient, params, *given)
        new = *all_updates(update, params, state, grads, loss, extra_args), loss, extra
    params, state, skipped, loss, extra = new
    return params, state, metrics_of(gradient, loss, skipped, extra, model_state)


def _manual(local, gradient, update, params, state, given, extra_args):
    """Both halves of a step in one `shard_map`, where all axes of the mesh are manual."""
    given, given_specs = placed_given(gradient, given)
    specs, rows = update_specs(update, params), P(gradient.axis_name)
    return jax.shard_map(
        functools.partial(local, gradient, with_shares(update, params)),
        mesh=gradient.mesh,
        in_specs=(*specs, given_specs, P()),
        out_specs=(*specs, P(), rows, specs_of_extra(gradient, given.model_state)),
    )(params, state, given, extra_args)


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
    update = Update(tx, as_saved, axis_name, param_specs, fast_axis)
    specs = update_specs(update, params)[1]
    shapes = jax.eval_shape(functools.partial(init_state, update), params)
    divides = num_replicas % mesh.shape[axis_name] == 0

    def shape_at(x, spec):
        spec = spec if divides or spec[:1] != (axis_name,) else P(None, *spec[1:])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(shape_at, shapes, specs)
