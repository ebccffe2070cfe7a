"""A whole training step of sharded parameters: gathered forward and backward, updated in shards."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas import protocol
from jaxcomp.replicas.elementwise import ranked, require_elementwise
from jaxcomp.replicas.shards import map_shards
from jaxcomp.replicas.specs import specs_of
from jaxcomp.replicas.state import per_replica, stack, unstack
from jaxcomp.replicas.types import to_varying
from jaxcomp.sharded import levels
from jaxcomp.sharded.qsdp import QSDP
from jaxcomp.steps.compiling import jitted
from jaxcomp.steps.gradient import (
    check_accumulate,
    check_batch,
    mean_over_microbatches,
    require_local,
)
from jaxcomp.steps.train import TrainStep
from jaxcomp.steps.update import all_or_nothing


class QSDPState(NamedTuple):
    """State of `qsdp_train_step`."""

    # i32[], steps so far, skipped ones included; the source of all keys
    count: jax.Array  # type: ignore[assignment]
    inner: Any  # the optimizer's, of shards
    levels: Any  # `levels.Tables`, one a parameter, equal on all replicas
    rounds: Any  # {part: i32[]}, how often each part was sent; {} if no levels are learned


def qsdp_train_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    fsdp: QSDP,
    *,
    accumulate: int = 1,
) -> TrainStep:
    """Makes jitted `init` and `step` of a loss and an optimizer, of parameters in shards.

    Gradients arrive at the shards as means over the replicas. Nothing else is exchanged but for
    one float32, whether all of the update is finite; if it is not, parameters and optimizer stay
    as they were on all replicas.

    Args:
      loss_fn: `(shards, batch) -> f32[]`, the mean loss over the batch that it is given. It gets
        what `fsdp.local` returns, and uses it by `fsdp.gather` and `fsdp.layer`; these pass on
        what is gathered already, as by `fsdp.gather_once`.
      tx: Any optimizer whose update of an entry depends on that entry alone, as Adam's, or on what
        is summed over all shards, as by `jaxcomp.clip_by_global_norm`. It gets `value`, the mean
        loss of all replicas. It sees flat shards of the ranks that parameters have, or one layer
        of them: masks such as `ndim > 1` work, and what looks at other shapes is refused. Nothing
        that exchanges gradients by itself.
      mesh: Of the axes `fsdp.axes`, in any order, and no others.
      fsdp: As `jaxcomp.qsdp` makes it.
      accumulate: Microbatches that a replica's batch is cut into, in turn. Each gathers the
        weights and scatters gradients anew, with draws of its own, unless `fsdp.gather_once`.

    Returns:
      `init(shards) -> QSDPState` and `step(shards, state, batch) -> (shards, state, metrics)`,
      with shards from `fsdp.shard`, the batch and the metrics as for `jaxcomp.train_step`, their
      first axis sharded over all axes of the mesh, in its order. `step` donates shards and state.

    Raises:
      ValueError: At construction, if the mesh has other axes than `fsdp.axes`, or `accumulate` is
        under 1; at the first call, if the batch cannot be divided, the loss is equal on all
        replicas, or `tx` is one of this package's methods, looks at shapes, or mixes entries of a
        shard.
    """
    check_accumulate(accumulate)
    if set(mesh.axis_names) != set(fsdp.axes):
        raise ValueError(
            f"qsdp_train_step got a mesh of axes {mesh.axis_names}, needs one of {fsdp.axes} and "
            "no others; of a slow and a fast axis write qsdp(slow, fast_axis=fast)."
        )
    of_rows = per_replica(_of_pieces(tx), fsdp.axes)
    run = _Run(loss_fn, tx, of_rows, mesh, fsdp, accumulate)
    return TrainStep(
        jax.jit(functools.partial(_init, run)),
        jitted(functools.partial(_step, run), mesh, gathers_layers=True, donate_argnums=(0, 1)),
    )


class _Run(NamedTuple):
    """What a step was made with."""

    loss_fn: Callable
    given: optax.GradientTransformation  # as the user wrote it
    tx: optax.GradientTransformationExtraArgs  # the same, of shards, with rows of replicas
    mesh: Mesh
    fsdp: QSDP
    accumulate: int


def _init(run, shards):
    cut = P(run.fsdp.axes)
    own = functools.partial(_init_local, run)
    specs = specs_of(own, run.mesh, run.fsdp.axes, cut, shards)
    return jax.shard_map(own, mesh=run.mesh, in_specs=cut, out_specs=specs)(shards)


def _init_local(run, shards):
    shards = unstack(shards, run.fsdp.axes)
    tables = levels.start(shards)
    rounds = {"all": jnp.int32(0), "levels": jnp.int32(0)} if jax.tree.leaves(tables) else {}
    _require_alone(run.given.init(shards))
    return QSDPState(jnp.int32(0), run.tx.init(shards), tables, rounds)


def _step(run, shards, state, batch):
    mesh, axes = run.mesh, run.fsdp.axes
    check_batch(batch, mesh.axis_names, mesh.size, run.accumulate)
    cut, rows = P(axes), P(mesh.axis_names)
    specs = specs_of(functools.partial(_init_local, run), mesh, axes, cut, shards)
    shards, state, loss, skipped = jax.shard_map(
        functools.partial(_step_local, run),
        mesh=mesh,
        in_specs=(cut, specs, rows),
        out_specs=(cut, specs, rows, P()),
    )(shards, state, batch)
    return shards, state, {"loss": loss, "skipped": skipped}


def _step_local(run, shards, state, batch):
    axes = run.fsdp.axes
    loss, grads, tallies = _mean_gradients(run, shards, state, batch)
    shards, grads = unstack((shards, grads), axes)
    tables, rounds = _fitted(run.fsdp, shards, state, tallies)
    updates, inner = run.tx.update(grads, state.inner, shards, value=lax.pmean(loss, axes))
    new = optax.apply_updates(shards, updates), inner
    (shards, inner), skipped = all_or_nothing(updates, new, (shards, state.inner))
    state = QSDPState(optax.safe_increment(state.count), inner, tables, rounds)
    return stack(shards, axes), state, loss[None], skipped


def _of_pieces(tx):
    """An optimizer of shards: it sees their parameters' ranks, and has to work entry by entry."""
    tx = optax.with_extra_args_support(tx)
    mapped = lambda of: functools.partial(
        map_shards, lambda shard: dataclasses.replace(shard, data=of(shard))
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
            "the optimizer alone, as optax.adamw(1e-3)."
        )


