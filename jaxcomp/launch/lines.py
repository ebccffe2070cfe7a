"""Sealed lines between two processes: a request, and its answer.

Who accepts a connection sends a nonce first, and the request's seal covers it. The request has a
nonce for its answer. So no line is good a second time.
"""

import json
import secrets
import socket
import time
from typing import Any

from jaxcomp.launch import seals

_LONGEST = 4096  # bytes


def send(connection: socket.socket, key: bytes, about: str, what: dict[str, Any]) -> None:
    """Sends a JSON object in one line, under a seal if there is a key."""
    connection.sendall(seals.seal(key, about, json.dumps(what)).encode() + b"\n")


def greet(connection: socket.socket, nonce: str) -> None:
    """Sends the nonce for the caller's request."""
    send(connection, b"", "", {"nonce": nonce})


def ask(
    connection: socket.socket, key: bytes, kind: str, request: dict[str, Any], until: float
) -> tuple[str, str]:
    """Sends a request; returns the other side's nonce, and that of the answer."""
    nonce = (seals.json_object(read(connection, until)) or {}).get("nonce")
    own = secrets.token_hex(16)
    send(connection, key, f"{kind} {nonce}", request | {"nonce": own})
    return str(nonce), own


def answer(
    connection: socket.socket, key: bytes, nonce: str, until: float, most: int = _LONGEST
) -> dict[str, Any] | None:
    """The answer with this nonce; None for anything else."""
    text = seals.unseal(key, f"answer {nonce}", read(connection, until, most))
    return seals.json_object(text or "")


def read(connection: socket.socket, until: float, most: int = _LONGEST) -> str:
    """A line, read up to its end and no further; empty if it does not end, or is too long."""
    data = b""
    while len(data) < most:
        limit(connection, until)
        # One byte at a time, since a file may follow the line.
        if (part := connection.recv(1)) in (b"", b"\n"):
            return data.decode(errors="replace") if part else ""
        data += part
    return ""


def limit(connection: socket.socket, until: float) -> None:
    """Limits the next wait; a TimeoutError if there is no time left."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it takes too long")
    connection.settimeout(left)
