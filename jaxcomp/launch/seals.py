"""Seals messages between processes with the run's secret; messages without a seal are ignored.

An empty key belongs to a run without a secret: its seals are empty, and all messages count.
"""

import hashlib
import hmac
import json
import pathlib
from typing import Any

_LEAST = 16  # characters of a secret


def read_secret(file: str | None) -> bytes:
    """Reads the secret of a run, the same for all its processes; empty without a file.

    Raises:
      ValueError: If it is too short.
      OSError: If there is no such file.
    """
    if file is None:
        return b""
    secret = pathlib.Path(file).read_bytes().strip()
    if len(secret) < _LEAST:
        raise ValueError(
            f"--secret-file {file} has {len(secret)} characters, and needs {_LEAST} or more; write "
            f"head -c 32 /dev/urandom | base64 > {file}."
        )
    return secret


def session(secret: bytes, nonce: str) -> bytes:
    """The key of one start of a run; seals of other starts are invalid in it."""
    return _code(secret, "session", nonce).encode() if secret else b""


def seal(key: bytes, about: str, text: str) -> str:
    """A text after its HMAC-SHA256 code, which also covers what the text is about."""
    return f"{_code(key, about, text)} {text}" if key else text


def unseal(key: bytes, about: str, sealed: str) -> str | None:
    """The sealed text, or None if it was not sealed with this key for this subject."""
    if not key:
        return sealed
    code, _, text = sealed.partition(" ")
    good = hmac.compare_digest(
        code.encode(errors="surrogatepass"), _code(key, about, text).encode()
    )
    return text if good else None


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a text, or None, even if the text is meant to break the parser."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _code(key: bytes, about: str, text: str) -> str:
    # The length separates the two.
    message = f"{len(about)} {about} {text}".encode(errors="surrogatepass")
    return hmac.new(key, message, hashlib.sha256).hexdigest()
