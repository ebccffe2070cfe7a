"""The second half of a step: exchange and optimizer; applied on all replicas or on none."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas import fast, protocol
from jaxcomp.replicas.elementwise import with_whole_norms
from jaxcomp.replicas.finite import not_finite, unless
from jaxcomp.replicas.protocol import require_no_state
from jaxcomp.replicas.specs import full_specs, specs_and_shapes
from jaxcomp.replicas.types import varies_over
from jaxcomp.steps.placing import placed


class Update(NamedTuple):
    """How the parameters of a mesh's replicas are updated."""

    tx: optax.GradientTransformationExtraArgs  # from `per_replica`
    mesh: Mesh | AbstractMesh
    axis_name: str  # of the replicas
    param_specs: Any = None  # over the mesh's other axes, a tree or a prefix
    # Axis of a replica's devices, each of which sends and updates a share; None: one device.
    fast_axis: str | None = None
    shares: Any = None  # a `fast.Share` per parameter, from `with_shares`

    @property
    def axes(self) -> str | tuple[str, ...]:
        """The axes over which a gradient has rows."""
        return self.axis_name if self.fast_axis is None else (self.axis_name, self.fast_axis)

    def specs_of(self, params: Any) -> Any:
        """One PartitionSpec for each parameter."""
        return full_specs(params, self.mesh, self.axis_name, self.param_specs)

    def specs_of_shards(self, params: Any) -> Any:
        """One PartitionSpec for each array that a device updates."""
        if self.shares is None:
            return self.specs_of(params)
        return jax.tree.map(lambda share: share.spec, self.shares)


def update_specs(update: Update, params: Any) -> tuple[Any, Any]:
    """The PartitionSpecs of the parameters and of the state."""
    params_specs, specs, _ = _specs_and_shapes(update, params)
    return params_specs, specs


def _specs_and_shapes(update, params):
    """The PartitionSpecs of the parameters and of the state, and the shapes of that."""
    mesh, name, fast_axis = update.mesh, update.axis_name, update.fast_axis
    specs = update.specs_of(params)
    return specs, *specs_and_shapes(update.tx, params, mesh, name, specs, fast_axis)


def with_shares(update: Update, params: Any) -> Update:
    """The update with the shares of parameters of these global shapes."""
    if update.fast_axis is None:
        return update
    specs = update.specs_of(params)
    return update._replace(shares=fast.shares_of(params, specs, update.mesh, update.fast_axis))


def own_params(update: Update, params: Any) -> Any:
    """The part of the parameters that this device updates; inside `shard_map`."""
    if update.fast_axis is None:
        return params
    return fast.own_shares(params, update.shares, update.fast_axis)


def placed_params(update: Update, params: Any) -> Any:
    """The parameters placed as `param_specs` say, if the mesh's axis types require it."""
    require_no_state(params)
    return placed(update.mesh, params, update.specs_of(params))


def placed_state(update: Update, params: Any, state: Any) -> Any:
    """The state placed as its specs say, which one from a file, in NumPy, is not.

    Raises a ValueError for a state of another number of replicas.
    """
    return placed(update.mesh, state, checked_specs(update, params, state)[1])


def shardings_of(update: Update, params: Any, state: Any) -> tuple[Any, Any]:
    """Where a step returns parameters and state; the errors of `placed_state`."""
    require_no_state(params)
    at = functools.partial(NamedSharding, update.mesh)
    return jax.tree.map(at, checked_specs(update, params, state))


def checked_specs(update: Update, params: Any, state: Any) -> tuple[Any, Any]:
    """`update_specs`, or a ValueError for a state that is not of this transformation and mesh."""
    mesh, name = update.mesh, update.axis_name
    params_specs, specs, shapes = _specs_and_shapes(update, params)
    require_same_tree(state, specs)
    for (path, x), spec, like in zip(
        *(jax.tree.leaves_with_path(state), jax.tree.leaves(specs), jax.tree.leaves(shapes)),
        strict=True,
    ):
        if spec[:1] == (name,) and not jnp.ndim(x):
            raise ValueError(
                f"the state's {jax.tree_util.keystr(path)!r} is one number, and each of the "
                f"{mesh.shape[name]} replicas has its own there, since their optimizers may skip "
                f"different steps; write jnp.full({mesh.shape[name]}, ...) for it."
            )
        if spec[:1] == (name,) and x.shape[0] != mesh.shape[name]:
            raise ValueError(
                f"the state has {x.shape[0]} replicas' rows at {jax.tree_util.keystr(path)!r}, and "
                f"the mesh has {mesh.shape[name]} replicas; write state = jaxcomp.resize(state, "
                "jax.eval_shape(init, params)) before the first step."
            )
        require_like(path, x, like)
    return params_specs, specs


