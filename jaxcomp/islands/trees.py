"""The parameters of an island's user: any pytree, of which floating arrays are exchanged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

_CALL = 'join("file:///shared/run", params, name="garage-1", every=100)'


def is_float(x: Any) -> bool:
    """Whether a leaf is an array that islands exchange."""
    return hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating)


def floats(params: Any) -> Any:
    """The tree with only its floating leaves, on meshes whose axes JAX shards by itself."""
    chosen = lambda x: _automatic(jnp.asarray(x)) if is_float(x) else optax.MaskedNode()
    found = jax.tree.map(chosen, params)
    if not jax.tree.leaves(found):
        raise ValueError(f"got a pytree without floating arrays; write {_CALL}.")
    return found


def with_own_others(params: Any) -> Any:
    """The tree, with copies of the arrays that are not exchanged: they may be donated, too."""
    is_other = lambda x: isinstance(x, jax.Array) and not is_float(x)
    return jax.tree.map(lambda x: jnp.copy(x) if is_other(x) else x, params)


def form_of(params: Any) -> Any:
    """The structure of a pytree, and of each leaf the shape and whether it is exchanged."""
    leaves, treedef = jax.tree.flatten(params)
    return treedef, [(np.shape(x), is_float(x)) for x in leaves]


def _automatic(x: jax.Array) -> jax.Array:
    """The same array on a mesh without explicit axes, where leaves may be cut and joined."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding):
        return x
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(x, NamedSharding(mesh, sharding.spec))


def dressed(params: Any, exchanged: Any) -> Any:
    """The leaves of `exchanged` with the dtypes and shardings of those in `params`, and others."""

    def dressed_leaf(new, x):
        if isinstance(new, optax.MaskedNode):
            return x
        new = new.astype(x.dtype)
        if isinstance(x, jax.Array) and x.committed:
            return jax.device_put(new, x.sharding)
        # Nobody has placed it: JAX may still take it to any mesh.
        return jnp.array(np.asarray(new)) if new.committed else new

    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    return jax.tree.map(dressed_leaf, exchanged, params, is_leaf=is_masked)
