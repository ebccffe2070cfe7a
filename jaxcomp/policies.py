"""Which compressor a leaf travels by."""

from collections.abc import Callable
from typing import Any

from jaxcomp.compressors import Compressor

Policy = Callable[[str, Any], Compressor]
"""`(path, leaf) -> Compressor`."""


def policy_of(compressor: Compressor | Policy) -> Policy:
    """The policy that sends every leaf by one compressor, or the one that is given, checked.

    Raises:
      ValueError: If it is neither; when called, if the policy returns something else.
    """
    if isinstance(compressor, Compressor):
        return lambda path, leaf: compressor
    if not callable(compressor):
        raise ValueError(
            f"got {compressor!r} to send by; needs a Compressor, or a policy (path, leaf) -> "
            "Compressor; write quantize(4)."
        )

    def policy(path, leaf):
        chosen = compressor(path, leaf)
        if not isinstance(chosen, Compressor):
            raise ValueError(
                f"the policy returned {chosen!r} for the leaf {path!r}; needs a Compressor; write "
                "quantize(4), or identity() for what travels exact."
            )
        return chosen

    return policy