def require_same_tree(state: Any, like: Any) -> None:
    """A ValueError for a state whose tree is not the one that `init` makes."""
    if jax.tree.structure(state) == jax.tree.structure(like):
        return
    has, needs = (
        {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
        for tree in (state, like)
    )
    differs = (
        f"it has leaves {sorted(has - needs)[:2]} that this step does not know, and lacks "
        f"{sorted(needs - has)[:2]}"
    )
    if has == needs:
        differs = "its leaves have the same names, and their nodes are of other types or codes"
    raise ValueError(
        f"the state is of another transformation, or of other parameters: {differs}; write "
        "state = init(params), and restore a checkpoint into its form."
    )


def require_like(path: Any, x: Any, like: Any) -> None:
    """A ValueError for a leaf of a state that has another shape, or fewer bits, than `init` makes.

    Nothing else would fail: a rank of low-rank methods is that of the state, one number is
    broadcast to many, and what a narrow residual rounds off is lost.
    """
    own, dtype = jnp.shape(x), jnp.result_type(x)
    is_rounded = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < like.dtype.itemsize
    if own != like.shape or is_rounded:
        raise ValueError(
            f"the state has {dtype}{[*own]} at {jax.tree_util.keystr(path)!r}, and this step needs "
            f"{like.dtype}{[*like.shape]}: the state is of other parameters, or of a "
            "transformation with other arguments, such as another rank, or was rounded when it was "
            "saved. Write the arguments of the run that made it, state = init(params), or "
            "jaxcomp.resize(state, like) for one of another number of devices."
        )


def init_state(update: Update, params: Any) -> Any:
    """The state before the first step."""
    params_specs, own_state_specs = update_specs(update, params)
    params = placed(update.mesh, params, params_specs)
    update = with_shares(update, params)
    return jax.shard_map(
        lambda params: update.tx.init(own_params(update, params)),
        mesh=update.mesh,
        in_specs=(params_specs,),
        out_specs=own_state_specs,
    )(params)


def whole_drifts(update: Update, params: Any, drifts: list[Any]) -> list[Any]:
    """The drifts of a state in the shapes of the parameters, for the gradient."""
    fast_axis = update.fast_axis
    if fast_axis is None or not drifts:
        return drifts
    params_specs = update.specs_of(params)
    update = with_shares(update, params)
    _, share_specs = fast.filled(params, update.shares)
    # A drift's tree has a node without arrays for leaves hidden from its method.
    rows = lambda drift, spec: drift if protocol.is_masked(drift) else P(update.axis_name, *spec)
    row_specs = functools.partial(jax.tree.map, rows, is_leaf=protocol.is_masked)

    drift_specs = [row_specs(drift, share_specs) for drift in drifts]
    drifts = placed(update.mesh, drifts, drift_specs)

    def gather_drifts(drifts, params):
        own = jax.tree.map(lambda x: x[0], drifts)
        whole = [fast.gather_shares(x, update.shares, params, fast_axis) for x in own]
        return jax.tree.map(lambda x: x[None], whole)

    return jax.shard_map(
        gather_drifts,
        mesh=update.mesh,
        in_specs=(drift_specs, params_specs),
        out_specs=[row_specs(drift, params_specs) for drift in drifts],
    )(drifts, params)


def all_updates(
    update: Update, params: Any, state: Any, grads: Any, loss: jax.Array, extra_args: Any = None
) -> tuple:
    """Averages rows of gradients and updates: `(params, state, skipped: bool[])`.

    All axes of the mesh are manual. `grads` and `loss` are as `all_gradients` returns them;
    `extra_args` are further arguments of the transformation's update, equal everywhere.
    """
    params_specs, own_state_specs = update_specs(update, params)
    rows = jax.tree.map(lambda p, spec: P(update.axes, *spec), params, params_specs)
    return jax.shard_map(
        functools.partial(local_update, with_shares(update, params)),
        mesh=update.mesh,
        in_specs=(params_specs, own_state_specs, rows, P(update.axes), P()),
        out_specs=(params_specs, own_state_specs, P()),
    )(params, state, grads, loss, extra_args)


def local_update(
    update: Update,
    params: Any,
    state: Any,
    grads: Any,
    loss: jax.Array,
    extra_args: Any = None,
    **given: Any,
) -> tuple:
    """`all_updates` inside `shard_map`, on local shards; keeps all values if not finite.

    Methods whose state counts `skipped` handle gradients that are not finite themselves, and need
    no second copy of their state for that.
    """
    tx, axis_name = update.tx, update.axis_name
    grads = jax.tree.map(lambda g: g[0], grads)
    mean_loss = lax.pmean(loss[0], update.axes)  # XLA sends nothing if it is unused
    given |= {"value": mean_loss} | (extra_args or {})
    whole, params = params, own_params(update, params)
    if update.fast_axis is not None:
        grads = fast.scatter_shares(grads, update.shares, update.fast_axis)
    own = functools.partial(tx.update, axis_name=axis_name, **given)
    cut = {"axis_name": axis_name, "specs": update.specs_of_shards(params)}
    updates, new_state = with_whole_norms(own, grads, state, params, **cut)
    # Gradients of microbatches are wider than narrow parameters, and so are optax's results.
    new_state = jax.tree.map(_in_dtype_of, new_state, state)
    _require_averaged(updates, axis_name)
    new = optax.apply_updates(params, updates), new_state
    if protocol.leaves_out_alone(state):
        (params, state), skipped = new, jnp.zeros([], bool)
    else:
        (params, state), skipped = all_or_nothing(updates, new, (params, state))
    if update.fast_axis is not None:
        params = fast.gather_shares(params, update.shares, whole, update.fast_axis)
    return params, state, skipped


def all_or_nothing(updates: Any, new: Any, old: Any) -> tuple[Any, jax.Array]:
    """`new`, or `old` if anything in the updates is NaN or infinite; and whether it is.

    All shards agree on it. The updates' type ensures that all replicas do.
    """
    skipped = not_finite(updates) > 0
    return unless(skipped, new, old), skipped


def _in_dtype_of(new, old):
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _require_averaged(updates, axis_name):
    for path, leaf in jax.tree.leaves_with_path(updates):
        if varies_over(leaf, axis_name):
            raise ValueError(
                f"the update of {jax.tree_util.keystr(path)!r} still varies over {axis_name!r} "
                "when it leaves the transformation: nothing in it averages over the replicas. "
                "For this leaf write optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "
                f"{axis_name!r}), ...); to freeze it, with optax.set_to_zero() after the mean."
            )
