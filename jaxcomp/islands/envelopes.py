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
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.islands.store import Bucket

_MAGIC = b"jaxcomp-island-1 "
_FIRST = len(_MAGIC) + 64 + 1  # bytes of the first line
HEADER = 2**12  # most bytes of the header of a message
LONG = 2**24  # the same of what describes a whole run or round
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Sealed(NamedTuple):
    """An object that was opened."""

    header: dict[str, Any]
    payload: np.ndarray  # u8[bytes]
    digest: str


class Room(NamedTuple):
    """A bucket with the key of the run that lies in it; an empty key seals as a checksum."""

    bucket: Bucket
    key: bytes

    def write(self, path: str, header: dict[str, Any], payload: bytes = b"") -> Sealed | None:
        """Writes an object that is new; None if there is one already."""
        data = sealed(self.key, path, header, payload)
        if not self.bucket.create(path, data):
            return None
        digest = data[len(_MAGIC) : _FIRST - 1].decode()
        return Sealed(header, np.frombuffer(payload, np.uint8), digest)

    def upload(self, path: str, payload: list[np.ndarray]) -> None:
        """Writes an object without a header, of any size, at a path that nobody else writes."""
        lines = [np.ascontiguousarray(x).reshape(-1).view(np.uint8).data for x in payload]
        self.bucket.upload(path, _pieces(self.key, path, {}, lines))

    def read(self, path: str, payload: int = 0, most: int = LONG) -> Sealed | None:
        """Reads an object with so many bytes of payload; None if it is not there.

        Raises:
          ValueError: If it has another size or seal; none is read whose size cannot be right.
        """
        try:
            sizes = range(_FIRST + payload + 3, _FIRST + most + payload + 2)
            data = self.bucket.get(path, sizes)
            return None if data is None else opened(self.key, path, data, most, payload)
        except ValueError as error:
            raise ValueError(f"{self.bucket.url}: {path} {error}") from None


def key_of(secret: str | None) -> bytes:
    """The key of a run's seals."""
    if secret is not None and len(secret) < 16:
        raise ValueError(
            f"the secret has {len(secret)} characters, and needs 16 or more; write "
            "secrets.token_hex(16) once, and give all islands the result."
        )
    return (secret or "").encode()


def sealed(key: bytes, path: str, header: dict[str, Any], payload: bytes = b"") -> bytes:
    """The bytes of an object at a path."""
    return b"".join(_pieces(key, path, header, [payload]))


def _pieces(key, path, header, payload):
    body = [json.dumps(header, sort_keys=True).encode() + b"\n", *payload]
    return [_MAGIC + _digest(key, path, *body) + b"\n", *body]


def opened(key: bytes, path: str, data: bytes | bytearray, most: int, payload: int) -> Sealed:
    """An object, after all that can be checked without knowing more; see `Room.read`."""
    if data[: len(_MAGIC)] != _MAGIC or data[_FIRST - 1 : _FIRST] != b"\n":
        raise ValueError("is no object of islands, or of another version")
    body, digest = memoryview(data)[_FIRST:], data[len(_MAGIC) : _FIRST - 1]
    if not hmac.compare_digest(digest, _digest(key, path, body)):
        raise ValueError("has another digest: it is cut or changed; or give the run's secret")
    end = data.find(b"\n", _FIRST, _FIRST + most + 1) - _FIRST
    if end < 0:
        raise ValueError(f"has no header of at most {most} bytes")
    if len(body) - end - 1 != payload:
        raise ValueError(f"has {len(body) - end - 1} bytes of payload; needs {payload}")
    try:
        header = json.loads(bytes(body[:end]))
    except (ValueError, RecursionError):
        raise ValueError("has a header that is not JSON") from None
    return Sealed(header, np.frombuffer(body[end + 1 :], np.uint8), digest.decode())


def checked(header: Any, fields: Iterable[str]) -> dict[str, Any]:
    """A header with just these fields, each in its range.

    Raises:
      ValueError: With the field that is wrong.
    """
    if not isinstance(header, dict) or header.keys() != set(fields):
        raise ValueError(f"has a header without {', '.join(fields)}, or with more")
    for field, value in header.items():
        if not _RULES[field](value):
            raise ValueError(f"has {field}={value!r:.60}, which is out of range")
    return header


def _whole(least=0, below=2**53):
    return lambda x: type(x) is int and least <= x < below


def _text(pattern):
    return lambda x: isinstance(x, str) and re.fullmatch(pattern, x) is not None


def _row(*rules):
    is_row = lambda x: isinstance(x, list) and len(x) == len(rules)
    return lambda x: is_row(x) and all(rule(item) for rule, item in zip(rules, x, strict=True))


def _table(key, value):
    return lambda x: isinstance(x, dict) and all(key(k) and value(v) for k, v in x.items())


_NAME, _SUM = _text(NAME), _text("[0-9a-f]{1,2048}")
_MEMBER = _row(_NAME, _whole(below=10**8), _SUM)
_RULES = {
    "name": _NAME,
    "fence": _whole(),
    "round": _whole(),
    "tokens": _whole(1),
    "consensus": _SUM,
    "members": lambda x: (
        isinstance(x, list) and all(map(_MEMBER, x)) and len({name for name, *_ in x}) == len(x)
    ),
    "left_out": _table(lambda name: True, lambda why: isinstance(why, str)),
    "saves": lambda x: x == "" or _NAME(x),
    "nonce": _text("[0-9a-f]{32}"),
    "last": _table(_NAME, _row(_whole(), _whole(-1))),
}


def _digest(key, path, *body):
    code = hmac.new(key, f"{len(path)} {path} ".encode(), hashlib.sha256)
    for piece in body:
        code.update(piece)
    return code.hexdigest().encode()
