"""A whole training step over a mesh: local gradients, exchange, update, all or nothing."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.exchange import averaging
from jaxcomp.replicas.elementwise import require_whole_norms
from jaxcomp.replicas.specs import full_specs, state_specs
from jaxcomp.replicas.state import add_drifts, fields, has_feedback, per_replica
from jaxcomp.replicas.types import is_tracked, require_alike, to_varying, varies_over, varying_axes


class TrainStep(NamedTuple):
    """The jitted functions of one training run."""

    init: Callable[[Any], Any]  # params -> state
    step: Callable[[Any, Any, Any], tuple[Any, Any, dict]]  # params, state, batch -> ..., metrics


def train_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    accumulate: int = 1,
) -> TrainStep:
    """Makes jitted `init` and `step` of a loss and a transformation, over the replicas of a mesh.

    Gradients are taken at each replica's own parameters and never summed by JAX; the
    transformation runs with all mesh axes manual, on local shards. If the update is not finite,
    parameters and state stay as they were on all replicas. Not so if a field of the state counts
    `skipped` (`cocktail_sgd`, `slamb`, `zero_one_adam`): there a replica whose gradient is not
    finite leaves its step out by itself and counts it, and the others go on, unless a method
    beside it, as in `optax.partition`, leaves that to the step.

    Args:
      loss_fn: `(params, batch) -> f32[]`, the mean loss over the batch that it is given, a
        replica's own: no `jax.lax.pmean` of it.
      tx: Transformation that averages over `axis_name`; `per_replica` is put around it. Its
        `update` gets extra arguments: `axis_name`, and `value`, the mean loss of all replicas,
        for `optax.contrib.reduce_on_plateau`; 4 bytes are sent where something uses it.
      mesh: Its axis `axis_name` is the slow one; over other axes, of type Auto, `param_specs`
        say how parameters are sharded and XLA partitions `loss_fn`.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters, a tree or a prefix; replicated by default.
      accumulate: Microbatches that a replica's batch is cut into, in turn; one exchange a step.

    Returns:
      `init(params) -> state` and `step(params, state, batch) -> (params, state, metrics)`.
      `batch` is a pytree of global arrays whose first axis is divisible by num_replicas *
      accumulate and sharded over `axis_name`. `step` donates params and state. Metrics: `loss`,
      f32[num_replicas], the loss on each replica's part of the batch before the update, not
      averaged, so that it costs no message; `skipped`, bool[], whether all left this step out:
      False for methods whose state counts `skipped`.

    Raises:
      ValueError: At construction for `accumulate` below 1. At the first call, if `axis_name` is no
        axis of the mesh, the batch cannot be divided, the loss is equal on all replicas, or the
        updates that reach or leave `tx` are not what they must be.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}; write at least 1.")
    tx = per_replica(tx, axis_name)
    specs_of = functools.partial(
        state_specs, tx, mesh=mesh, axis_name=axis_name, param_specs=param_specs
    )

    @jax.jit
    def init(params):
        in_specs = full_specs(params, mesh, axis_name, param_specs)
        return jax.shard_map(tx.init, mesh=mesh, in_specs=(in_specs,), out_specs=specs_of(params))(
            params
        )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        check_batch(batch, axis_name, mesh.shape[axis_name], accumulate)
        p_specs, s_specs = full_specs(params, mesh, axis_name, param_specs), specs_of(params)
        rows = jax.tree.map(lambda p, spec: P(axis_name, *spec), params, p_specs)
        local_grads = jax.shard_map(
            functools.partial(local_gradients, loss_fn, axis_name, accumulate),
            mesh=mesh,
            in_specs=(P(), P(axis_name), P(axis_name)),
            out_specs=P(axis_name),
            axis_names={axis_name},  # the other axes are XLA's
        )
        apply = jax.shard_map(
            functools.partial(apply_update, tx, axis_name),
            mesh=mesh,
            in_specs=(p_specs, s_specs, rows, P(axis_name)),
            out_specs=(p_specs, s_specs, P()),
        )
        loss, grads = local_grads(params, fields(state, "drift"), batch)
        params, state, skipped = apply(params, state, grads, loss)
        return params, state, {"loss": loss, "skipped": skipped}

    return TrainStep(init, step)


def check_batch(batch, axis_name, num_replicas, accumulate):
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim == 0 or leaf.shape[0] % (num_replicas * accumulate):
            raise ValueError(
                f"the batch's leaf {jax.tree_util.keystr(path)!r} has shape {leaf.shape}, but its "
                f"first axis must be divisible by {num_replicas * accumulate}: {num_replicas} "
                f"replicas over {axis_name!r} times accumulate={accumulate}."
            )


def local_gradients(loss_fn, axis_name, accumulate, params, drifts, batch):
    """`(f32[1], grads with a leading axis of one)`: the mean over this replica's microbatches."""
    local = add_drifts(params, drifts, axis_name)
    at_local = lambda _, part: jax.value_and_grad(loss_fn)(local, part)
    loss, grads = mean_over_microbatches(at_local, accumulate, local, batch)
    require_local(loss, axis_name)
    return loss[None], jax.tree.map(lambda g: g[None], grads)


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


