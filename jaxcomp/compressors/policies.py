"""Policies: which compressor each leaf is sent with."""

import re
from collections.abc import Callable
from typing import Any

import jax

from jaxcomp._printing import Printed, by_name
from jaxcomp.compressors.base import Compressor

Policy = Callable[[str, Any], Compressor]
"""`(path, leaf) -> Compressor`."""


Order = Callable[[str], Any]
"""`path -> key`: leaves are sorted by it."""


def policy_of(compressor: Compressor | Policy) -> Policy:
    """Turns one compressor for all leaves into a policy, and checks a policy that is given.

    Raises:
      ValueError: If the argument is neither. When called, if the policy does not return a
        compressor.
    """
    if isinstance(compressor, Compressor):
        return lambda path, leaf: compressor
    if not callable(compressor):
        injected = isinstance(compressor, jax.Array)
        raise ValueError(
            f"got {compressor!r} to send by; needs a Compressor, or a policy (path, leaf) -> "
            "Compressor; write quantize(4)."
            + " Give optax.inject_hyperparams a function of the learning rate only."
            * injected
        )

    def policy(path, leaf):
        chosen = compressor(path, leaf)
        if not isinstance(chosen, Compressor):
            raise ValueError(
                f"the policy returned {chosen!r} for the leaf {path!r}; needs a Compressor; write "
                "quantize(4), or identity() for what is sent in float32."
            )
        return chosen

    return policy


def path_of(key_path) -> str:
    """The path of a leaf as one string, such as `params/block_0/up/kernel`."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def by_path(*rules: tuple[str, Any]) -> Callable[[str, Any], Any]:
    """Makes a policy `(path, leaf) -> value` from rules; the first that matches wins.

    Args:
      *rules: Patterns for `re.search` on the leaf's path, each with its value.

    Examples:
      >>> import jaxcomp
      >>> policy = jaxcomp.by_path(("embed", jaxcomp.quantize(8)), (".*", jaxcomp.quantize(4)))
      >>> policy("params/embed/embedding", None).name
      'quantize(8)'

    Raises:
      ValueError: When called with a path that no rule covers.
    """

    def policy(path, leaf):
        del leaf
        for pattern, value in rules:
            if re.search(pattern, path):
                return value
        raise ValueError(
            f"no rule covers the leaf {path!r}: the patterns are {[rule[0] for rule in rules]}; "
            "end the rules with ('.*', ...)."
        )

    return Printed(policy, f"by_path({', '.join(map(repr, rules))})")


@by_name
def last_layers_first(path: str) -> Any:
    """Sorts leaves as the backward pass completes their gradients, as far as paths tell.

    Layers come by number, the last one first; then leaves without a number, such as embeddings, in
    the order of the tree. So a bucket has neighbouring layers, and its message leaves once they
    are done. In the order of a tree `block_10` follows `block_1`. For a model whose first layers
    have no common name, or that has several stacks, write a function of your own.

    Args:
      path: The path of a leaf.

    Returns:
      A key for `sorted`.

    Examples:
      >>> import jaxcomp
      >>> sorted(["block_1/up", "block_10/up", "embed"], key=jaxcomp.last_layers_first)
      ['block_10/up', 'block_1/up', 'embed']
      >>> jaxcomp.two_shot(jaxcomp.quantize(4), order=None)
      two_shot(quantize(4), order=None)
    """
    text, *more = re.split(r"(\d+)", path)
    numbered = [text, *(x if i % 2 else -int(x) for i, x in enumerate(more))]
    return not more, numbered if more else []
