"""Quantized fully sharded data parallelism: layers are gathered as codes when they are needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp import schedules
from jaxcomp._checks import instead_of, require_kept
from jaxcomp._printing import call
from jaxcomp.compressors.base import Compressor, Key, identity
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.policies import Policy, path_of, policy_of
from jaxcomp.compressors.quantize import quantize
from jaxcomp.exchange import averaging, buckets, wire
from jaxcomp.replicas.protocol import is_masked, require_two_bytes
from jaxcomp.replicas.shards import Shard, cut, is_shard, key_of, map_shards, natural
from jaxcomp.replicas.specs import require_axis
from jaxcomp.replicas.state import unstack
from jaxcomp.replicas.types import is_mapped
from jaxcomp.sharded import walks
from jaxcomp.sharded.gathering import SECONDARY
from jaxcomp.steps.compiling import Kept
from jaxcomp.steps.placing import placed

_WEIGHTS = quantize(8, block=1024, range="minmax")
_GRADIENTS = quantize(8, block=1024, range="minmax", rounding="stochastic")
_EXACT = buckets.small_or_vector()
_NO_KEY = Key(0, 0)
_TRIED = 256  # values with which a code is tried


@dataclasses.dataclass(frozen=True)
class QSDP:
    """How sharded parameters are gathered and their gradients scattered; made by `qsdp`."""

    axis_name: str
    weights: Compressor | Policy
    gradients: Compressor | Policy
    exact: Callable[[str, Any], bool]
    fit_at: schedules.Schedule
    seed: int
    fast_axis: str | None = None
    fast_gradients: Compressor | Policy = averaging.EXACT
    secondary: bool = False
    gather_once: bool = False
    lookahead: int = 1

    def __repr__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return call(qsdp, **fields | {"exact": None if self.exact is _EXACT else self.exact})

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that parameters are cut over, in this order; the slow one is the last."""
        return (self.axis_name,) if self.fast_axis is None else (self.fast_axis, self.axis_name)

    @property
    def remat_policy(self) -> Callable[..., bool]:
        """Policy for `jax.checkpoint` and `nn.remat`: keeps secondary shards if there are any."""
        names = [SECONDARY] if self.secondary else []
        return jax.checkpoint_policies.save_only_these_names(*names)

    def shard(
        self, params: Any, mesh: Mesh, stacked: Callable[[str, Any], bool] = lambda *_: False
    ) -> Any:
        """Cuts parameters into shards, one per device along the axes of the replicas.

        Args:
          params: Floating arrays of any sizes, replicated on the mesh or not placed yet.
          mesh: Has the axes `axes`.
          stacked: `(path, leaf) -> bool`, for example from `jaxcomp.by_path`: whether a leaf holds
            many layers along its first axis, for a scan; none by default.

        Returns:
          A tree of Shards, with arrays `[num_shards, ...]` sharded over `axes`. Optax optimizers
          with elementwise updates take it as parameters.

        Raises:
          ValueError: If a leaf is not floating, `fast_gradients` learns its levels, or the mesh
            lacks one of the axes.
        """
        require_two_bytes(params)
        plan = functools.partial(_planned, self, stacked)
        like = jax.tree.map_with_path(plan, params)
        own = functools.partial(map_shards, functools.partial(_own_row, self.axes), like)
        return _on(mesh, self.axes, own, P(), P(self.axes))(params)

    def unshard(self, shards: Any, mesh: Mesh) -> Any:
        """Undoes `shard` without loss: natural shapes, a copy on every device.

        Takes any tree that contains `Shard`s, such as an optimizer's state; other leaves do not
        change. Compiles at each call; in a loop, call it inside `jax.jit`.
        """
        specs = jax.tree.map(
            lambda x: P(self.axes) if is_shard(x) else P(), shards, is_leaf=is_shard
        )
        whole = functools.partial(map_shards, functools.partial(_whole, self.axes))
        return _on(mesh, self.axes, whole, (specs,), P())(shards)

    def deployed(self, shards: Any, state: Any, mesh: Mesh) -> Any:
        """The weights to evaluate and to deploy: those that layers computed with.

        If a parameter's code rounds to nearest, training minimizes the loss at the decoded codes.
        A code that draws noise, a shift or signs again in each step has no such weights: its shards
        are right. Which it is follows from the code. Continue training, and save, with the shards.

        Args:
          shards: From `shard` or a step.
          state: The `QSDPState` at that step; its levels decode.
          mesh: The mesh of the step.

        Returns:
          Natural shapes, a copy on every device, as `unshard`.
        """
        require_kept(shards, state)
        whole = functools.partial(map_shards, functools.partial(_whole, self.axes))
        decoded = lambda shards, levels: whole(decoded_shards(shards, levels))
        specs = P(self.axes), P()
        return _on(mesh, self.axes, decoded, specs, P())(shards, state.levels)

    def local(
        self,
        shards: Any,
        count: jax.Array,
        *draw: jax.Array | int,
        levels: Any = None,
        counters: Any = None,
    ) -> Any:
        """The argument of a replica's loss: its own shards, each with a key.

        Runs inside `jax.shard_map`; differentiate the loss with respect to `shards`, through this.

        Args:
          shards: From `shard`, one row per replica.
          count: i32[], the step, equal on all replicas.
          *draw: Integers for further keys in this step, such as the number of a microbatch.
          levels: From `levels.start`, for codes that learn them; None: uniform.
          counters: From `levels.counters`. The loss's gradient with respect to them is the tally
            that levels are fitted to. None: nothing is counted.

        Returns:
          The tree for `gather` and `layer`.
        """
        leaves, treedef = jax.tree.flatten(unstack(shards, self.axes), is_leaf=is_shard)
        step = fold(Key(count, jnp.uint32(self.seed)), count, *draw)
        nothing = [None] * len(leaves)
        tables = nothing if levels is None else treedef.flatten_up_to(levels)
        counters = nothing if counters is None else treedef.flatten_up_to(counters)
        keys = [key_of(step, index, leaf.data.shape[:-1]) for index, leaf in enumerate(leaves)]
        return treedef.unflatten(
            dataclasses.replace(leaf, key=key, levels=table, counter=counter)
            for leaf, key, table, counter in zip(leaves, keys, tables, counters, strict=True)
        )

    def gather(self, tree: Any, but: str | None = None) -> Any:
        """Gathers a layer: the codes of all replicas' shards, in one message.

        Stacked shards are gathered layer after layer. All replicas, the owner too, get the decoded
        codes. The VJP encodes the gradient of this replica's loss, sends each owner its chunk in
        one all-to-all, and averages what arrives. That is the gradient of the mean loss over
        replicas, at the gathered weights, with the straight-through rule for the rounding.

        As `trans_in_fn` of Flax's `nn.map_variables`, inside `nn.remat` with `remat_policy`, it
        makes any module gather its own weights, under `nn.scan` layer by layer. Without a scan
        XLA:CPU gathers all layers at once; `layer` waits.

        Args:
          tree: Shards from `local`, or those of one layer in a scan; other leaves stay.
          but: Pattern for `re.search` of paths that stay shards, such as layers that gather their
            own weights.

        Returns:
          The tree with natural shapes, of a type that varies, so that gradients stay local.
        """
        return walks.gather_tree(tree, self.axes, but=but)

    def layer(self, function: Callable, dtype: Any = None) -> Callable:
        """Turns `function(params, *args)` into one of shards that gathers again for its gradient.

        As with `jax.checkpoint`, nothing is kept between the passes, and the function is computed
        twice. Each gather waits for the layer's arguments, or for the gradient of its result, so
        only one layer's weights are in memory. With secondary shards the codes that crossed the
        slow axis are kept, and the second gather uses only the fast axis. `layers` runs several
        layers, and gathers the next one while one computes.

        Args:
          function: A layer. `args` are arrays or trees of arrays; only these and the weights are
            differentiated.
          dtype: Dtype of the weights that it gets, as for `layers`.

        Returns:
          A function of a tree from `local` and of `args`.
        """
        return walks.layer(function, self.axes, self.secondary, dtype)

    def layers(self, function: Callable, dtype: Any = None) -> Callable:
        """Turns `function(params, x) -> x` into one that runs many layers of shards in order.

        Like `layer` in a loop, but the gather of layer k waits for the input of layer
        `k - lookahead`, and in the backward pass for the gradient that enters layer
        `k + lookahead`, so it is sent while those compute. At most `lookahead + 1` layers are in
        memory, one as weights and the others as codes. The bytes sent are the same. Layers alike
        are traced once in each pass, so that the function must depend on its arguments alone.

        Args:
          function: A layer; x is an array or a tree of arrays. Only x and the weights are
            differentiated. Stacked layers must keep the shapes and dtypes of x.
          dtype: Dtype of decoded weights of two axes or more, for example "bfloat16"; others, such
            as norms and biases, keep the shards' dtype. None: all keep it.

        Returns:
          A function `(trees, x) -> x`, for a list of trees from `local`, one per layer, or for one
          tree of stacked shards, which it scans over.
        """
        return walks.layers(function, self.axes, self.secondary, self.lookahead, dtype)


