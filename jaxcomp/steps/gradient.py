"""The first half of a step: each replica's gradient on its part of the batch."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import is_count
from jaxcomp.replicas.state import add_drifts
from jaxcomp.replicas.types import names_of, to_varying
from jaxcomp.steps import loss as losses
from jaxcomp.steps import placing
from jaxcomp.steps.loss import Extra, called, folded, own_floats, replica_key, require_local


class Gradient(NamedTuple):
    """How the replicas of a mesh compute their gradients."""

    loss_fn: Callable[..., Any]  # the mean loss of a replica's batch, called by `loss.called`
    mesh: Mesh | AbstractMesh
    axis_name: str | tuple[str, ...]  # of the replicas, and of the devices of each
    accumulate: int = 1  # microbatches that a replica's batch is cut into
    has_aux: bool = False
    batch_specs: Any = None  # of the batch, a tree or a prefix


def all_gradients(
    gradient: Gradient,
    params: Any,
    drifts: Any,
    batch: Any,
    rng: Any = None,
    model_state: Any = None,
    scale: jax.Array | None = None,
) -> tuple[jax.Array, Any, Extra]:
    """Losses and gradients of all replicas, in rows: `(f32[num_replicas], [num_replicas, ...])`.

    Also returns the losses' other results: rows of `aux`, one for each call of the loss, and of the
    model state. Nothing is sent between replicas. `params` is the consensus, `drifts` are the
    state's fields `drift`; the batch is global. `rng`, `model_state` and `scale`, f32[], are equal
    everywhere; the loss is multiplied by `scale` for the gradient.
    """
    axis_name, rows = gradient.axis_name, P(gradient.axis_name)
    grads_specs = jax.tree.map(lambda x: P(axis_name, *placing.spec_of(x)), params)
    extra_specs = specs_of_extra(gradient, model_state)
    local = functools.partial(local_gradient, gradient)
    out_specs = (rows, rows, extra_specs), (rows, grads_specs, extra_specs)
    return on_replicas(gradient, local, *out_specs)(params, drifts, batch, rng, model_state, scale)


def on_replicas(
    gradient: Gradient, function: Callable[..., Any], out_specs: Any, full_out_specs: Any
) -> Callable[..., Any]:
    """Runs `function(params, drifts, batch, *rest)` on each replica, for global arrays.

    XLA partitions it over the mesh's other axes. `full_out_specs` are over these, too.
    """
    names = names_of(gradient.axis_name)

    def whole(params, drifts, batch, *rest):
        batch, specs = placed_batch(gradient, batch)
        drifts = placing.placed_rows(gradient.mesh, drifts, names[0])
        cut = placing.over_replicas(specs, names)
        mapped = lambda *args: jax.shard_map(
            function,
            mesh=placing.within(gradient.mesh),
            in_specs=(P(), P(names[0]), cut, *[P()] * len(rest)),
            out_specs=out_specs,
            axis_names=set(names),
        )(*args)
        mapped = placing.on_auto_axes(gradient.mesh, mapped, full_out_specs)
        return mapped(params, drifts, batch, *rest)

    return whole


def placed_batch(gradient: Gradient, batch: Any) -> tuple[Any, Any]:
    """The batch, checked and placed on the replicas, and its PartitionSpecs."""
    mesh, axis_name = gradient.mesh, gradient.axis_name
    specs = placing.full_batch_specs(gradient.batch_specs, batch, axis_name)
    num_replicas = placing.num_parts(mesh, axis_name)
    placing.check_batch(batch, axis_name, num_replicas, gradient.accumulate, specs)
    return placing.placed(mesh, batch, specs), specs


def specs_of_extra(gradient: Gradient, model_state: Any) -> Extra:
    """The PartitionSpecs of the losses' other results."""
    rows = losses.specs_of_rows(model_state, gradient.axis_name)
    return Extra(P(gradient.axis_name), rows)


def local_gradient(
    gradient: Gradient,
    params: Any,
    drifts: Any,
    batch: Any,
    rng: Any,
    model_state: Any,
    scale: jax.Array | None,
) -> tuple[jax.Array, Any, Extra]:
    """`all_gradients` for one replica: the means over its microbatches, as one row."""
    axis_name = gradient.axis_name
    local = add_drifts(params, drifts, axis_name)
    batch = placing.sharded_batch(batch, gradient.batch_specs, axis_name)
    loss_of = loss_of_part(gradient, batch, rng)

    def scaled(params, *part):
        loss, extra = loss_of(params, *part)
        return (loss if scale is None else loss * scale), extra

    def at_local(*part):
        return jax.value_and_grad(scaled, has_aux=True)(local, *part)

    model_state = own_floats(model_state, axis_name)
    (loss, extra), grads = mean_over_microbatches(gradient, at_local, local, batch, model_state)
    require_local(loss, *names_of(axis_name))
    loss = loss if scale is None else loss / scale
    return loss[None], jax.tree.map(lambda g: g[None], grads), in_rows(gradient, extra)


