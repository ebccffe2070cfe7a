"""PartitionSpecs of optimizer states, and of any function's results, found by tracing it."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas import fast, protocol
from jaxcomp.replicas.state import replica_axes
from jaxcomp.replicas.types import names_of, unlike, varies_over, varying_axes


def state_specs(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    param_specs: Any = None,
    fast_axis: str | None = None,
) -> Any:
    """Finds the PartitionSpec of every leaf of the state, for `shard_map` and for checkpoints.

    Args:
      tx: A transformation wrapped by `per_replica`.
      params: Global parameters, or their shapes and dtypes.
      mesh: The mesh that the step runs on.
      axis_name: The axis of the replicas.
      param_specs: PartitionSpecs of the parameters over the mesh's other axes, a tree or a
        prefix of one; replicated by default.
      fast_axis: The step's `fast_axis`, if it has one.

    Returns:
      A tree like the state, with `P(axis_name, ...)` for rows of replicas, the parameter's own spec
      for leaves that follow a sharded parameter, and `P()` for the rest.

    Raises:
      ValueError: If `axis_name` is not an axis of the mesh, or shards the parameters; if `tx` is
        not wrapped; if a scalar of the state, or a leaf that follows an unsharded parameter,
        differs between shards.
    """
    return specs_and_shapes(tx, params, mesh, axis_name, param_specs, fast_axis)[0]


def specs_and_shapes(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    axis_name: str,
    param_specs: Any = None,
    fast_axis: str | None = None,
) -> tuple[Any, Any]:
    """The `state_specs`, and the shapes and dtypes of the global state, from the same trace."""
    param_specs = full_specs(params, mesh, axis_name, param_specs)
    if replica_axes(tx) != (axis_name,):
        raise ValueError(
            "state_specs needs what jaxcomp.per_replica returns, with nothing around it: only its "
            "state has rows of replicas. Write "
            f"jaxcomp.per_replica(optax.chain(...), {axis_name!r})."
        )
    if fast_axis == axis_name:
        raise ValueError(
            f"fast_axis is {fast_axis!r}, the axis of the replicas; it names another axis of the "
            "mesh, over which the devices of one replica lie, or is left out."
        )
    if fast_axis is not None:
        shares = fast.shares_of(params, param_specs, mesh, fast_axis)
        params, param_specs = fast.filled(params, shares)
    shaped = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            jnp.shape(x), jnp.result_type(x), sharding=NamedSharding(mesh, spec)
        ),
        params,
        param_specs,
    )
    leaves, treedef = jax.tree.flatten(shaped)
    wide = jnp.result_type(float)  # float64 if that is enabled: dtypes depend on it
    params, state = _types_of_state(tx, mesh, treedef, tuple(leaves), wide)
    paths = jax.tree.leaves_with_path(params)
    specs = jax.tree.leaves(param_specs)
    known = [(path, x.shape, spec) for (path, x), spec in zip(paths, specs, strict=True)]
    # The path `mu/z/w` ends with `w` and with `z/w`: it follows the longer one.
    known.sort(key=lambda parameter: -len(parameter[0]))
    # A piece of one replica may have the parameter's shape, and is laid out as other pieces are.
    owned = protocol.fields(state, "owner_residual", "owned")

    def spec_of(path, leaf):
        is_owned = protocol.field_of(path, owned) is not None
        return _spec_of([] if is_owned else known, mesh, axis_name, path, leaf)

    state_specs = jax.tree.map_with_path(spec_of, state)
    return state_specs, jax.tree.map(functools.partial(_whole, mesh), state, state_specs)


def _whole(mesh, part, spec):
    """The global array of which each device has a part of this type."""
    cuts = [math.prod(mesh.shape[name] for name in jax.tree.leaves(names)) for names in spec]
    sizes = itertools.zip_longest(part.shape, cuts, fillvalue=1)
    return jax.ShapeDtypeStruct(tuple(size * cut for size, cut in sizes), part.dtype)


@functools.lru_cache(maxsize=16)
def _types_of_state(tx, mesh, treedef, leaves, wide):
    """JAX's types of parameters and state, cached, since a step asks each time it is traced."""
    params = treedef.unflatten(leaves)
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    return _types_of(lambda params: (params, tx.init(params)), mesh, (specs,), params)


