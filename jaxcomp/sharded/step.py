"""The training step of sharded parameters: gathers forward and backward, updates shards."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.compressors.policies import path_of
from jaxcomp.replicas import protocol
from jaxcomp.replicas.elementwise import ranked, require_elementwise
from jaxcomp.replicas.shards import is_shard, map_shards
from jaxcomp.replicas.specs import specs_of
from jaxcomp.replicas.state import per_replica, stack, unstack
from jaxcomp.replicas.types import to_varying
from jaxcomp.sharded import levels
from jaxcomp.sharded.qsdp import QSDP
from jaxcomp.steps import untyped
from jaxcomp.steps.compiling import Donating, Kept, compiler_options
from jaxcomp.steps.gradient import (
    Gradient,
    check_accumulate,
    in_rows,
    loss_of_part,
    mean_over_microbatches,
    metrics_of,
    placed_batch,
    specs_of_extra,
)
from jaxcomp.steps.loss import own_floats, require_local
from jaxcomp.steps.placing import placed
from jaxcomp.steps.train import TrainStep
from jaxcomp.steps.update import all_or_nothing, require_like, require_same_tree


@protocol.MethodState.register
class QSDPState(NamedTuple):
    """State of `qsdp_train_step`."""

    # i32[], steps so far, skipped ones included; the source of all keys
    count: jax.Array  # type: ignore[assignment]
    inner: Any  # the optimizer's state, for shards
    levels: Any  # one `levels.Tables` per parameter, equal on all replicas
    rounds: Any  # {part: i32[]}, how often each part was sent; {} if no levels are learned


def qsdp_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    fsdp: QSDP,
    *,
    accumulate: int = 1,
    has_aux: bool = False,
    batch_specs: Any = None,
) -> TrainStep:
    """Makes jitted `init` and `step` from a loss and an optimizer, for sharded parameters.

    Shards get mean gradients over the replicas. Only one float32 more is exchanged: whether the
    whole update is finite. If it is not, all replicas keep parameters and optimizer state.

    Args:
      loss_fn: `(shards, batch) -> f32[]`, the mean loss of its batch. It gets the result of
        `fsdp.local`, and uses it through `fsdp.gather` and `fsdp.layer`. These pass on what is
        already gathered, as with `fsdp.gather_once`.
      tx: Any optimizer whose update of an entry depends on that entry alone, such as Adam, or on
        sums over all shards, such as `jaxcomp.clip_by_global_norm`. It gets `value`, the mean loss
        of all replicas. It sees flat shards with the rank of the parameter, or of one layer of it:
        masks such as `ndim > 1` work; looking at other shapes is an error. It must not exchange
        gradients itself.
      mesh: Mesh with the axes `fsdp.axes`, in any order, and no others.
      fsdp: Made by `jaxcomp.qsdp`.
      accumulate: Microbatches that a replica's batch is cut into. Each gathers weights and scatters
        gradients again, with its own noise, unless `fsdp.gather_once`.
      has_aux: As for `jaxcomp.train_step`, like `batch_specs`.
      batch_specs: Over all axes of the mesh, in its order, or over none.

    Returns:
      `init(shards) -> QSDPState` and `step(shards, state, batch, ...) -> (shards, state, metrics)`,
      with shards from `fsdp.shard`. Arguments and metrics are those of `jaxcomp.train_step`, with
      the first axis sharded over all axes of the mesh, in its order. `step` donates shards and
      state.

    Raises:
      ValueError: At construction, if the mesh has other axes than `fsdp.axes`, or `accumulate` is
        below 1; at the first call, if the batch cannot be divided, the loss is equal on all
        replicas, or `tx` exchanges, looks at shapes, or mixes entries of a shard.
    """
    check_accumulate(accumulate)
    if set(mesh.axis_names) != set(fsdp.axes):
        raise ValueError(
            f"qsdp_train_step got a mesh of axes {mesh.axis_names}, needs one of {fsdp.axes} and "
            "no others; for a slow and a fast axis write qsdp(slow, fast_axis=fast)."
        )
    rowwise = per_replica(_for_pieces(tx), fsdp.axes)
    gradient = Gradient(loss_fn, mesh, mesh.axis_names, accumulate, has_aux, batch_specs)
    run = _Run(tx, rowwise, mesh, fsdp)
    step = jax.jit(
        untyped.as_needed(_step, gradient, run),
        donate_argnums=(0, 1),
        compiler_options=compiler_options(mesh, gathers_layers=True),
    )
    return TrainStep(
        Kept(jax.jit(functools.partial(_init, run)), mesh),
        Donating(step, mesh, functools.partial(_shardings, run)),
    )


class _Run(NamedTuple):
    """The arguments of a step."""

    given: optax.GradientTransformation  # as the user wrote it
    tx: optax.GradientTransformationExtraArgs  # the same for shards, with rows of replicas
    mesh: Mesh
    fsdp: QSDP


def _init(run, shards):
    _require_shards(run, shards)
    cut, specs = _specs(run, shards)
    own = functools.partial(_init_local, run)
    shards = placed(run.mesh, shards, cut)
    return jax.shard_map(own, mesh=run.mesh, in_specs=(cut,), out_specs=specs)(shards)


def _specs(run, shards):
    """The PartitionSpecs of the shards and of the state; the shards may lie anywhere."""
    cut = P(run.fsdp.axes)
    at = NamedSharding(run.mesh, cut)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shards)
    own = functools.partial(_init_local, run)
    return jax.tree.broadcast(cut, like), specs_of(own, run.mesh, run.fsdp.axes, cut, like)


def _shardings(run, shards, state):
    """Where a step returns shards and state; a ValueError for a state that is not of these."""
    _require_shards(run, shards)
    like = jax.eval_shape(functools.partial(_init, run), shards)
    require_same_tree(state, like)
    jax.tree.map_with_path(require_like, state, like)
    return jax.tree.map(functools.partial(NamedSharding, run.mesh), _specs(run, shards))


def _init_local(run, shards):
    shards = unstack(shards, run.fsdp.axes)
    tables = levels.start(shards)
    rounds = {"all": jnp.int32(0), "levels": jnp.int32(0)} if jax.tree.leaves(tables) else {}
    _require_alone(run.given.init(shards))
    return QSDPState(jnp.int32(0), run.tx.init(shards), tables, rounds)


def _step(gradient, run, shards, state, batch, rng=None, model_state=None, extra_args=None):
    mesh = run.mesh
    _require_shards(run, shards)
    batch, batch_specs = placed_batch(gradient, batch)
    rows = P(mesh.axis_names)
    extra_specs = specs_of_extra(gradient, model_state)
    own_specs = _specs(run, shards)
    shards, state = placed(mesh, (shards, state), own_specs)
    shards, state, loss, skipped, extra = jax.shard_map(
        functools.partial(_step_local, gradient, run),
        mesh=mesh,
        in_specs=(*own_specs, batch_specs, P(), P(), P()),
        out_specs=(*own_specs, rows, P(), extra_specs),
    )(shards, state, batch, rng, model_state, extra_args)
    return shards, state, metrics_of(gradient, loss, skipped, extra, model_state)


def _step_local(gradient, run, shards, state, batch, rng, model_state, extra_args):
    axes = run.fsdp.axes
    (loss, extra), (grads, tallies) = _mean_gradients(
        gradient, run.fsdp, shards, state, batch, rng, model_state
    )
    shards, grads = unstack((shards, grads), axes)
    tables, rounds = _fitted(run.fsdp, shards, state, tallies)
    given = {"value": lax.pmean(loss, axes)} | (extra_args or {})
    updates, inner = run.tx.update(grads, state.inner, shards, **given)
    new = optax.apply_updates(shards, updates), inner
    (shards, inner), skipped = all_or_nothing(updates, new, (shards, state.inner))
    state = QSDPState(optax.safe_increment(state.count), inner, tables, rounds)
    return stack(shards, axes), state, loss[None], skipped, in_rows(gradient, extra)


def _require_shards(run, shards):
    """Raises a ValueError for parameters, or shards of another number of devices."""
    count = run.mesh.size
    for path, leaf in jax.tree.leaves_with_path(shards, is_leaf=is_shard):
        if not is_shard(leaf) or leaf.data.shape[0] != count:
            raise ValueError(
                f"the shards have {leaf!r:.120} at {path_of(path)!r}, and qsdp_train_step needs a "
                f"shard for each of the mesh's {count} devices; write fsdp.shard(params, mesh), "
                "and jaxcomp.resize(shards, like) for those of another number of devices."
            )


def _for_pieces(tx):
    """An optimizer for shards, which sees the parameters' ranks and must work entry by entry."""
    tx = optax.with_extra_args_support(tx)
    mapped = lambda function: functools.partial(
        map_shards, lambda shard: dataclasses.replace(shard, data=function(shard))
    )
    # In an optimizer's state a shard's array may be an optax.MaskedNode, which has no leaves.
    rank = mapped(lambda s: jax.tree.map(lambda x: ranked(x, len(s.shape)), s.data))
    flat = mapped(lambda s: jax.tree.map(lambda x: x.reshape(*s.stack, -1), s.data))

    def init(shards):
        return flat(tx.init(rank(shards)))

    def update(grads, state, shards, **extra_args):
        grads, state, pieces = rank(grads), rank(state), rank(shards)
        shapes = mapped(lambda shard: shard.shape)(shards)
        require_elementwise(tx, grads, state, pieces, shapes, **extra_args)
        return flat(tx.update(grads, state, pieces, **extra_args))

    return optax.GradientTransformationExtraArgs(init, update)


