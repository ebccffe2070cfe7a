"""The step of `interleaved.py` where other mesh axes shard the parameters.

XLA partitions the loss over these axes, so they may not be manual there; an exchange needs them
manual. So the exchange is cut into stages, each of which makes all axes manual.
"""

import functools
import itertools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.specs import over_some
from jaxcomp.replicas.types import names_of
from jaxcomp.steps import model_state as model_states
from jaxcomp.steps import placing, stages
from jaxcomp.steps.gradient import Gradient, in_rows, placed_batch
from jaxcomp.steps.interleaved import Parts, exchanged, halves
from jaxcomp.steps.loss import Extra, own_floats, require_local
from jaxcomp.steps.update import Update, local_update, update_specs, with_shares


def interleaved_shards(
    gradient: Gradient,
    update: Update,
    params: Any,
    state: Any,
    drifts: Any,
    batch: Any,
    rng: Any = None,
    model_state: Any = None,
    extra_args: Any = None,
) -> tuple[Any, Any, jax.Array, jax.Array, Extra]:
    """As `interleaved`, on a mesh that also has other axes."""
    mesh, axes = gradient.mesh, gradient.axis_name
    names = names_of(axes)
    batch = placed_batch(gradient, batch)
    of_batch = placing.full_batch_specs(gradient.batch_specs, batch, axes)
    of_extra = Extra(P(axes), model_states.specs_of_rows(model_state, axes))
    specs = update_specs(update, params)
    of_replicas = over_some(specs, names)
    update = with_shares(update, params)

    def whole(*args):
        return jax.shard_map(
            functools.partial(_local, gradient, update, over_some(specs, _others(gradient))),
            mesh=placing.within(mesh),
            in_specs=(*of_replicas, P(names[0]), placing.over_replicas(of_batch, axes), *[P()] * 3),
            out_specs=(*of_replicas, P(), P(axes), of_extra),
            axis_names=set(names),
        )(*args)

    whole = placing.on_auto_axes(mesh, whole, (*specs, P(), P(axes), of_extra))
    return whole(params, state, drifts, batch, rng, model_state, extra_args)


def _local(gradient, update, specs, params, state, drifts, batch, rng, model_state, extra_args):
    axes, others = gradient.axis_name, _others(gradient)
    batch = placing.spread(batch, gradient.batch_specs, axes)
    parts = Parts(*halves(gradient, params, drifts, batch, rng, own_floats(model_state, axes)))
    ahead = lambda params, state, extra: exchanged(update, params, state, stages.cut_here, extra)
    of_extra_args = jax.tree.map(lambda _: P(), extra_args)
    given = (*specs, of_extra_args), parts.pace, params, state, extra_args
    made = stages.in_stages(ahead, others, *given)
    loss, extra, grads = parts.finished()
    require_local(loss, *names_of(axes))

    def updated(params, state, grads, loss, extra_args, arrays):
        own = itertools.cycle(stages.inside(made, arrays))
        rows = jax.tree.map(lambda g: g[None], grads)
        ahead = lambda make: next(own)
        return local_update(update, params, state, rows, loss[None], extra_args, ahead=ahead)

    is_value = lambda x: isinstance(x, stages.Value)
    arrays, of_made = (
        jax.tree.map(lambda value, at=at: value[at], made, is_leaf=is_value) for at in (0, 1)
    )
    of_params, of_state = specs
    new = jax.shard_map(
        updated,
        in_specs=(of_params, of_state, of_params, P(), of_extra_args, of_made),
        out_specs=(of_params, of_state, P()),
        axis_names=set(others),
    )(params, state, grads, loss, extra_args, arrays)
    return *new, loss[None], in_rows(gradient, extra)


def _others(gradient):
    """The mesh axes that XLA partitions over."""
    mine = names_of(gradient.axis_name)
    return tuple(name for name in gradient.mesh.axis_names if name not in mine)
