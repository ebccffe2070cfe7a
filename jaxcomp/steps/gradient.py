"""The first half of a step: each replica's own gradient, of its part of the batch."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.state import add_drifts
from jaxcomp.replicas.types import is_tracked, names_of, varying_axes


class Gradient(NamedTuple):
    """How the replicas of a mesh compute their gradients."""

    loss_fn: Callable[[Any, Any], jax.Array]  # the mean loss of a replica's batch
    mesh: Mesh | AbstractMesh
    axis_name: str | tuple[str, ...]  # of the replicas, and of the devices of each
    accumulate: int = 1  # microbatches that a replica's batch is cut into


def all_gradients(
    gradient: Gradient, params: Any, drifts: Any, batch: Any
) -> tuple[jax.Array, Any]:
    """Losses and gradients of all replicas, in rows: `(f32[num_replicas], [num_replicas, ...])`.

    Nothing crosses the axis of the replicas. `params` is the consensus, `drifts` are the state's
    fields `drift`, the batch is global.
    """
    _, mesh, axis_name, accumulate = gradient
    names = names_of(axis_name)
    check_batch(batch, axis_name, math.prod(mesh.shape[name] for name in names), accumulate)
    return jax.shard_map(
        functools.partial(local_gradient, gradient),
        mesh=mesh,
        in_specs=(P(), P(names[0]), P(axis_name)),
        out_specs=P(axis_name),
        axis_names=set(names),  # the other axes are XLA's
    )(params, drifts, batch)


def local_gradient(
    gradient: Gradient, params: Any, drifts: Any, batch: Any
) -> tuple[jax.Array, Any]:
    """`(f32[1], grads with a leading axis of one)`: the mean over this replica's microbatches."""
    loss_fn, _, axis_name, accumulate = gradient
    local = add_drifts(params, drifts, axis_name)
    at_local = lambda _, part: jax.value_and_grad(loss_fn)(local, part)
    loss, grads = mean_over_microbatches(at_local, accumulate, local, batch)
    require_local(loss, *names_of(axis_name))
    return loss[None], jax.tree.map(lambda g: g[None], grads)


def check_accumulate(accumulate: int) -> None:
    """Raises a ValueError for less than one microbatch."""
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; write at least 1.")


def check_batch(batch: Any, axis_name: Any, num_replicas: int, accumulate: int) -> None:
    """Raises a ValueError for a batch that cannot be divided."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or leaf.shape[0] % (num_replicas * accumulate):
            raise ValueError(
                f"the batch's leaf {jax.tree_util.keystr(path)!r} has shape {leaf.shape}, but its "
                f"first axis must be divisible by {num_replicas * accumulate}: {num_replicas} "
                f"replicas over {axis_name!r} times accumulate={accumulate}."
            )


def mean_over_microbatches(
    value_and_grad: Callable, accumulate: int, like: Any, batch: Any
) -> tuple[jax.Array, Any]:
    """Means of `value_and_grad(index, microbatch)` over the parts of a batch, in turn.

    Of several parts the gradients, which are like `like`, are added in float32 or wider: no
    narrower dtype of the parameters rounds a mean before it is coded.
    """
    if accumulate == 1:
        return value_and_grad(0, batch)
    parts = jnp.arange(accumulate), microbatches(accumulate, batch)
    total, losses = added(value_and_grad, no_gradients(like), parts)
    return jnp.mean(losses), jax.tree.map(lambda t: t / accumulate, total)


def microbatches(accumulate: int, batch: Any) -> Any:
    """A batch with a leading axis of its parts."""
    return jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)


def no_gradients(like: Any) -> Any:
    """The sum of the gradients of no microbatch."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, "float32")), like)


def added(value_and_grad: Callable, total: Any, parts: tuple[jax.Array, Any]) -> tuple[Any, Any]:
    """Adds the gradients of microbatches, in turn: `(total, losses)`."""

    def add(total, indexed):
        loss, grads = value_and_grad(*indexed)
        return jax.tree.map(jnp.add, total, grads), loss

    return lax.scan(add, total, parts)


def require_local(loss: jax.Array, *axes: str) -> None:
    """Raises a ValueError if a loss is equal on all replicas: JAX differentiates it once for all.

    Where no types tell, under `jax.vmap`, that is a loss without an axis of replicas.
    """
    if varying_axes(loss).issuperset(axes) if is_tracked(axes) else _is_batched(loss):
        return
    raise ValueError(
        f"the loss is equal on all replicas over {axes}: it was averaged over them, as by "
        "jax.lax.pmean, or depends on neither parameters nor batch; its gradients would be "
        "divided by the number of replicas. Return the mean loss of the local batch: the step "
        "averages gradients, and metrics['loss'] has the loss of every replica."
    )


def _is_batched(x: jax.Array) -> bool:
    """Whether `jax.vmap` maps `x`: of a function with a rule for that, it calls the rule."""
    seen = []
    note = jax.custom_batching.custom_vmap(lambda x: x)

    @note.def_vmap
    def rule(axis_size, in_batched, x):
        seen.append(axis_size)
        return x, in_batched[0]

    note(x)
    return bool(seen)
