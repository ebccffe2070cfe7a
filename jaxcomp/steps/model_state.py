"""State of a model that its loss changes, such as BatchNorm statistics: equal on all replicas."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.finite import finite, unless
from jaxcomp.replicas.types import names_of
from jaxcomp.steps.placing import on_auto_axes, within


def averaged(old: Any, own: Any, skipped: jax.Array, axis_name: str | tuple[str, ...]) -> Any:
    """The mean of the replicas' `own` states, in one float32 message; inside `shard_map` or `vmap`.

    A replica whose state is not finite contributes its `old` one. A skipped step keeps the old
    state. Leaves that are not floats are equal on all replicas already.
    """
    leaves, treedef = jax.tree.flatten(own)
    before = treedef.flatten_up_to(old)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if floats:
        kept = unless(
            ~finite([leaves[i] for i in floats]),
            [leaves[i] for i in floats],
            [before[i] for i in floats],
        )
        flat = jnp.concatenate([x.reshape(-1) for x in kept])
        with jax.named_scope("jaxcomp.model_state"):
            flat = lax.pmean(flat, names_of(axis_name))
        ends = [sum(x.size for x in kept[: n + 1]) for n in range(len(kept) - 1)]
        for i, mean in zip(floats, jnp.split(flat, ends), strict=True):
            leaves[i] = mean.reshape(before[i].shape).astype(before[i].dtype)
    return unless(skipped, treedef.unflatten(leaves), old)


def specs_of_rows(model_state: Any, axis_name: str | tuple[str, ...]) -> Any:
    """Specs of the replicas' own states: rows for floats, one copy for the rest."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return jax.tree.map(lambda x: P(axis_name) if is_float(x) else P(), model_state)


def rows_of(own: Any) -> Any:
    """This replica's state with a leading axis of one where `specs_of_rows` has rows."""
    return jax.tree.map(lambda x: x[None] if jnp.issubdtype(x.dtype, jnp.inexact) else x, own)


def averaged_rows(
    mesh: Mesh | AbstractMesh, axis_name: str | tuple[str, ...], old: Any, rows: Any, skipped: Any
) -> Any:
    """`averaged` for global arrays with a row per replica; None for None."""
    if not jax.tree.leaves(old):
        return old
    names = names_of(axis_name)

    def local(old, rows, skipped):
        own = jax.tree.map(lambda x, like: x.reshape(like.shape), rows, old)
        return averaged(old, own, skipped, names)

    mean = jax.shard_map(
        local,
        mesh=within(mesh),
        in_specs=(P(), specs_of_rows(old, names), P()),
        out_specs=P(),
        axis_names=set(names),
    )
    return on_auto_axes(mesh, mean, P())(old, rows, skipped)
