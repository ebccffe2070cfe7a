"""The first half of a step: each replica's gradient on its part of the batch."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import is_count
from jaxcomp.replicas.specs import over_others, over_some
from jaxcomp.replicas.state import add_drifts
from jaxcomp.replicas.types import names_of, to_varying
from jaxcomp.steps import placing
from jaxcomp.steps.loss import (
    Extra,
    averaged,
    called,
    folded,
    is_float,
    own_floats,
    require_local,
)


class Gradient(NamedTuple):
    """How the replicas of a mesh compute their gradients."""

    loss_fn: Callable[..., Any]  # the mean loss of a replica's batch, called by `loss.called`
    mesh: Mesh | AbstractMesh
    axis_name: str | tuple[str, ...]  # of the replicas, and of the devices of each
    accumulate: int = 1  # microbatches that a replica's batch is cut into
    has_aux: bool = False
    batch_specs: Any = None  # of the batch, a tree or a prefix


class Given(NamedTuple):
    """What a gradient is computed from, beside the parameters."""

    drifts: Any  # the state's fields `drift`
    batch: Any
    rng: Any = None  # equal everywhere, like the following
    model_state: Any = None
    scale: Any = None  # f32[] or None; for its gradient the loss is multiplied by it


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
    model state. Nothing is sent between replicas. `params` is the consensus; arrays are global. The
    other arguments are those of `Given`.
    """
    axis_name, rows = gradient.axis_name, P(gradient.axis_name)
    grads_specs = jax.tree.map(lambda x: P(axis_name, *placing.spec_of(x)), params)
    extra_specs = specs_of_extra(gradient, model_state)
    local = functools.partial(local_gradient, gradient)
    out_specs = (rows, rows, extra_specs), (rows, grads_specs, extra_specs)
    given = Given(drifts, batch, rng, model_state, scale)
    return on_replicas(gradient, local, *out_specs)(params, given)


def on_replicas(
    gradient: Gradient, function: Callable[..., Any], out_specs: Any, full_out_specs: Any
) -> Callable[..., Any]:
    """Runs `function(params, given)` on each replica, for global arrays.

    XLA partitions it over the mesh's other axes. `full_out_specs` are over these, too.
    """
    mesh, names = gradient.mesh, names_of(gradient.axis_name)

    def whole(params, given):
        given, specs = placed_given(gradient, given)
        given = given._replace(drifts=placing.placed_rows(mesh, given.drifts, names[0]))
        in_specs = P(), over_some(specs, names)
        mapped = placing.over_axes(mesh, names, function, in_specs, out_specs, full_out_specs)
        return mapped(params, given)

    return whole


def placed_given(gradient: Gradient, given: Given) -> tuple[Given, Given]:
    """What a step gets, with the batch placed on the replicas, and its PartitionSpecs."""
    batch, batch_specs = placed_batch(gradient, given.batch)
    rows = P(names_of(gradient.axis_name)[0])
    return given._replace(batch=batch), Given(rows, batch_specs, P(), P(), P())


def placed_batch(gradient: Gradient, batch: Any) -> tuple[Any, Any]:
    """The batch, checked and placed on the replicas, and its PartitionSpecs."""
    specs = checked_specs(gradient, batch)
    return placing.placed(gradient.mesh, batch, specs), specs


def checked_specs(gradient: Gradient, batch: Any) -> Any:
    """The PartitionSpecs of a batch; a ValueError for one that cannot be divided."""
    axis_name, accumulate = gradient.axis_name, gradient.accumulate
    num_replicas = math.prod(gradient.mesh.shape[name] for name in names_of(axis_name))
    specs = placing.full_batch_specs(gradient.batch_specs, batch, axis_name)
    leaves = jax.tree.leaves_with_path(batch)
    for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
        if not placing.is_cut(spec, axis_name):
            continue
        if leaf.ndim == 0 or leaf.shape[0] % (num_replicas * accumulate):
            raise ValueError(
                f"the batch's leaf {jax.tree_util.keystr(path)!r} has shape {leaf.shape}, but its "
                f"first axis must be divisible by {num_replicas * accumulate}: {num_replicas} "
                f"replicas over {axis_name!r} times accumulate={accumulate}. What all replicas "
                "hold alike has batch_specs P()."
            )
    return specs