def _is_batched(x):
    """Whether `jax.vmap` maps `x`: of a function with a rule for that, it calls the rule."""
    seen = []
    note = jax.custom_batching.custom_vmap(lambda x: x)

    @note.def_vmap
    def rule(axis_size, in_batched, x):
        seen.append(axis_size)
        return x, in_batched[0]

    note(x)
    return bool(seen)


def mean_over_microbatches(value_and_grad, accumulate, like, batch):
    """Means of a loss and of a gradient like `like`, of at least float32 if there are several.

    Of `value_and_grad(index, microbatch)`, for the parts that the batch is cut into, in turn. No
    narrower dtype of the parameters rounds a mean before it is coded.
    """
    micro = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), batch)
    zero = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, "float32")), like)

    def add(total, indexed):
        loss, grads = value_and_grad(*indexed)
        return jax.tree.map(jnp.add, total, grads), loss

    if accumulate == 1:
        return value_and_grad(0, batch)
    total, losses = lax.scan(add, zero, (jnp.arange(accumulate), micro))
    return jnp.mean(losses), jax.tree.map(lambda t: t / accumulate, total)


def apply_update(tx, axis_name, params, state, grads, loss, **extra_args):
    """One update on local shards; where it is not finite, everything stays as it was.

    Not so for methods whose state counts `skipped`: they leave out what is not finite by
    themselves, and need no second copy of their state until it is known.
    """
    grads = jax.tree.map(lambda g: g[0], grads)
    extra_args["value"] = lax.pmean(loss[0], axis_name)  # XLA sends nothing if nobody uses it
    update = functools.partial(tx.update, axis_name=axis_name, **extra_args)
    updates, new_state = update(grads, state, params)
    # Gradients of microbatches are wider than narrow parameters, and so what optax adds to them.
    new_state = jax.tree.map(_in_dtype_of, new_state, state)
    _require_averaged(updates, axis_name)
    require_alike(updates, params, axis_name)
    require_whole_norms(update, grads, state, params, axis_name=axis_name)
    new_params = optax.apply_updates(params, updates)
    if fields(state, "skipped") and not _any_makes_nan(state):
        return new_params, new_state, jnp.zeros([], bool)
    # All shards of a replica must agree; that all replicas do, their type says already.
    skipped = averaging.not_finite(updates) > 0
    keep = functools.partial(jnp.where, ~skipped)
    params, state = jax.tree.map(keep, (new_params, new_state), (params, state))
    return params, state, skipped


def _in_dtype_of(new, old):
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _any_makes_nan(state):
    """Whether a method beside, as in `optax.partition`, leaves it to the step to leave one out."""
    nodes = filter(has_feedback, jax.tree.leaves(state, is_leaf=has_feedback))
    return not all("skipped" in node._fields for node in nodes)


def _require_averaged(updates, axis_name):
    for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
        if varies_over(leaf, axis_name):
            raise ValueError(
                f"the update of {jax.tree_util.keystr(path)!r} still varies over {axis_name!r} "
                "when it leaves the transformation: nothing in it averages over the replicas. "
                "For this leaf write optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "
                f"{axis_name!r}), ...); to freeze it, with optax.set_to_zero() behind the mean."
            )


def replica_spread(params: Any, mesh: Mesh, axis_name: str) -> jax.Array:
    """How far apart the replicas' copies of what should be one value are: 0 if bit for bit equal.

    JAX's types promise equality of replicated values but lose track in some operations; this
    compares the copies on the devices.

    Args:
      params: Pytree of arrays that are replicated over `axis_name`.
      mesh: The mesh they live on.
      axis_name: The axis of the replicas.

    Returns:
      u32[]: the largest minus the smallest of the replicas' checksums of bits. Sends two
      all-reduces of 4 bytes.
    """
    leaves = jax.tree.leaves(params)
    specs = tuple(getattr(x.sharding, "spec", P()) for x in leaves)
    return _spread(mesh, axis_name, specs)(leaves)


@functools.lru_cache(maxsize=16)
def _spread(mesh, axis_name, specs):
    """The jitted comparison, kept: a training loop calls it again and again."""
    others = tuple(name for name in mesh.axis_names if name != axis_name)

    def spread(leaves):
        total = sum(_checksum(x) for x in to_varying(leaves, axis_name))
        for name in others:
            total = lax.psum(total, name) if varies_over(total, name) else total
        return lax.pmax(total, axis_name) - lax.pmin(total, axis_name)

    return jax.jit(jax.shard_map(spread, mesh=mesh, in_specs=(list(specs),), out_specs=P()))


def _checksum(x) -> jax.Array:
    """u32[]: a sum of the bits, each word weighted by an odd number of its position."""
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    words = lax.bitcast_convert_type(x, jnp.uint8).reshape(-1).astype(jnp.uint32)
    weights = 2 * lax.iota(jnp.uint32, words.size) + 1
    return jnp.sum(words * weights, dtype=jnp.uint32)
