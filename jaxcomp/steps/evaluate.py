"""Evaluation on a mesh: each replica at its own parameters, their mean, and equal copies."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import require_kept
from jaxcomp.exchange import averaging, wire
from jaxcomp.replicas import fast, protocol
from jaxcomp.replicas.specs import full_specs, require_axis
from jaxcomp.replicas.state import add_drifts, by_leaf
from jaxcomp.replicas.types import names_of, sums_over_shards, to_varying
from jaxcomp.steps import untyped
from jaxcomp.steps.compiling import Kept, compiler_options
from jaxcomp.steps.gradient import Given, Gradient, on_replicas, own_batch
from jaxcomp.steps.placing import everywhere, movable, placed
from jaxcomp.steps.update import Update, placed_params, whole_drifts


def eval_step(
    measure_fn: Callable[[Any, Any], Any],
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
    batch_specs: Any = None,
) -> Any:
    """Makes a jitted `(params, state, batch) -> measures` for validation during a run.

    Each replica measures its rows of the batch at its own parameters, `params` plus its drift, and
    the measures are averaged: a few numbers are sent, no parameters. With a method whose replicas
    differ, the consensus lags behind: it lacks what replicas have not exchanged yet. The drift of
    `local_steps` is left out: what a replica did since the last outer step is not yet a step of the
    model. At the end of a run, evaluate and export `jaxcomp.mean_params`.

    Args:
      measure_fn: `(params, batch) -> measures`, any tree of arrays, of one replica's rows. Sums,
        with a number of targets next to them, also suit rows of unlike numbers of targets.
      mesh: As for `jaxcomp.train_step`, like the other arguments.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters.
      fast_axis: The step's `fast_axis`, if it has one.
      batch_specs: PartitionSpecs of the batch.

    Returns:
      The jitted function. `state` is that of `train_step`, of any `per_replica`, or (), and is not
      donated. Measures are means over the replicas, equal everywhere.

    Raises:
      ValueError: As `train_step`, at construction for the axis, at the first call for parameters
        and batch.
    """
    require_axis(mesh, axis_name)
    update = Update(_NO_UPDATE, mesh, axis_name, param_specs, fast_axis)
    on = Gradient(measure_fn, mesh, update.axes, batch_specs=batch_specs)
    program = jax.jit(
        untyped.as_needed(_measured, on, update),
        out_shardings=everywhere(mesh),
        compiler_options=compiler_options(mesh),
    )
    return Kept(program, mesh)


_NO_UPDATE = optax.with_extra_args_support(optax.identity())


def _measured(on, update, params, state, batch):
    params = placed_params(update, params)
    drifts = whole_drifts(update, params, protocol.evaluated_drifts(state))
    rows = P(names_of(on.axis_name))
    measures = on_replicas(on, functools.partial(_own_measures, on), rows, rows)
    return jax.tree.map(lambda x: jnp.mean(x, axis=0), measures(params, Given(drifts, batch)))


def _own_measures(on, params, given):
    """One replica's measures, as a row."""
    local = add_drifts(params, given.drifts, on.axis_name)
    measured = jax.tree.map(jnp.asarray, on.loss_fn(local, own_batch(on, given.batch)))
    return jax.tree.map(lambda x: x[None], to_varying(measured, on.axis_name))


def mean_params(
    params: Any,
    state: Any,
    mesh: Mesh,
    axis_name: str,
    *,
    param_specs: Any = None,
    fast_axis: str | None = None,
) -> Any:
    """Returns the mean of the replicas' own parameters: `params` plus the mean of their `drift`.

    With local steps (`cocktail_sgd`, `local_steps`, `slamb`, `zero_one_adam`), the drift holds the
    changes since the last synchronization, and `params` do not contain them. The mean is computed
    in float32, and is what a synchronization without compression would now make of `params`. It
    leaves out what owners or residuals hold. For `local_steps` it is the plain mean, without the
    outer optimizer; for `zero_one_adam` without its `step_bound`.

    Call it outside `shard_map`, at the end of a run or before you export parameters. It changes no
    state: to continue training, use `params` and `state`.

    Args:
      params: The consensus, global arrays.
      state: The state of `train_step`, or of any `per_replica`.
      mesh: The mesh of the step.
      axis_name: The axis of the replicas.
      param_specs: The step's `param_specs`, if it has any.
      fast_axis: The step's `fast_axis`, if it has one.

    Returns:
      A tree like `params`, equal on all replicas. Leaves without a drift do not change. The others
      cost one float32 all-reduce, the part `mean_params` in the report; for a state without drift
      nothing is sent, and these are `params` themselves, which the next step donates.

    Raises:
      ValueError: If a drift does not have a row per replica, of its parameter's shape.
    """
    require_kept(params, state)
    leaves, treedef = jax.tree.flatten(params)
    columns = [by_leaf(drift, params) for drift in protocol.drifts(state)]
    if not columns:
        return params
    # The drifts of each parameter, rarely more than one.
    drifts = [[x for x in row if not protocol.is_masked(x)] for row in zip(*columns, strict=True)]
    specs = full_specs(params, mesh, axis_name, param_specs)
    specs = tuple(jax.tree.leaves(specs))
    leaves, drifts = movable(mesh, (leaves, drifts))
    return treedef.unflatten(_program(mesh, axis_name, fast_axis, specs)(leaves, drifts))


