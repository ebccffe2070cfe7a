"""Flax training loops over the replicas of a mesh: `nnx.Optimizer` and `TrainState`.

The one module that needs flax: `import jaxcomp` does not import it. Above all rooms but measure.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import require_kept
from jaxcomp.replicas.compact import Compact
from jaxcomp.replicas.shards import Shard
from jaxcomp.replicas.state import per_replica
from jaxcomp.steps.loss import folded
from jaxcomp.steps.train import TrainStep
from jaxcomp.steps.train import train_step as core_train_step
from jaxcomp.steps.update import Update, init_state

try:
    from flax import nnx, serialization
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError(
        "jaxcomp.flax needs Flax 0.12 or newer, which is not installed; write pip install flax.",
        name="flax",
    ) from error


def on_mesh(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes a transformation that Flax can initialize, with the state's rows on the mesh.

    For `nnx.Optimizer(model, tx, wrt=nnx.Param)` and `TrainState.create(..., tx=tx)`, which call
    `tx.init` outside of `shard_map`. Only `train_step` and `train_state_step` call its update.

    Args:
      tx: As for `jaxcomp.train_step`, like the other arguments.
      mesh: Where the model trains.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters.
      fast_axis: The axis of the devices of one replica.

    Returns:
      The transformation. Its `update` raises a ValueError, since gradients from Flax are already
      summed in float32.
    """
    update = Update(per_replica(tx, axis_name), mesh, axis_name, param_specs, fast_axis)
    jitted = jax.jit(functools.partial(init_state, update))

    def init(params):
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                "jaxcomp.flax.on_mesh has bound this transformation to a mesh, for Flax alone; "
                "give jaxcomp.train_step, jaxcomp.per_replica and jaxcomp.state_shapes the one "
                "that on_mesh got: write bound = jaxcomp.flax.on_mesh(tx, mesh, 'replica') and "
                "keep tx."
            )
        params = nnx.as_pure(params)
        require_kept(params)
        return jitted(_put(mesh, params, update.specs_of(params)))

    def refuse(updates, state, params=None, **extra_args):
        raise ValueError(
            "optimizer.update and TrainState.apply_gradients got gradients that no exchange can "
            "see before they are summed; write step = jaxcomp.flax.train_step(loss_fn) for nnx, "
            "or jaxcomp.flax.train_state_step(loss_fn), and call that."
        )

    return optax.GradientTransformationExtraArgs(_OnMesh(init, update), refuse)


@dataclasses.dataclass(frozen=True, eq=False)
class _OnMesh:
    """The `init` of a transformation that `on_mesh` has bound."""

    init: Callable[[Any], Any]
    update: Update

    def __call__(self, params: Any) -> Any:
        return self.init(params)


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    accumulate: int = 1,
    batch_specs: Any = None,
) -> "NnxStep":
    """Makes the step of an nnx model and its `nnx.Optimizer`, in place of a function in `nnx.jit`.

    Each replica differentiates its own loss. The model's random streams differ between replicas and
    microbatches: their keys are folded with both, and their counts are saved with the model. Floats
    that the model changes, such as BatchNorm's statistics, are averaged over the replicas in one
    float32 message. Parameters outside the optimizer's `wrt` do not change and cost nothing.

    Args:
      loss_fn: `(model, batch) -> f32[]`, the mean loss of its batch, or `(loss, aux)` with
        `has_aux`. It may change the model's variables, except parameters.
      has_aux: As for `jaxcomp.train_step`, like the other arguments.
      accumulate: Microbatches.
      batch_specs: PartitionSpecs of the batch.

    Returns:
      `step(model, optimizer, batch, extra_args=None) -> metrics`, which changes model and optimizer
      in place, and puts them on the mesh at the first call. Metrics are those of
      `jaxcomp.train_step`. `step.lower` has the same arguments, for `jaxcomp.report`.

    Raises:
      ValueError: If the optimizer's transformation is not from `on_mesh`, or the batch holds
        `nnx.Rngs`; also the errors of `jaxcomp.train_step`.
    """
    return NnxStep(_Loss(loss_fn, has_aux, accumulate, batch_specs))