def own_batch(gradient: Gradient, batch: Any) -> Any:
    """This replica's batch, cut over the other axes that `batch_specs` name."""
    specs = placing.full_batch_specs(gradient.batch_specs, batch, gradient.axis_name)
    rest = over_others(specs, names_of(gradient.axis_name))
    return jax.tree.map(placing.constrained, batch, rest)


def specs_of_extra(gradient: Gradient, model_state: Any) -> Extra:
    """The PartitionSpecs of the losses' other results: rows, where replicas may differ."""
    rows = P(gradient.axis_name)
    return Extra(rows, jax.tree.map(lambda x: rows if is_float(x) else P(), model_state))


def local_gradient(gradient: Gradient, params: Any, given: Given) -> tuple[jax.Array, Any, Extra]:
    """`all_gradients` for one replica: the means over its microbatches, as one row."""
    axis_name, scale = gradient.axis_name, given.scale
    local = add_drifts(params, given.drifts, axis_name)
    batch = own_batch(gradient, given.batch)
    loss_of = loss_of_part(gradient, batch, given.rng)

    def scaled(params, *part):
        loss, extra = loss_of(params, *part)
        return (loss if scale is None else loss * scale), extra

    def at_local(*part):
        return jax.value_and_grad(scaled, has_aux=True)(local, *part)

    model_state = own_floats(given.model_state, axis_name)
    (loss, extra), grads = mean_over_microbatches(gradient, at_local, local, batch, model_state)
    require_local(loss, *names_of(axis_name))
    loss = loss if scale is None else loss / scale
    return loss[None], jax.tree.map(lambda g: g[None], grads), in_rows(gradient, extra)


def in_rows(gradient: Gradient, extra: Extra) -> Extra:
    """This replica's other results of the loss, as rows where `specs_of_extra` has such."""
    aux = to_varying(extra.aux, gradient.axis_name)
    return Extra(aux, jax.tree.map(lambda x: x[None] if is_float(x) else x, extra.model_state))


def metrics_of(
    gradient: Gradient, loss: jax.Array, skipped: jax.Array, extra: Extra, model_state: Any
) -> dict[str, Any]:
    """The metrics of a step, from the rows of `all_gradients`.

    `model_state` is the one before the step.
    """
    if jax.tree.leaves(model_state):
        names = names_of(gradient.axis_name)
        local = functools.partial(averaged, axis_name=names)
        in_specs = P(), specs_of_extra(gradient, model_state).model_state, P()
        mean = placing.over_axes(gradient.mesh, names, local, in_specs, P(), P())
        model_state = mean(model_state, extra.model_state, skipped)
    return as_metrics(loss, skipped, extra.aux, model_state)


def as_metrics(loss: Any, skipped: Any, aux: Any, model_state: Any) -> dict[str, Any]:
    """The metrics by name, without those that are None."""
    beside = {"aux": aux, "model_state": model_state}
    beside = {name: value for name, value in beside.items() if value is not None}
    return {"loss": loss, "skipped": skipped, **beside}


def loss_of_part(gradient: Gradient, batch: Any, rng: Any) -> Callable[..., Any]:
    """`(params, index, part, model_state) -> (loss, Extra)`, for a part of this replica's batch.

    Each part has a key of its own, from the step's key, the replica and the index.
    """
    key = folded(rng, lax.axis_index(names_of(gradient.axis_name)))
    whole = lambda part, leaf: leaf if part is None else part  # None: it is not cut

    def loss_of(params, index, part, model_state):
        own = folded(key, index)
        part = jax.tree.map(whole, part, batch, is_leaf=lambda x: x is None)
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
    """The indices of the microbatches, and a batch with a leading axis of them.

    Leaves that are not cut are None there.
    """
    accumulate = gradient.accumulate
    specs = placing.full_batch_specs(gradient.batch_specs, batch, gradient.axis_name)

    def parts(x, spec, rest):
        if not placing.is_cut(spec, gradient.axis_name):
            return None
        # Not -1, which an array without entries does not determine.
        rows = x.reshape(accumulate, x.shape[0] // accumulate, *x.shape[1:])
        return placing.constrained(rows, P(None, *rest))

    rest = over_others(specs, names_of(gradient.axis_name))
    cut = jax.tree.map(parts, batch, specs, rest)
    return jnp.arange(accumulate), cut


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
