"""The default code of 1-bit methods: a row of an embedding shares no scale with many others."""

from typing import Any

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.sign import sign
from jaxcomp.replicas.kinds import kind_of

_LEAST, _MOST = 64, 1024  # entries of a block
_OTHERS = sign(block=_MOST)


def signs_by_row(path: str, leaf: Any) -> Compressor:
    """Signs with a scale for each row of an embedding, and for every 1,024 entries elsewhere.

    A row whose token has just come moves by a rate, most others by nothing. A scale for both is
    small, and the row takes as many messages to arrive as there are rows in its block. Short rows
    share a block of 64 entries.
    """
    if kind_of(path, leaf) != "embedding":
        return _OTHERS
    return sign(block=min(max(leaf.shape[-1], _LEAST), _MOST), scale_dtype="bfloat16")