def _require_alone(state):
    found = protocol.exchanging(state)
    if found is not None:
        raise ValueError(
            f"qsdp_train_step got a transformation that exchanges (its state has {found!r}); "
            "gradients of shards are means already, and each replica has other parameters; write "
            "the optimizer alone, like optax.adamw(1e-3)."
        )


def _fitted(fsdp, shards, state, tallies):
    """Levels and rounds after a step; they change only in the schedule's steps."""
    if not state.rounds:
        return state.levels, state.rounds
    due = fsdp.fit_at(state.count)
    fit = lambda tables: levels.refit(tables, shards, tallies, fsdp.axes)
    tables = lax.cond(due, fit, lambda tables: tables, state.levels)
    new = {"all": state.rounds["all"] + 1, "levels": state.rounds["levels"] + due}
    return tables, new


def _mean_gradients(gradient, fsdp, shards, state, batch, rng, model_state):
    """`((loss, extra), (grads, tallies))`, averaged over this replica's microbatches.

    `grads` are those of the shards; `tallies` count what was sent of them, in steps that fit
    levels.
    """
    loss_of, model_state = loss_of_part(gradient, batch, rng), own_floats(model_state, fsdp.axes)
    counters = levels.counters(unstack(shards, fsdp.axes), fsdp.fit_at(state.count))
    counters = to_varying(counters, fsdp.axes)  # else JAX sums tallies in every step
    own = shards, counters

    def local(index, shards, counters):
        return fsdp.local(shards, state.count, index, levels=state.levels, counters=counters)

    def at_shards(index, *part):
        loss = lambda *own: loss_of(local(index, *own), index, *part)
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*own)

    def at_params(*part):
        return jax.value_and_grad(lambda params: loss_of(params, *part), has_aux=True)(params)

    def mean(value_and_grad, like):
        """In the dtypes of `like`, which are those of cotangents and of the state of `tx`."""
        made, grads = mean_over_microbatches(gradient, value_and_grad, like, batch, model_state)
        return made, jax.tree.map(lambda g, x: g.astype(x.dtype), grads, like)

    if fsdp.gather_once:
        params, scattered = jax.vjp(lambda *own: fsdp.gather(local(0, *own)), *own)
        made, grads = mean(at_params, params)
        grads = scattered(grads)
    else:
        made, grads = mean(at_shards, own)
    require_local(made[0], *fsdp.axes)
    return made, grads