def train_state_step(
    loss_fn: Callable[..., Any],
    *,
    model_state: str | None = None,
    has_aux: bool = False,
    accumulate: int = 1,
    batch_specs: Any = None,
) -> "TrainStateStep":
    """Makes the step of a `flax.training.train_state.TrainState`, in place of a jitted function.

    Args:
      loss_fn: As for `jaxcomp.train_step`, called with `state.params`; with `rng=` if the step gets
        one, and `model_state=` if there is any.
      model_state: The name of the state's field that the loss gets as `model_state` and returns
        updated, for example "batch_stats".
      has_aux: As for `jaxcomp.train_step`, like the other arguments.
      accumulate: Microbatches.
      batch_specs: PartitionSpecs of the batch.

    Returns:
      `step(state, batch, rng=None, extra_args=None) -> (state,
      metrics)`, which donates the arrays of the state. `rng` is a key, or a tree of keys. Pass the
      same one in each step: it is folded with `state.step`, the replica and the microbatch.
      `step.lower` has the same arguments.

    Raises:
      ValueError: As `train_step`.
    """
    pure_loss = lambda *args, **given: nnx.as_pure(loss_fn(*args, **given))
    return TrainStateStep(_Loss(pure_loss, has_aux, accumulate, batch_specs), model_state)


class _Loss(NamedTuple):
    """A loss function and how to call it."""

    loss_fn: Callable[..., Any]
    has_aux: bool
    accumulate: int
    batch_specs: Any


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A graph as a key of a cache: lists, which MaxText's modules hold, have no hash."""

    graphdef: Any

    def __hash__(self) -> int:
        return self.graphdef.num_leaves


class NnxStep:
    """A step of an nnx model; made by `train_step`."""

    def __init__(self, loss: _Loss):
        self._made = functools.lru_cache(maxsize=8)(functools.partial(_nnx_step, loss))

    def __call__(self, model: Any, optimizer: Any, batch: Any, extra_args: Any = None) -> dict:
        step, args = self._call(model, optimizer, batch, extra_args)
        params, opt_state, metrics = step(*args)
        nnx.update(model, params, metrics.pop("model_state", {}))
        nnx.update(optimizer.opt_state, nnx.state(opt_state))
        optimizer.step[...] += 1
        return metrics

    def lower(self, model: Any, optimizer: Any, batch: Any, extra_args: Any = None) -> Any:
        """The step's program, lowered for these arguments; puts them on the mesh."""
        step, args = self._call(model, optimizer, batch, extra_args)
        return step.lower(*args)

    def _call(self, model, optimizer, batch, extra_args):
        _require_no_streams(batch)
        update = _update_of(optimizer.tx)
        wrt = nnx.filterlib.to_predicate(optimizer.wrt)  # hashable; a list of filters is not
        graphdef, *states = _partition(model, wrt)
        pure = [nnx.as_pure(state) for state in states]
        param_specs = update.specs_of(pure[0])
        places = [param_specs, *(jax.tree.map(lambda _: P(), state) for state in pure[1:])]
        params, keys, frozen, rest = placed = [
            _put(update.mesh, state, specs) for state, specs in zip(pure, places, strict=True)
        ]
        nnx.update(model, *placed)
        some = lambda tree: tree if jax.tree.leaves(tree) else None
        opt_state = nnx.as_pure(optimizer.opt_state)
        args = params, opt_state, (batch, frozen), some(keys), some(rest), extra_args
        return self._made(optimizer.tx, _Graph(graphdef), wrt).step, args


class TrainStateStep:
    """A step of a TrainState; made by `train_state_step`."""

    def __init__(self, loss: _Loss, field: str | None):
        self._made = functools.lru_cache(maxsize=8)(functools.partial(_core, loss))
        self._field = field

    def __call__(
        self, state: Any, batch: Any, rng: Any = None, extra_args: Any = None
    ) -> tuple[Any, dict]:
        step, args = self._call(state, batch, rng, extra_args)
        params, opt_state, metrics = step(*args)
        new = {"params": params}
        if self._field:
            new[self._field] = metrics.pop("model_state", None)
        new = {name: _in_form_of(getattr(state, name), tree) for name, tree in new.items()}
        return state.replace(step=state.step + 1, opt_state=opt_state, **new), metrics

    def lower(self, state: Any, batch: Any, rng: Any = None, extra_args: Any = None) -> Any:
        """The step's program, lowered for these arguments."""
        step, args = self._call(state, batch, rng, extra_args)
        return step.lower(*args)

    def _call(self, state, batch, rng, extra_args):
        update = _update_of(state.tx)
        # The step itself puts parameters on the mesh. It copies them: another field may have them.
        params = nnx.as_pure(state.params)
        own = nnx.as_pure(getattr(state, self._field)) if self._field else None
        own = _put(update.mesh, own, jax.tree.map(lambda _: P(), own))
        args = params, state.opt_state, batch, folded(rng, state.step), own, extra_args
        return self._made(state.tx).step, args


