"""Seals of the run's secret on what processes write to each other: who lacks it is not heard.

A key without bytes is that of a run without a secret: its seals are empty, and everybody is heard.
"""

import hashlib
import hmac
import json
import pathlib
from typing import Any

_LEAST = 16  # characters of a secret


def read_secret(file: str | None) -> bytes:
    """Reads the secret of a run, which all its processes are given; of no file, none.

    Raises:
      ValueError: If it is too short to be one.
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
    """The key of one start of a run: what was sealed in another one is no good in it."""
    return _code(secret, "session", nonce).encode() if secret else b""


def seal(key: bytes, about: str, text: str) -> str:
    """A text with its code, HMAC-SHA256, before it; the code covers what the text is about, too."""
    return f"{_code(key, about, text)} {text}" if key else text


def unseal(key: bytes, about: str, sealed: str) -> str | None:
    """The text that was sealed, or None if it was not sealed with this key about this."""
    if not key:
        return sealed
    code, _, text = sealed.partition(" ")
    good = hmac.compare_digest(
        code.encode(errors="surrogatepass"), _code(key, about, text).encode()
    )
    return text if good else None


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that a text is, or None; also of a text that means to break the parser."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _code(key: bytes, about: str, text: str) -> str:
    # The length keeps the two apart.
    message = f"{len(about)} {about} {text}".encode(errors="surrogatepass")
    return hmac.new(key, message, hashlib.sha256).hexdigest()