def qsdp(
    axis_name: str,
    weights: Compressor | Policy = _WEIGHTS,
    gradients: Compressor | Policy = _GRADIENTS,
    *,
    exact: Callable[[str, Any], bool] | None = None,
    fit_at: schedules.Schedule = schedules.doubling,
    seed: int = 0,
    fast_axis: str | None = None,
    fast_gradients: Compressor | Policy = averaging.EXACT,
    secondary: bool = False,
    gather_once: bool = False,
    lookahead: int = 1,
) -> QSDP:
    """Makes a `QSDP`: how parameters are sharded, gathered and updated through codes.

    Each replica keeps 1/R of every parameter, in float32, and of the optimizer's state. A layer is
    gathered in the forward pass and again in the backward pass, and its gradient is sent to the
    owners of the shards: `m (R-1)` bytes each time, for a message of m bytes per shard. Noise
    depends on the seed, the step and the layer. The weights' noise is equal in both passes, so that
    the gradient fits the forward pass; the gradients' noise differs between replicas.

    With a `fast_axis`, for example over the devices of a host, parameters are cut over both axes.
    Codes cross the slow axis first and then, unchanged, the fast one; gradients are averaged over
    the fast axis first. Each device sends 1/n_fast of both over the slow axis.

    Args:
      axis_name: Mesh axis of the replicas, the slow one.
      weights: Code of the weights, or a policy `(path, leaf) -> Compressor`. Rounds to nearest by
        default; `rounding="shift"` is the unbiased random shift of the paper's theory.
      gradients: Code of the gradients, or a policy; unbiased by default.
      exact: `(path, leaf) -> bool`, which leaves are sent in float32, in the same messages.
        Default: those with fewer than two axes, or fewer than 1,024 elements.
      fit_at: When `qsdp_train_step` fits levels, for codes such as `learned_levels(4)`; by default
        in steps 1, 2, 4, 8, ...
      seed: Seed of shifts and noise.
      fast_axis: Mesh axis of replicas with fast links between them; None: no such axis.
      fast_gradients: Code of the gradients over the fast axis, or a policy; float32 by default.
      secondary: Whether `layer` keeps the codes that crossed the slow axis, 1/n_fast of the
        parameters, until the backward pass, whose gather then sends nothing over it.
      gather_once: Whether `qsdp_train_step` gathers all weights once per step and scatters
        gradients once, after the last microbatch: two messages per step, but each device holds
        whole parameters and a whole gradient meanwhile.
      lookahead: How many layers `QSDP.layers` gathers ahead of the one that computes: 0, 1 or 2.

    Returns:
      A `QSDP`, hashable and without arrays.

    Raises:
      ValueError: If `fast_axis` is `axis_name`, both `secondary` and `gather_once` are set,
        `lookahead` is not 0, 1 or 2, or a code is neither a compressor nor a policy.

    Examples:
      >>> import jaxcomp
      >>> code = jaxcomp.quantize(6, block=1024)
      >>> jaxcomp.qsdp("replica", weights=code, fast_axis="fast").axes
      ('fast', 'replica')

    References:
      Markov et al., `Quantized Distributed Training of Large Models with Convergence Guarantees
      <https://arxiv.org/abs/2302.02390>`_, ICML 2023. Shards stay in float32, as in its
      experiments; its analysis keeps only the quantized weights. Blocks do not cross leaves. Two
      hops of gradients (qgZ) and secondary shards (hpZ): Wang et al., `ZeRO++
      <https://arxiv.org/abs/2306.10209>`_, 2023. Here the first hop is exact by default, and
      secondary shards are the codes that were sent.
    """
    if fast_axis == axis_name:
        raise ValueError(
            f"fast_axis and axis_name are both {axis_name!r}; name two axes of the mesh, or leave "
            "fast_axis out."
        )
    if secondary and gather_once:
        raise ValueError(
            "secondary shards are for a second gather, and with gather_once=True there is none; "
            "write one of the two."
        )
    if lookahead not in (0, 1, 2):
        raise ValueError(
            f"lookahead is {lookahead!r}; write 0, 1 or 2, the layers that are gathered ahead of "
            "the one that computes."
        )
    for code in (weights, gradients, fast_gradients):
        policy_of(code)  # raises for anything else
    return QSDP(
        axis_name=axis_name,
        weights=weights,
        gradients=gradients,
        exact=exact or _EXACT,
        fit_at=fit_at,
        seed=seed,
        fast_axis=fast_axis,
        fast_gradients=fast_gradients,
        secondary=secondary,
        gather_once=gather_once,
        lookahead=lookahead,
    )