def _fitted(fsdp, shards, state, tallies):
    """Levels and rounds after a step; outside of the schedule's steps all stays as it is."""
    if not state.rounds:
        return state.levels, state.rounds
    due = fsdp.fit_at(state.count)
    fit = lambda tables: levels.refit(tables, shards, tallies, fsdp.axes)
    tables = lax.cond(due, fit, lambda tables: tables, state.levels)
    new = {"all": state.rounds["all"] + 1, "levels": state.rounds["levels"] + due}
    return tables, new


def _mean_gradients(run, shards, state, batch):
    """The loss and the shards' gradient, in the mean over this replica's microbatches.

    And the tallies of what was sent of it, in a step in which levels are fitted.
    """
    loss_fn, fsdp, accumulate = run.loss_fn, run.fsdp, run.accumulate
    counters = levels.counters(unstack(shards, fsdp.axes), fsdp.fit_at(state.count))
    counters = to_varying(counters, fsdp.axes)  # else JAX sums tallies in every step
    own = shards, counters

    def local(index, shards, counters):
        return fsdp.local(shards, state.count, index, levels=state.levels, counters=counters)

    def of_shards(index, part):
        loss = lambda *own: loss_fn(local(index, *own), part)
        return jax.value_and_grad(loss, argnums=(0, 1))(*own)

    def of_params(_, part):
        return jax.value_and_grad(loss_fn)(params, part)

    def mean(value_and_grad, like):
        """In the dtypes of `like`: those of cotangents, and of what `tx` was made for."""
        loss, grads = mean_over_microbatches(value_and_grad, accumulate, like, batch)
        return loss, jax.tree.map(lambda g, x: g.astype(x.dtype), grads, like)

    if fsdp.gather_once:
        params, scattered = jax.vjp(lambda *own: fsdp.gather(local(0, *own)), *own)
        loss, grads = mean(of_params, params)
        grads = scattered(grads)
    else:
        loss, grads = mean(of_shards, own)
    require_local(loss, *fsdp.axes)
    return loss, *grads