def _spec_of(known, mesh, axis_name, path, leaf):
    """The PartitionSpec of one leaf of the state, of the type `leaf`; `known` are parameters'."""
    lead = (axis_name,) if axis_name in varying_axes(leaf) else ()
    shape = leaf.shape[len(lead) :]
    others = tuple(name for name in mesh.axis_names if name in varying_axes(leaf) - {axis_name})
    if not others:
        return P(*lead)
    for param_path, param_shape, spec in known:
        if shape == param_shape and path[len(path) - len(param_path) :] == param_path:
            whole = set(others) - set(jax.tree.leaves(tuple(spec)))
            if whole:
                raise unlike(f"the state's {jax.tree_util.keystr(path)!r}", whole)
            return P(*lead, *spec)
    if not shape:
        raise ValueError(
            f"the state's number {jax.tree_util.keystr(path)!r} differs between shards over "
            f"{others}: each would decide by itself; write optimizers without such, as "
            "optax.adamw, on a mesh that shards parameters (train_step leaves out by itself "
            "what is not finite)."
        )
    # Leaves that follow no parameter, such as a residual per bucket, hold shard after shard.
    return P(*lead, others)


def require_axis(mesh: Any, axis_name: str) -> None:
    """Raises a ValueError if a mesh lacks the axis of the replicas."""
    if not hasattr(mesh, "axis_names"):
        raise ValueError(
            f"got {mesh!r:.60} where the mesh belongs; write jax.make_mesh((4,), ('replica',)). "
            "Are two arguments swapped?"
        )
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"the mesh has no axis {axis_name!r}; its axes are {tuple(mesh.axis_names)}. Replicas "
            "are along one: write its name, such as 'replica'."
        )


def require_specs(argument: str, specs: Any) -> None:
    """Raises a ValueError for a tree whose leaves are not PartitionSpecs."""
    for path, spec in jax.tree.leaves_with_path(specs):
        if not isinstance(spec, P):
            raise ValueError(
                f"{argument}{jax.tree_util.keystr(path)} is {spec!r:.80}, which is no "
                "jax.sharding.PartitionSpec; write P('fsdp', None), P() for what is whole, or "
                "sharding.spec of a NamedSharding."
            )


def full_specs(params: Any, mesh: Any, axis_name: str, param_specs: Any) -> Any:
    """`param_specs` as one spec per parameter, checked."""
    require_axis(mesh, axis_name)
    require_specs("param_specs", param_specs)
    specs = jax.tree.broadcast(P() if param_specs is None else param_specs, params)
    for spec in jax.tree.leaves(specs):
        if axis_name in jax.tree.leaves(tuple(spec)):
            raise ValueError(
                f"param_specs shard a parameter over the replica axis {axis_name!r} ({spec}); "
                "replicas hold equal parameters: use the mesh's other axes, or jaxcomp.qsdp."
            )
    return specs


def over_some(specs: Any, axes: tuple[str, ...]) -> Any:
    """Restricts PartitionSpecs to some of the mesh's axes, for a `shard_map` over these."""
    return _restricted(specs, lambda name: name in axes)


def over_others(specs: Any, axes: tuple[str, ...]) -> Any:
    """Restricts PartitionSpecs to the other axes, for what runs inside such a `shard_map`."""
    return _restricted(specs, lambda name: name not in axes)


def _restricted(specs, keeps):
    part = lambda names: tuple(filter(keeps, jax.tree.leaves(names))) or None
    return jax.tree.map(lambda spec: P(*map(part, spec)), specs)


def specs_of(
    function: Callable, mesh: Mesh, axis_name: str | tuple[str, ...], in_specs: Any, *args: Any
) -> Any:
    """The PartitionSpecs of the results of `function(*args)` inside `shard_map`.

    With several axes in `axis_name`, a result has rows over those that it varies over.
    """

    def rows(x):
        names = tuple(name for name in names_of(axis_name) if varies_over(x, name))
        return P(names if len(names) > 1 else names[0]) if names else P()

    return jax.tree.map(rows, _types_of(function, mesh, in_specs, *args))


def _types_of(function, mesh, in_specs, *args):
    """JAX's types of the results of `function(*args)` inside `shard_map`, found by tracing."""
    types = []

    def note(*args):
        types.append(jax.tree.map(jax.typeof, function(*args)))

    jax.eval_shape(jax.shard_map(note, mesh=mesh, in_specs=in_specs, out_specs=None), *args)
    return types[0]
