"""A whole training step of sharded parameters: gathered forward and backward, updated in shards."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp import levels
from jaxcomp.qsdp import QSDP
from jaxcomp.sharding import largest, per_replica, stack, to_varying, unstack
from jaxcomp.specs import specs_of
from jaxcomp.step import TrainStep, check_batch


class QSDPState(NamedTuple):
    """State of `qsdp_train_step`."""

    count: jax.Array  # i32[], steps so far, skipped ones included; the source of all keys
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

    Gradients arrive at the shards as means over the replicas; nothing else is exchanged, but for
    one float32 that says whether all of the update is finite. If it is not, parameters and
    optimizer stay as they were on all replicas.

    Args:
      loss_fn: `(shards, batch) -> f32[]`, the mean loss over the batch that it is given. It gets
        what `fsdp.local` returns, and uses it by `fsdp.gather` and `fsdp.layer`.
      tx: Any optimizer whose update of an entry depends on that entry alone, as Adam's. Norms of
        a whole gradient, as for `jaxcomp.clip_by_global_norm`, have to be summed over
        `fsdp.axes`; it does that.
      mesh: Of the axes `fsdp.axes`, in any order, and no others.
      fsdp: As `jaxcomp.qsdp` makes it.
      accumulate: Microbatches that a replica's batch is cut into, in turn. Each gathers the
        weights and scatters gradients anew, with draws of its own.

    Returns:
      `init(shards) -> QSDPState` and `step(shards, state, batch) -> (shards, state, metrics)`,
      with shards from `fsdp.shard`, the batch and the metrics as for `jaxcomp.train_step`, their
      first axis sharded over all axes of the mesh, in its order. `step` donates shards and state.

    Raises:
      ValueError: At construction, if the mesh has other axes than `fsdp.axes`; at the first call,
        if the batch cannot be divided.
    """
    axes = fsdp.axes
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; write at least 1.")
    if set(mesh.axis_names) != set(axes):
        raise ValueError(
            f"qsdp_train_step got a mesh of axes {mesh.axis_names}, needs one of {axes} and no "
            "others; of a slow and a fast axis write qsdp(slow, fast_axis=fast)."
        )
    tx = per_replica(tx, axes)
    cut, rows = P(axes), P(mesh.axis_names)
    sharded = functools.partial(jax.shard_map, mesh=mesh)

    def begin(shards):
        shards = unstack(shards, axes)
        tables = levels.start(shards)
        rounds = {"all": jnp.int32(0), "levels": jnp.int32(0)} if jax.tree.leaves(tables) else {}
        return QSDPState(jnp.int32(0), tx.init(shards), tables, rounds)

    state_specs = specs_of(begin, mesh, axes)

    def one_step(shards, state, batch):
        loss, grads, tallies = _mean_gradients(loss_fn, fsdp, accumulate, shards, state, batch)
        shards, grads = unstack((shards, grads), axes)
        tables, rounds = _fitted(fsdp, shards, state, tallies)
        updates, inner = tx.update(grads, state.inner, shards)
        bad = ~jnp.all(jnp.stack([jnp.all(jnp.isfinite(u)) for u in jax.tree.leaves(updates)]))
        skipped = largest(bad.astype(jnp.float32)) > 0
        new = optax.apply_updates(shards, updates), inner
        shards, inner = jax.tree.map(
            functools.partial(jnp.where, ~skipped), new, (shards, state.inner)
        )
        state = QSDPState(optax.safe_increment(state.count), inner, tables, rounds)
        return stack(shards, axes), state, loss[None], skipped

    @jax.jit
    def init(shards):
        return sharded(begin, in_specs=cut, out_specs=state_specs(cut, shards))(shards)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(shards, state, batch):
        check_batch(batch, mesh.axis_names, mesh.size, accumulate)
        specs = state_specs(cut, shards)
        shards, state, loss, skipped = sharded(
            one_step, in_specs=(cut, specs, rows), out_specs=(cut, specs, rows, P())
        )(shards, state, batch)
        return shards, state, {"loss": loss, "skipped": skipped}

    return TrainStep(init, step)


def _fitted(fsdp, shards, state, tallies):
    """Levels and rounds after a step; outside of the schedule's steps all stays as it is."""
    if not state.rounds:
        return state.levels, state.rounds
    due = fsdp.fit_at(state.count)
    fit = lambda tables: levels.refit(tables, shards, tallies, fsdp.axes)
    tables = lax.cond(due, fit, lambda tables: tables, state.levels)
    new = {"all": state.rounds["all"] + 1, "levels": state.rounds["levels"] + due}
    return tables, new


def _mean_gradients(loss_fn, fsdp, accumulate, shards, state, batch):
    """The loss and the shards' gradient, in the mean over this replica's microbatches.

    And the tallies of what was sent of it, in a step in which levels are fitted.
    """
    micro = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
    counters = levels.counters(unstack(shards, fsdp.axes), fsdp.fit_at(state.count))
    counters = to_varying(counters, fsdp.axes)  # else JAX sums tallies in every step

    def of_part(index, part):
        def loss(shards, counters):
            words = {"levels": state.levels, "counters": counters}
            return loss_fn(fsdp.local(shards, state.count, index, **words), part)

        loss, (grads, tallies) = jax.value_and_grad(loss, argnums=(0, 1))(shards, counters)
        return loss, grads, tallies

    def add(total, indexed):
        return jax.tree.map(jnp.add, total, of_part(*indexed)), None

    if accumulate == 1:
        return of_part(0, batch)
    wide = lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32))
    zero = jnp.float32(0), *jax.tree.map(wide, (shards, counters))
    zero = to_varying(zero, fsdp.axes)
    (loss, grads, tallies), _ = lax.scan(add, zero, (jnp.arange(accumulate), micro))
    grads = jax.tree.map(lambda g, x: (g / accumulate).astype(x.dtype), grads, shards)
    return loss / accumulate, grads, tallies
