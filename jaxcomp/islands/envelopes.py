"""What islands write: a sealed line, a header in JSON, and a payload that is data and no code.

    jaxcomp-island-1 DIGEST
    {"name": "garage-1", "round": 7, ...}
    bytes of the payload

The digest is an HMAC-SHA256 with the run's secret, or with an empty key, over the rest and over the
object's path: an object that is cut, changed or copied to another path is refused.
"""

import hashlib
import hmac
import json
import math
import re
from typing import Any, NamedTuple

import numpy as np

_MAGIC = b"jaxcomp-island-1 "
_FIRST = len(_MAGIC) + 64 + 1  # bytes of the first line
HEADER = 2**12  # most bytes of the header of a message
LONG = 2**24  # the same of what describes a whole run or round
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LEAST = 16  # characters of a secret
_HEX = re.compile(r"[0-9a-f]{1,2048}")


class Floats(NamedTuple):
    """Where numbers that must be finite lie in a payload."""

    start: int
    dtype: Any
    numel: int


class Message(NamedTuple):
    """The header of one island's difference in one round."""

    name: str
    fence: int  # how often this name was claimed before
    round: int
    tokens: int  # since the last round of it that counted: its weight
    seconds: float  # it trained for since then
    consensus: str  # checksum of the consensus that it started from


def key_of(secret: str | None) -> bytes:
    """The key of a run's seals; empty without a secret, so that seals are checksums.

    Raises:
      ValueError: If the secret is too short.
    """
    if secret is not None and len(secret) < _LEAST:
        raise ValueError(
            f"the secret has {len(secret)} characters, and needs {_LEAST} or more; write "
            "secrets.token_hex(16) once, and give all islands the result."
        )
    return (secret or "").encode()


def sealed(key: bytes, path: str, header: dict[str, Any], payload: bytes = b"") -> bytes:
    """The bytes of an object at a path."""
    body = json.dumps(header, sort_keys=True).encode() + b"\n" + payload
    return _MAGIC + _digest(key, path, body) + b"\n" + body


def opened(
    key: bytes, path: str, data: bytes, most: int = HEADER, payload: int | None = None
) -> tuple[dict[str, Any], memoryview]:
    """The header and the payload of an object, after all that can be checked without knowing more.

    Args:
      key: Of `key_of`.
      path: Where the object lies.
      data: Its bytes.
      most: Most bytes of its header.
      payload: Bytes that the payload must have; None: any number.

    Raises:
      ValueError: With what is wrong, in one line.
    """
    if data[: len(_MAGIC)] != _MAGIC or data[_FIRST - 1 : _FIRST] != b"\n":
        raise ValueError("is no object of islands, or of another version")
    body = memoryview(data)[_FIRST:]
    if not hmac.compare_digest(data[len(_MAGIC) : _FIRST - 1], _digest(key, path, body)):
        raise ValueError("has another digest: it is cut, changed, or sealed with another secret")
    end = data.find(b"\n", _FIRST, _FIRST + most + 1) - _FIRST
    if end < 0:
        raise ValueError(f"has no header of at most {most} bytes")
    if payload is not None and len(body) - end - 1 != payload:
        raise ValueError(f"has {len(body) - end - 1} bytes of payload; needs {payload}")
    try:
        header = json.loads(bytes(body[:end]))
    except (ValueError, RecursionError):
        raise ValueError("has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("has a header that is no object")
    return header, body[end + 1 :]


def digest_of(data: bytes) -> str:
    """The digest that the first line of an object states."""
    return data[len(_MAGIC) : _FIRST - 1].decode("ascii", errors="replace")


def sizes_of(payload: int, most: int = HEADER) -> range:
    """The sizes of an object with a payload of so many bytes, and a header of at most `most`."""
    return range(_FIRST + payload + 3, _FIRST + most + payload + 2)


def message_of(header: dict[str, Any]) -> Message:
    """The header of a message, each of its fields checked.

    Raises:
      ValueError: With the field that is wrong.
    """
    if header.keys() != set(Message._fields):
        raise ValueError(f"has a header without {', '.join(Message._fields)}, or with more")
    found = Message(**header)
    whole = lambda x, least: isinstance(x, int) and not isinstance(x, bool) and least <= x < 2**53
    seconds = found.seconds
    right = {
        "name": isinstance(found.name, str) and NAME.fullmatch(found.name),
        "fence": whole(found.fence, 0),
        "round": whole(found.round, 0),
        "tokens": whole(found.tokens, 1),
        "seconds": isinstance(seconds, float) and math.isfinite(seconds) and seconds >= 0,
        "consensus": isinstance(found.consensus, str) and _HEX.fullmatch(found.consensus),
    }
    for field, is_right in right.items():
        if not is_right:
            raise ValueError(f"has {field}={getattr(found, field)!r:.60}, which is out of range")
    return found


def require_finite(payload: memoryview, floats: tuple[Floats, ...]) -> None:
    """Raises a ValueError if the scales or values of a payload are not finite."""
    for start, dtype, count in floats:
        if not np.all(np.isfinite(np.frombuffer(payload, dtype, count, start))):
            raise ValueError(f"has numbers that are not finite, from byte {start} of its payload")


def _digest(key, path, body):
    code = hmac.new(key, f"{len(path)} {path} ".encode(), hashlib.sha256)
    code.update(body)
    return code.hexdigest().encode()