def in_rows(gradient: Gradient, extra: Extra) -> Extra:
    """This replica's other results of the loss, each with a leading axis."""
    aux = to_varying(extra.aux, gradient.axis_name)
    return Extra(aux, losses.rows_of(extra.model_state))


def metrics_of(
    gradient: Gradient, loss: jax.Array, skipped: jax.Array, extra: Extra, model_state: Any
) -> dict[str, Any]:
    """The metrics of a step, from the rows of `all_gradients`.

    `model_state` is the one before the step.
    """
    new = losses.averaged_rows(
        gradient.mesh, gradient.axis_name, model_state, extra.model_state, skipped
    )
    return as_metrics(loss, skipped, extra.aux, new)


def as_metrics(loss: Any, skipped: Any, aux: Any, model_state: Any) -> dict[str, Any]:
    """The metrics by name, without those that are None."""
    beside = {"aux": aux, "model_state": model_state}
    beside = {name: value for name, value in beside.items() if value is not None}
    return {"loss": loss, "skipped": skipped, **beside}


def loss_of_part(gradient: Gradient, batch: Any, rng: Any) -> Callable[..., Any]:
    """`(params, index, part, model_state) -> (loss, Extra)`, for a part of this replica's batch.

    Each part has a key of its own, from the step's key, the replica and the index.
    """
    key = replica_key(rng, gradient.axis_name)

    def loss_of(params, index, part, model_state):
        own = folded(key, index)
        part = placing.with_uncut_leaves(part, batch)
        loss, extra = called(gradient.loss_fn, gradient.has_aux, params, part, own, model_state)
        kept = own_floats(extra.model_state, gradient.axis_name)
        return loss, extra._replace(model_state=kept)

    return loss_of


def check_accumulate(accumulate: int) -> None:
    """Raises a ValueError for what is no number of microbatches."""
    if not is_count(accumulate):
        raise ValueError(f"accumulate is {accumulate!r}; write at least 1, as an integer.")


def mean_over_microbatches(
    gradient: Gradient, value_and_grad: Callable, like: Any, batch: Any, model_state: Any
) -> tuple[tuple[jax.Array, Extra], Any]:
    """Means of `value_and_grad(index, microbatch, model_state)` over microbatches, in order.

    Gradients, shaped like `like`, are added in float32 or wider, so that narrow parameters do not
    round a mean before it is encoded. Each part gets the model state of the one before it, and adds
    a row of `aux`.
    """
    accumulate = gradient.accumulate
    if accumulate == 1:
        (loss, extra), grads = value_and_grad(0, batch, model_state)
        return (loss, extra._replace(aux=jax.tree.map(lambda x: x[None], extra.aux))), grads
    start = no_gradients(like), model_state
    (total, model_state), (losses, aux) = added(value_and_grad, start, parts_of(gradient, batch))
    extra = Extra(aux, model_state)
    return (jnp.mean(losses), extra), jax.tree.map(lambda t: t / accumulate, total)


def parts_of(gradient: Gradient, batch: Any) -> tuple[jax.Array, Any]:
    """The indices of the microbatches, and a batch with a leading axis of them."""
    specs = placing.full_batch_specs(gradient.batch_specs, batch, gradient.axis_name)
    parts = placing.microbatches(gradient.accumulate, batch, specs, gradient.axis_name)
    return jnp.arange(gradient.accumulate), parts


def no_gradients(like: Any) -> Any:
    """Zeros, to add gradients of microbatches to."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, "float32")), like)


def added(value_and_grad: Callable, start: tuple[Any, Any], parts: tuple[jax.Array, Any]) -> Any:
    """Adds the gradients of microbatches in order: `((total, model_state), (losses, aux))`."""

    def add(carry, part):
        total, model_state = carry
        (loss, extra), grads = value_and_grad(*part, model_state)
        return (jax.tree.map(jnp.add, total, grads), extra.model_state), (loss, extra.aux)

    return lax.scan(add, start, parts)
