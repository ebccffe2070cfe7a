"""Quantized fully sharded data parallelism: layers gathered where they are needed, as codes."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp import averaging, buckets, schedules, wire
from jaxcomp.compressors import Compressor, Key, fold, identity, quantize
from jaxcomp.gathering import gather_layer
from jaxcomp.sharding import unstack
from jaxcomp.shards import Shard, cut, is_shard, map_shards, natural

_WEIGHTS = quantize(8, block=1024, range="minmax")
_GRADIENTS = quantize(8, block=1024, range="minmax", rounding="stochastic")
_NO_KEY = Key(0, 0)


@dataclasses.dataclass(frozen=True)
class QSDP:
    """How sharded parameters are gathered and their gradients scattered; made by `qsdp`."""

    axis_name: str
    weights: Compressor | averaging.Policy
    gradients: Compressor | averaging.Policy
    exact: Callable[[str, Any], bool]
    fit_at: schedules.Schedule
    seed: int

    def shard(
        self, params: Any, mesh: Mesh, stacked: Callable[[str, Any], bool] = lambda *_: False
    ) -> Any:
        """Cuts parameters into shards, one a device along the axis of the replicas.

        Args:
          params: Floating arrays of any sizes, replicated on the mesh or not placed yet.
          mesh: Has the axis `axis_name`.
          stacked: `(path, leaf) -> bool`, whether a leaf holds the parameters of many layers
            along its first axis, to be scanned over, as `jaxcomp.by_path` makes; none by default.

        Returns:
          A tree of Shards, their arrays `[num_shards, ...]` sharded over `axis_name`. An optax
          optimizer whose update is elementwise takes it as parameters.

        Raises:
          ValueError: If a leaf is not floating, or the mesh has no such axis.
        """
        plan = functools.partial(self._planned, stacked=stacked)
        like = jax.tree_util.tree_map_with_path(plan, params)

        def own(params):
            num_shards, index = lax.axis_size(self.axis_name), lax.axis_index(self.axis_name)

            def one(shard, leaf):
                rows = cut(leaf, leaf.ndim - len(shard.shape), num_shards)
                return dataclasses.replace(shard, data=rows[index][None])

            return map_shards(one, like, params)

        return _on(mesh, self.axis_name, own, P(), P(self.axis_name))(params)

    def unshard(self, shards: Any, mesh: Mesh) -> Any:
        """Undoes `shard`, without loss: natural shapes, a copy on every device.

        Takes any tree with a `Shard` in it, as an optimizer's state; what is none stays. Compiles
        at each call; in a loop, call it inside `jax.jit`.
        """

        def whole(shards):
            def one(shard):
                flat = shard.data.reshape(-1)
                rows, _ = wire.gather(flat, identity(), _NO_KEY, self.axis_name)
                return natural(rows.reshape(-1, *shard.data.shape[1:]), shard.shape)

            return map_shards(one, shards)

        specs = jax.tree.map(
            lambda x: P(self.axis_name) if is_shard(x) else P(), shards, is_leaf=is_shard
        )
        return _on(mesh, self.axis_name, whole, (specs,), P())(shards)

    def local(
        self,
        shards: Any,
        count: jax.Array,
        *draw: jax.Array | int,
        levels: Any = None,
        counters: Any = None,
    ) -> Any:
        """What the loss of a replica is a function of: its own shards, each with a key.

        Runs inside `jax.shard_map`; differentiate the loss at `shards`, through this.

        Args:
          shards: As `shard` returns them, one row a replica.
          count: i32[], the step, equal on all replicas.
          *draw: Integers for further keys in this step, as the number of a microbatch.
          levels: As `jaxcomp.levels.start` makes them, for codes that learn theirs; None: uniform.
          counters: As `jaxcomp.levels.counters`; what the loss's gradient there is, is to be
            fitted to. None: nothing is counted.

        Returns:
          The tree for `gather` and `layer`.
        """
        leaves, treedef = jax.tree.flatten(unstack(shards, self.axis_name), is_leaf=is_shard)
        step = fold(Key(count, jnp.uint32(self.seed)), count, *draw)
        tables, counters = (
            [None] * len(leaves) if tree is None else treedef.flatten_up_to(tree)
            for tree in (levels, counters)
        )
        keyed = [
            dataclasses.replace(
                leaf,
                key=_key_of(step, index, leaf.data.shape[:-1]),
                levels=tables[index],
                counter=counters[index],
            )
            for index, leaf in enumerate(leaves)
        ]
        return treedef.unflatten(keyed)

    def gather(self, tree: Any, but: str | None = None) -> Any:
        """Gathers a layer: every replica's code of its shards, in one uint8 message.

        All replicas, the owner too, get what the codes decode to. Its VJP encodes the gradient of
        this replica's loss, gives each owner its chunk in one all-to-all, and makes the mean of
        what arrives the gradient of the shard: that of the mean loss over replicas, at what was
        gathered, by the straight-through rule for the rounding.

        As `trans_in_fn` of Flax's `nn.map_variables`, inside `nn.remat`, it makes any module one
        that gathers for itself; under `nn.scan` layer by layer. Of layers that are not scanned
        over, XLA:CPU gathers all at once, where `layer` waits.

        Args:
          tree: Shards from `local`, or from a scan over stacked ones; other leaves stay.
          but: Pattern for `re.search` of the paths that stay shards, as of layers that gather
            for themselves.

        Returns:
          The tree with natural shapes, of a type that varies, so that gradients stay local.
        """
        return _gather(self.axis_name, tree, but)

    def layer(self, function: Callable) -> Callable:
        """Makes of `function(params, *args)` one of shards, that gathers again for its gradient.

        Neither weights nor anything else that the function computes is kept between the passes:
        it is computed twice, as by `jax.checkpoint`. Each time the gather waits for what the layer
        computes with, its arguments or the gradient of its result, so that one layer's weights are
        held at a time.

        Args:
          function: A layer; `args` are arrays or trees of them, and all that is differentiated.

        Returns:
          A function of a tree from `local` and of `args`.
        """

        def of_shards(after, shards, *args):
            return function(_gather(self.axis_name, shards, after=after), *args)

        @jax.custom_vjp
        def layer(shards, *args):
            return of_shards(args, shards, *args)

        def forward(*inputs):
            return layer(*inputs), inputs

        def backward(inputs, grads):
            return jax.vjp(functools.partial(of_shards, grads), *inputs)[1](grads)

        layer.defvjp(forward, backward)
        return layer

    def _planned(self, path, leaf, stacked):
        name = buckets.path_of(path)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(
                f"the parameter {name!r} has dtype {leaf.dtype}, but only floating ones are "
                "sharded; keep others out of the parameters."
            )
        shape = leaf.shape[1:] if stacked(name, leaf) else leaf.shape
        one = jax.ShapeDtypeStruct(shape, leaf.dtype)
        codes = averaging.policy_of(self.weights), averaging.policy_of(self.gradients)
        if self.exact(name, one):
            codes = (lambda *_: averaging.EXACT,) * 2
        return Shard(None, one.shape, *[code(name, one) for code in codes])


def qsdp(
    axis_name: str,
    weights: Compressor | averaging.Policy = _WEIGHTS,
    gradients: Compressor | averaging.Policy = _GRADIENTS,
    *,
    exact: Callable[[str, Any], bool] = buckets.small_or_vector,
    fit_at: schedules.Schedule = schedules.doubling,
    seed: int = 0,
) -> QSDP:
    """Makes the way in which parameters live in shards and travel as codes.

    Each replica keeps 1/R of every parameter in float32, and of the optimizer's state. A layer is
    gathered where it is needed, in the forward pass and again in the backward pass, and its
    gradient goes back to the owners of the shards: `m (R-1)` bytes each time, for a message of m
    bytes a shard. Draws depend on the seed, the step and the layer: the weights' are equal in
    both passes, so that the gradient is of the function that was computed; the gradients' noise
    is each replica's own.

    Args:
      axis_name: Mesh axis of the replicas.
      weights: Code of the weights, or a policy `(path, leaf) -> Compressor`. To nearest by default;
        `rounding="shift"` is the unbiased random shift of the theory.
      gradients: Code of the gradients, or a policy; unbiased by default.
      exact: `(path, leaf) -> bool`, which leaves travel as float32, in the same messages.
      fit_at: When `qsdp_train_step` fits the levels of codes that learn theirs, as
        `learned_levels(4)`: by default in steps 1, 2, 4, 8, ...
      seed: Of shifts and noise.

    Returns:
      A `QSDP`, hashable and without arrays.

    Examples:
      >>> import jaxcomp
      >>> fsdp = jaxcomp.qsdp("replica", weights=jaxcomp.quantize(6, block=1024))
      >>> fsdp.axis_name
      'replica'

    References:
      Markov et al., `Quantized Distributed Training of Large Models with Convergence Guarantees
      <https://arxiv.org/abs/2302.02390>`_, ICML 2023. Shards stay in float32, as in its
      experiments; its analysis keeps the quantized weights only. Blocks do not cross leaves.
    """
    return QSDP(axis_name, weights, gradients, exact, fit_at, seed)


def _gather(axis_name, tree, but=None, after=None):
    keyed, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_shard)
    leaves = [leaf for _, leaf in keyed]
    chosen = [
        index
        for index, (path, leaf) in enumerate(keyed)
        if is_shard(leaf) and not (but and re.search(but, buckets.path_of(path)))
    ]
    full = gather_layer([leaves[i] for i in chosen], axis_name, after) if chosen else []
    for index, value in zip(chosen, full, strict=True):
        leaves[index] = value
    return treedef.unflatten(leaves)


def _key_of(step: Key, index: int, stack: tuple[int, ...]) -> Key:
    """The key of a parameter, or one for each layer of a stacked one."""
    key = fold(step, index)
    if not stack:
        return key
    count = jnp.broadcast_to(key.count, stack)
    return Key(count, jax.vmap(lambda layer: fold(key, layer).seed)(jnp.arange(*stack)))


def _on(mesh, axis_name, function, in_specs, out_specs):
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"the mesh has no axis {axis_name!r}; its axes are {tuple(mesh.axis_names)}."
        )
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