@functools.lru_cache(maxsize=16)
def _program(mesh, axis_name, fast_axis, specs):
    """The jitted mean, cached for repeated calls."""
    return jax.jit(functools.partial(_mean, mesh, axis_name, fast_axis, list(specs)))


def _mean(mesh, axis_name, fast_axis, specs, params, drifts):
    shares, own, like = None, specs, params
    if fast_axis is not None:
        shares = fast.shares_of(params, specs, mesh, fast_axis)
        like, own = fast.filled(params, shares)
    for param, rows in zip(like, drifts, strict=True):
        _require_rows(mesh.shape[axis_name], param, rows)
    row_specs = [[P(axis_name, *spec)] * len(rows) for spec, rows in zip(own, drifts, strict=True)]
    params, drifts = placed(mesh, params, specs), placed(mesh, drifts, row_specs)

    def local(params, drifts):
        moved = {i: sum(x[0] for x in rows) for i, rows in enumerate(drifts) if rows}
        transport = wire.transport_of(wire.summed(averaging.EXACT), axis_name)
        means = averaging.average(transport, moved, jnp.int32(0), "mean_params").mean
        if shares is not None:
            pick = lambda leaves: {i: leaves[i] for i in means}
            means = fast.gather_shares(means, pick(shares), pick(params), fast_axis)
        add = lambda i, p: (p + means[i]).astype(p.dtype) if i in means else p
        return [add(i, p) for i, p in enumerate(params)]

    return jax.shard_map(local, mesh=mesh, in_specs=(specs, row_specs), out_specs=specs)(
        params, drifts
    )


def _require_rows(num_replicas, param, rows):
    for drift in rows:
        if drift.shape != (num_replicas, *param.shape):
            raise ValueError(
                f"a drift of shape {drift.shape} belongs to a parameter of shape {param.shape} on "
                f"{num_replicas} replicas, and needs one row a replica. Write the mesh and the "
                "fast_axis of the step that made the state; resize states of other meshes."
            )


def replica_spread(params: Any, mesh: Mesh, axis_name: str | tuple[str, ...]) -> jax.Array:
    """Compares the replicas' copies of values that should be equal: 0 if they are, bit for bit.

    JAX's types promise equality of replicated values but lose track in some operations; this
    compares the copies on the devices.

    Args:
      params: Pytree of arrays that are replicated over `axis_name`.
      mesh: The mesh they live on.
      axis_name: The axis of the replicas, or that and the axis of each replica's devices.

    Returns:
      u32[]: the largest minus the smallest of the replicas' checksums of bits. Sends two
      all-reduces of 4 bytes.
    """
    for name in names_of(axis_name):
        require_axis(mesh, name)
    require_kept(params)
    leaves = jax.tree.leaves(params)
    specs = tuple(getattr(getattr(x, "sharding", None), "spec", P()) for x in leaves)
    return _comparison(mesh, axis_name, specs)(leaves)


@functools.lru_cache(maxsize=16)
def _comparison(mesh, axis_name, specs):
    """The jitted comparison, cached for repeated calls."""
    local = functools.partial(_difference, axis_name)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=P()))


def _difference(axis_name, leaves):
    parts = [_bytes(x) for x in to_varying(leaves, axis_name)]
    starts = itertools.accumulate((x.size for x in parts), initial=0)
    total = sum(map(_checksum, parts, starts), start=jnp.uint32(0))
    (total,) = sums_over_shards([total], *names_of(axis_name))
    return lax.pmax(total, axis_name) - lax.pmin(total, axis_name)


def _bytes(x) -> jax.Array:
    """u8[n]: the bits of an array of any dtype."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.integer) and jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    return x.reshape(-1).view(jnp.uint8)


def _checksum(x, start: int) -> jax.Array:
    """u32[]: a sum of all bytes, each times an odd number given by its position among all."""
    places = lax.iota(jnp.uint32, x.size) + np.uint32(start % 2**32)
    return jnp.sum(x.astype(jnp.uint32) * (2 * places + 1), dtype=jnp.uint32)
