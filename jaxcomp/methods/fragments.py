"""Fragments: parts of a model that are sent at different times, in whole leaves."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from jaxcomp.compressors.policies import path_of


class Fragments(NamedTuple):
    """The part of each leaf of a tree, numbered from 0 on."""

    treedef: jax.tree_util.PyTreeDef
    owners: tuple[int, ...]  # the part of each leaf

    @property
    def number(self) -> int:
        """How many parts there are."""
        return max(self.owners, default=0) + 1

    def split(self, tree: Any) -> list[Any]:
        """One tree per part, with an `optax.MaskedNode` in place of the other parts' leaves."""
        if self.number == 1:
            return [tree]
        leaves = self.treedef.flatten_up_to(tree)
        masked = lambda part: [
            x if owner == part else optax.MaskedNode()
            for x, owner in zip(leaves, self.owners, strict=True)
        ]
        return [self.treedef.unflatten(masked(part)) for part in range(self.number)]

    def joined(self, trees: Sequence[Any]) -> Any:
        """Undoes `split`."""
        if self.number == 1:
            return trees[0]
        columns = [self.treedef.flatten_up_to(tree) for tree in trees]
        return self.treedef.unflatten(
            [columns[owner][leaf] for leaf, owner in enumerate(self.owners)]
        )

    def names(self, name: str) -> list[str]:
        """The name of each part; `name` itself if there is only one."""
        return [name] if self.number == 1 else [f"{name}_{i}" for i in range(self.number)]


def fragments_of(fragments: int | Callable[[str, Any], int], params: Any) -> Fragments:
    """Cuts a tree into a number of parts of about equal sizes, or as `(path, leaf) -> int` says.

    Raises:
      ValueError: If a part has no leaf.
    """
    keyed, treedef = jax.tree_util.tree_flatten_with_path(params)
    if callable(fragments):
        owners = [fragments(path_of(path), leaf) for path, leaf in keyed]
    else:
        # The largest remaining leaf goes to the smallest part.
        sizes, owners = [0] * fragments, [0] * len(keyed)
        for i in sorted(range(len(keyed)), key=lambda i: -keyed[i][1].size):
            owners[i] = min(range(fragments), key=lambda part: (sizes[part], part))
            sizes[owners[i]] += max(keyed[i][1].size, 1)
    wanted = max(owners, default=0) + 1 if callable(fragments) else fragments
    if keyed and set(owners) != set(range(wanted)):
        raise ValueError(
            f"got fragments {sorted(set(owners))} of {len(keyed)} leaves; needs a leaf in each of "
            f"{list(range(wanted))}; write fragments=1, or a policy that numbers them from 0 on."
        )
    return Fragments(treedef, tuple(owners))
