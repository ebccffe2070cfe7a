"""Means over the replicas at the entries of a mask, which they share without sending it."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomp.compressors.base import Compressor, Key, Selection, identity
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.policies import Policy, path_of, policy_of
from jaxcomp.compressors.sparse import random_k
from jaxcomp.exchange import averaging
from jaxcomp.replicas.types import size_over_shards, to_varying


class Mask(NamedTuple):
    """Which entries of a leaf a step exchanges, and how it encodes their values."""

    selection: Selection
    values: Compressor


class Stage(NamedTuple):
    """A range of steps in which one policy chooses the masks."""

    start: int  # steps done before the first of them
    policy: Policy
    part: str  # the name of what is sent in `jaxcomp.report`


def stages_of(
    density: float | Sequence[tuple[int, float]] | None,
    compressor: Compressor | Policy | None,
) -> list[Stage]:
    """The stages given by a compressor, a density, or pairs of a step and a density.

    Raises:
      ValueError: If the pairs do not begin with step 0, or their steps do not rise.
    """
    if compressor is not None:
        return [Stage(0, policy_of(compressor), "momentum")]
    if not isinstance(density, Sequence):
        return stages_of(None, random_k(0.1 if density is None else density))
    starts = [start for start, _ in density]
    if starts[:1] != [0] or any(new <= old for old, new in itertools.pairwise(starts)):
        raise ValueError(
            f"got densities from the steps {starts}; needs 0, then later ones; write "
            "density=((0, 0.5), (100, 0.1))."
        )
    return [
        Stage(start, policy_of(random_k(share)), f"momentum_{i}")
        for i, (start, share) in enumerate(density)
    ]


def holding(stages: list[Stage], count: jax.Array) -> dict[str, jax.Array]:
    """bool[] for the part of each stage, whether it is current after `count` steps; one is."""
    ends = [*(stage.start for stage in stages[1:]), jnp.iinfo(jnp.int32).max]
    return {
        stage.part: (count >= stage.start) & (count < end)
        for stage, end in zip(stages, ends, strict=True)
    }


def masks_of(tree: Any, policy: Policy, exact_numel: int, axis_name: str) -> dict[str, Mask | None]:
    """The masks of all leaves by path; None for leaves that are exchanged whole.

    Args:
      tree: Floating leaves.
      policy: `(path, leaf) -> Compressor`: `identity()`, or a `random_k`, alone or first in a
        `compose`.
      exact_numel: Leaves of fewer elements, over all their shards, and those with fewer than two
        axes are exchanged whole, whatever the policy says.
      axis_name: The mesh axis of the replicas.

    Raises:
      ValueError: For a compressor whose entries differ between replicas.
    """

    def mask(path, leaf):
        if is_whole(leaf, exact_numel, axis_name):
            return None
        return _mask_of(path, policy(path, leaf))

    keyed = jax.tree_util.tree_leaves_with_path(tree)
    return {(path := path_of(key)): mask(path, leaf) for key, leaf in keyed}


def is_whole(leaf: Any, exact_numel: int, axis_name: str) -> bool:
    """Whether a leaf is too small for a mask: one axis, or too few elements over its shards."""
    return leaf.ndim < 2 or size_over_shards(leaf, axis_name) < exact_numel


def _mask_of(path: str, compressor: Compressor) -> Mask | None:
    if compressor == averaging.EXACT:
        return None
    if compressor.shared_selection is not None:
        return Mask(*compressor.shared_selection)
    if compressor.selection is not None and compressor.linear:
        return Mask(compressor.selection, identity())
    raise ValueError(
        f"got {compressor.name} for {path!r}; needs entries that all replicas pick alike; write "
        "random_k(0.1), compose(random_k(0.1), quantize(8)), or identity() for the whole leaf."
    )


class Exchanged(NamedTuple):
    """Leaves after an exchange, and where they were exchanged."""

    leaves: list[jax.Array]  # the mean where `on`, else this replica's own values
    on: list[jax.Array | None]  # bool of the leaf's shape, equal on all replicas; None: everywhere


def mean_on_masks(
    masks: dict[str, Mask | None],
    part: str,
    leaves: list[jax.Array],
    transport: averaging.Transport,
    count: jax.Array,
) -> Exchanged:
    """Replaces leaves by their mean over the replicas, only at the entries of their masks.

    Args:
      masks: As `masks_of` makes them.
      part: Name of what is sent in `jaxcomp.report`.
      leaves: One per mask, varying.
      transport: How values are sent; the masks' codes replace its policy.
      count: i32[], equal on all replicas. Masks roll with it, or are drawn from it.
    """
    codes = {path: mask.values if mask else averaging.EXACT for path, mask in masks.items()}
    keys = _keys(masks, transport.seed, count)
    of = list(zip(masks.items(), leaves, keys, strict=True))
    picked = {
        path: x if mask is None else mask.selection.select(x.reshape(-1), key)[0]
        for (path, mask), x, key in of
    }
    transport = transport._replace(policy=lambda path, leaf: codes[path])
    means = averaging.average(transport, picked, count, part).mean

    def put(mask, x, key, mean):
        if mask is None:
            return to_varying(mean, transport.axis_name), None
        scatter = lambda v: mask.selection.scatter(v, (), key, x.size).reshape(x.shape)
        on = scatter(jnp.ones(mean.shape, jnp.uint8)) != 0
        return jnp.where(on, scatter(mean), x), on

    pairs = [put(mask, x, key, means[path]) for (path, mask), x, key in of]
    return Exchanged(*map(list, zip(*pairs, strict=True)))


def squares_on_masks(
    masks: dict[str, Mask | None],
    part: str,
    leaves: list[jax.Array],
    transport: averaging.Transport,
    count: jax.Array,
) -> list[jax.Array]:
    """f32[] each: the sum of squares of a leaf at the entries of its mask; as `mean_on_masks`."""
    del part
    keys = _keys(masks, transport.seed, count)
    return [
        jnp.sum(jnp.square(x if mask is None else mask.selection.select(x.reshape(-1), key)[0]))
        for mask, x, key in zip(masks.values(), leaves, keys, strict=True)
    ]


def _keys(masks, seed: int, count: jax.Array) -> list[Key]:
    return [fold(Key(count, jnp.uint32(seed)), i) for i in range(len(masks))]


class Masked(NamedTuple):
    """How leaves are exchanged on masks."""

    stages: list[Stage]
    exact_numel: int  # as for `masks_of`
    transport: averaging.Transport

    def masks(self, stage: Stage, params: Any) -> dict[str, Mask | None]:
        """`masks_of` the parameters in a stage."""
        return masks_of(params, stage.policy, self.exact_numel, self.transport.axis_name)

    def first(self, params: Any) -> Any:
        """Tree of bool: whether a leaf has a mask in the first stage."""
        masks = self.masks(self.stages[0], params)
        return jax.tree.unflatten(
            jax.tree.structure(params), [mask is not None for mask in masks.values()]
        )

    def in_stage(
        self, function: Callable[..., Any], leaves: list[jax.Array], params: Any, count: jax.Array
    ) -> Any:
        """`mean_on_masks` or `squares_on_masks` with the masks of the current stage."""
        keywords = {"transport": self.transport, "count": count}
        ways = [
            functools.partial(function, self.masks(stage, params), stage.part, **keywords)
            for stage in self.stages
        ]
        if len(ways) == 1:
            return ways[0](leaves)
        number = jnp.argmax(jnp.stack([*holding(self.stages, count).values()]))
        return lax.switch(number, ways, leaves)
