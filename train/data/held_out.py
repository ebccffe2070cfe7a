"""What is held out for validation: a matter of each thing's name alone."""

import hashlib
import os
from collections.abc import Sequence


def rank(name: str) -> float:
    """The place in [0, 1) that the hash of a name gives it; held out are the first."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8]) / 2**64


def held_out(names: Sequence[str], fraction: float) -> list[bool]:
    """Says which of several things are held out.

    Args:
      names: Names of the things.
      fraction: Share to hold out, in (0, 1).

    Returns:
      Whether the rank of each name is at most `fraction`; if none is, that of the lowest.
    """
    ranks = [rank(name) for name in names]
    limit = max(fraction, min(ranks))
    return [rank <= limit for rank in ranks]
