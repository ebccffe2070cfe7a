"""Learned levels of sharded parameters: tables, equal on all replicas, that some steps fit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.replicas.shards import Shard, is_shard, map_shards


class Tables(NamedTuple):
    """Levels of one parameter's two codes, `f32[*stack, 2**bits]`; None for fixed levels."""

    weights: Any
    gradients: Any


def start(shards: Any) -> Any:
    """A tree of `Tables`, one per `Shard`, with the initial levels."""
    table = lambda code, shard: _stacked(code.levels and code.levels.start, shard)
    return map_shards(lambda s: Tables(table(s.weights, s), table(s.gradients, s)), shards)


def counters(shards: Any, due: jax.Array) -> Any:
    """Counters whose gradient is the tally of gradients: `f32[*stack, bins]` or None per parameter.

    Ones in steps in which counting is `due`, else zeros; see `Shard.counter`.
    """

    def counter(shard):
        levels = shard.gradients.levels
        if levels is None:
            return None
        bins = jax.eval_shape(levels.tally, jnp.zeros(1)).shape
        return _stacked(jnp.broadcast_to(due.astype(jnp.float32), bins), shard)

    return map_shards(counter, shards)


def refit(tables: Any, shards: Any, tallies: Any, axis_name: str | tuple[str, ...]) -> Any:
    """New tables, fitted to the weights of all shards and to the tallied gradients.

    `tallies` is the gradient with respect to `counters`, from a step in which they were due. The
    result is equal on all replicas.
    """

    def jobs(shard, tables, tally):
        weights, gradients = shard.weights.levels, shard.gradients.levels
        return [
            weights and _Job(shard.weights, tables.weights, _tally(weights.tally, shard.data)),
            gradients and _Job(shard.gradients, tables.gradients, tally),
        ]

    leaves, treedef = jax.tree.flatten(shards, is_leaf=is_shard)
    rest = treedef.flatten_up_to(tables), treedef.flatten_up_to(tallies)
    pairs = [jobs(*leaf) for leaf in zip(leaves, *rest, strict=True)]
    fitted = iter(_fit([job for pair in pairs for job in pair if job], axis_name))
    return treedef.unflatten([Tables(*[job and next(fitted) for job in pair]) for pair in pairs])


class _Job(NamedTuple):
    code: Any
    table: jax.Array  # f32[*stack, 2**bits]
    tally: jax.Array  # f32[*stack, bins], of this replica


def _fit(jobs: list[_Job], axis_name: str | tuple[str, ...]) -> list[jax.Array]:
    """The new tables; tables of one code are fitted together, in one message."""
    fitted = [job.table for job in jobs]
    for code in dict.fromkeys(job.code for job in jobs):
        chosen = [index for index, job in enumerate(jobs) if job.code == code]
        flat = lambda xs: jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in xs])
        with jax.named_scope("jaxcomp.levels"):
            tallies = lax.psum(flat([jobs[i].tally for i in chosen]), axis_name)
        rows = jax.vmap(code.levels.fit)(flat([jobs[i].table for i in chosen]), tallies)
        for i in chosen:
            shape = jobs[i].table.shape
            own, rows = jnp.split(rows, [jobs[i].table.size // shape[-1]])
            fitted[i] = own.reshape(shape)
    return fitted


def _tally(tally: Callable, data: jax.Array) -> jax.Array:
    """Tallies each layer of a shard separately."""
    return jax.vmap(tally)(data) if data.ndim > 1 else tally(data)


def _stacked(value: Any, shard: Shard) -> Any:
    if value is None:
        return None
    return jnp.broadcast_to(value, (*shard.data.shape[:-1], *value.shape))