def _nnx_step(loss: _Loss, tx: Any, graph: _Graph, wrt: Any) -> TrainStep:
    def loss_fn(params, batch, *, rng=None, model_state=None):
        batch, frozen = batch
        states = [nnx.State({}) if s is None else s for s in (rng, frozen, model_state)]
        model = nnx.merge(graph.graphdef, params, *states)
        returned = loss.loss_fn(model, batch)
        *_, rest = _partition(model, wrt)
        _require_same_variables(states[-1], rest)
        kept = () if model_state is None else (nnx.as_pure(rest),)
        return (*returned, *kept) if loss.has_aux else (returned, *kept)

    specs = P(_update_of(tx).axes) if loss.batch_specs is None else loss.batch_specs
    return _core(loss._replace(loss_fn=loss_fn, batch_specs=(specs, P())), tx)


def _partition(model, wrt):
    """`(graphdef, trained parameters, keys, other parameters, all else)`."""
    return nnx.split(model, wrt, nnx.RngKey, nnx.Param, ...)


def _require_same_variables(old, new):
    """Raises a ValueError for a loss that adds variables to the model, or takes some away."""
    old, new = ({"/".join(map(str, path)) for path, _ in nnx.to_flat_state(s)} for s in (old, new))
    if old != new:
        raise ValueError(
            f"the loss adds the variables {sorted(new - old)} to the model and removes "
            f"{sorted(old - new)}, and a step needs the same ones after the loss as before. Write "
            "nnx.pop(model, nnx.Intermediate), or their own type, in the loss for what it adds, "
            "and return what you need of it as aux; and before the step for what an earlier call "
            "of the model has left."
        )


def _in_form_of(tree, pure):
    """The values in the form of `tree`, in which an nnx.State holds variables."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(pure))


def _core(loss: _Loss, tx: Any) -> TrainStep:
    update = _update_of(tx)
    return core_train_step(
        loss.loss_fn,
        update.tx,
        update.mesh,
        update.axis_name,
        param_specs=update.param_specs,
        fast_axis=update.fast_axis,
        accumulate=loss.accumulate,
        has_aux=loss.has_aux,
        batch_specs=loss.batch_specs,
    )


def _update_of(tx):
    if not isinstance(tx.init, _OnMesh):
        raise ValueError(
            "the optimizer's transformation is bound to no mesh; write "
            "nnx.Optimizer(model, jaxcomp.flax.on_mesh(tx, mesh, 'replica'), wrt=nnx.Param), or "
            "TrainState.create(..., tx=jaxcomp.flax.on_mesh(tx, mesh, 'replica'))."
        )
    return tx.init.update


def _require_no_streams(batch):
    """Raises a ValueError for random streams in a batch, where nothing folds or counts them."""
    is_stream = lambda x: isinstance(x, nnx.Rngs | nnx.RngStream)
    nodes = jax.tree.leaves(batch, is_leaf=lambda x: is_stream(x) or isinstance(x, nnx.Module))
    if any(map(is_stream, nodes)):
        raise ValueError(
            "the batch holds random streams (nnx.Rngs), and there they would give the same numbers "
            "on all replicas and in every step; write model.rngs = rngs once, and model.rngs in "
            "the loss."
        )


def _put(mesh, tree, specs):
    """Puts arrays where the specs say; arrays that are there already are not touched."""

    def put(x, spec):
        sharding = NamedSharding(mesh, spec)
        known = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        there = known and x.sharding.is_equivalent_to(sharding, x.ndim)
        return x if there else jax.device_put(x, sharding)

    return jax.tree.map(put, tree, specs)


def _saved(node):
    return {str(i): x for i, x in enumerate(jax.tree.leaves(node))}


def _restored(node, saved):
    treedef = jax.tree.structure(node)
    return treedef.unflatten([saved[str(i)] for i in range(treedef.num_leaves)])


for _node in (Compact, Shard):  # `flax.serialization` knows no nodes of other libraries
    serialization.register_serialization_state(_node, _saved, _restored)
