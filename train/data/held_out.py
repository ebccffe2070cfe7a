"""Decides what is held out for validation, from names only."""

import hashlib
import os
from collections.abc import Sequence


def rank(name: str) -> float:
    """A number in [0, 1) from the hash of a name; the lowest are held out."""
    return int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8]) / 2**64


def held_out(names: Sequence[str], fraction: float) -> list[bool]:
    """Decides which of several things are held out.

    Args:
      names: Names of the things.
      fraction: Share to hold out, in (0, 1).

    Returns:
      For each name, whether its rank is at most `fraction`; if none is, only the lowest is held
      out.
    """
    ranks = [rank(name) for name in names]
    limit = max(fraction, min(ranks))
    return [rank <= limit for rank in ranks]