def _planned(fsdp: Any, stacked: Callable, path: Any, leaf: Any) -> Shard:
    """A shard of a parameter, without its array, with the codes of a `QSDP`.

    Raises:
      ValueError: If it is not floating or a stack of no layers, or its code for the fast axis
        learns levels.
    """
    name = path_of(path)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"the parameter {name!r} has dtype {leaf.dtype}, but only floating ones are sharded; "
            f"{instead_of(leaf.dtype)}"
        )
    shape = leaf.shape[1:] if stacked(name, leaf) else leaf.shape
    one = jax.ShapeDtypeStruct(shape, leaf.dtype)
    policies = fsdp.weights, fsdp.gradients, fsdp.fast_gradients
    if fsdp.exact(name, one):
        policies = (averaging.EXACT,) * 3
    weights, gradients, fast = (policy_of(policy)(name, one) for policy in policies)
    if fast.levels is not None:
        raise ValueError(
            f"fast_gradients is {fast.name} for {name!r}, but levels are learned from what "
            "crosses the slow axis only; write quantize(...)."
        )
    stack = leaf.shape[: leaf.ndim - len(shape)]
    if 0 in stack:
        raise ValueError(
            f"the stacked parameter {name!r} has shape {leaf.shape}, which is no layer at all; "
            "leave it out of the parameters."
        )
    return Shard(None, one.shape, weights, gradients, fast, stack)


def _own_row(axes: tuple[str, ...], shard: Shard, leaf: jax.Array) -> Shard:
    """This device's row of a parameter, `[1, *stack, numel]`."""
    rows = cut(leaf, leaf.ndim - len(shard.shape), lax.axis_size(axes))
    return dataclasses.replace(shard, data=rows[lax.axis_index(axes)][None])


def _whole(axes: tuple[str, ...], shard: Shard) -> jax.Array:
    """A parameter from its rows on all devices."""
    if is_masked(shard.data):
        return shard.data
    rows = shard.data.reshape(-1)
    for axis in reversed(axes):
        rows, _ = wire.gather(rows, identity(), _NO_KEY, axis)
    return natural(rows.reshape(-1, *shard.data.shape[1:]), shard.shape)


def _on(mesh: Mesh, axes: tuple[str, ...], function: Callable, in_specs: Any, out_specs: Any):
    """A jitted `shard_map` of a function on a mesh, which must have these axes."""
    for name in axes:
        require_axis(mesh, name)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    at = lambda args: placed(mesh, args, jax.tree.broadcast(in_specs, args))
    return Kept(jax.jit(lambda *args: mapped(*at(args))), mesh)


def draws(code: Compressor) -> bool:
    """Whether what a code makes of values depends on its keys: on noise, shifts, signs or masks.

    Then each step computes with other weights. Found by tracing, so that it holds for any code.
    """
    found = []

    def coded(seed, count):
        shared, private = Key(count, seed), Key(count, seed + jnp.uint32(1))
        x = jnp.linspace(-1.0, 1.0, _TRIED)
        found.append(is_mapped(code.decode(code.encode(x, shared, private), shared)))
        return seed

    numbers = jnp.arange(2)
    jax.eval_shape(jax.vmap(coded), numbers.astype(jnp.uint32), numbers)
    return found[0]


def decoded_shards(shards: Any, levels: Any) -> Any:
    """Shards with the values that all replicas decode, where these are the same in each step.

    A code that `draws` is unbiased noise around the shards: those stay as they are.

    Args:
      shards: A tree of `Shard`s, with rows of any replicas: `[rows, *stack, numel]`.
      levels: `levels.Tables` of each; None for fixed levels.
    """
    leaves, treedef = jax.tree.flatten(shards, is_leaf=is_shard)
    tables = treedef.flatten_up_to(levels)
    return treedef.unflatten(map(_decoded_shard, leaves, tables))


def _decoded_shard(shard: Shard, tables: Any) -> Shard:
    if not is_shard(shard) or draws(shard.weights):
        return shard
    code, dtype = shard.weights, shard.data.dtype

    def coded(row, table):
        key = Key(0, 0, table)
        wide = row.astype(jnp.result_type(jnp.float32, dtype))
        return code.decode(code.encode(wide, key, key), key).astype(dtype)

    for _ in shard.data.shape[1:-1]:
        coded = jax.vmap(coded)
    rows = jax.vmap(coded, in_axes=(0, None))
    return dataclasses.replace(shard, data=rows(shard.data, tables.weights))
