"""Files that processes send to each other directly: a sealed line, then the bytes.

Anybody who reaches the port may connect. A caller has a few seconds for one short line. Without the
run's seal, or with a request for a missing file, it is disconnected. Sizes and times are bounded.
"""

import contextlib
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxcomp.launch import addresses, lines, seals

_PATIENCE = 5.0  # seconds for the first line
_MOST = 256  # callers at a time
_PIECE = 1 << 20


class FileStore(NamedTuple):
    """The files of a process, which others request by name."""

    room: Callable[[str, int], Path | None]  # name, bytes -> folder for it; None: rejected
    find: Callable[[str], Path | None]  # name -> the file; None: missing
    is_good: Callable[[str, str], bool]  # name, SHA-256 -> whether these are the file's bytes


@contextlib.contextmanager
def serve_files(address: str, key: bytes, store: FileStore, seconds: float):
    """Receives and serves files at a port of this process until the end.

    Args:
      address: Numeric address to listen at.
      key: Seals the messages; callers without it get nothing, and nothing of theirs is kept.
      store: The files.
      seconds: Time limit for one file.

    Yields:
      `host:port`.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    callers = threading.BoundedSemaphore(_MOST)

    def serve(caller):
        with contextlib.closing(caller), contextlib.suppress(OSError):
            _serve(caller, key, store, seconds)
        callers.release()

    def listen():
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:  # closed
                return
            if not callers.acquire(blocking=False):
                caller.close()
                continue
            threading.Thread(target=serve, args=(caller,), daemon=True).start()

    with socket.create_server((address, 0), family=family, backlog=128) as listener:
        threading.Thread(target=listen, daemon=True, name="files").start()
        try:
            yield addresses.join(*listener.getsockname()[:2])
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread


def put(to: str, key: bytes, file: Path, seconds: float) -> None:
    """Sends a file to the process at `host:port`, and returns when that process has kept it.

    Raises:
      OSError: If that process does not take it, or is too slow.
    """
    until = time.monotonic() + seconds
    size = file.stat().st_size
    with _connected(to, key, {"put": file.name, "size": size}, until) as (connection, nonce):
        _send_file(connection, file, until)
        _require_answer(connection, key, nonce, until, to, file.name)


def get(source: str, key: bytes, name: str, store: FileStore, seconds: float) -> Path:
    """Fetches a file from the process at `host:port`, and puts it where `store` has room.

    Raises:
      OSError: If that process does not send it, is too slow, or sends other bytes.
    """
    until = time.monotonic() + seconds
    with _connected(source, key, {"get": name}, until) as (connection, nonce):
        answer = _require_answer(connection, key, nonce, until, source, name)
        size: Any = answer.get("size")
        folder = store.room(name, size) if type(size) is int and size >= 0 else None
        if folder is None or not _keep(connection, folder, name, size, store, until):
            raise OSError(f"what {source} gives as {name} is not it")
        return folder / name


@contextlib.contextmanager
def _connected(to: str, key: bytes, request: dict[str, Any], until: float):
    """A connection after a request was sent, and the nonce of its answer."""
    left = max(0.01, until - time.monotonic())
    try:
        address = addresses.split(to)
    except ValueError as error:  # a stranger may have written it
        raise OSError(f"{to!r:.80} is no address of a process") from error
    with socket.create_connection(address, timeout=left) as connection:
        _, own = lines.ask(connection, key, "request", request, until)
        yield connection, own


def _require_answer(connection, key, nonce, until, to: str, name: str) -> dict[str, Any]:
    answer = lines.answer(connection, key, nonce, until)
    if answer is None:
        raise OSError(f"process at {to} does not answer for {name}")
    if problem := answer.get("problem"):
        raise OSError(f"process at {to}, {name}: {problem}")
    return answer


def _serve(caller: socket.socket, key: bytes, store: FileStore, seconds: float) -> None:
    nonce, began = secrets.token_hex(16), time.monotonic()
    caller.settimeout(_PATIENCE)
    lines.greet(caller, nonce)
    line = lines.read(caller, began + _PATIENCE)
    request = seals.json_object(seals.unseal(key, f"request {nonce}", line) or "")
    if request is None:
        return
    about, until = f"answer {request.get('nonce')}", began + seconds
    if isinstance(name := request.get("get"), str):
        if (file := store.find(name)) is None:
            lines.send(caller, key, about, {"problem": "it is not there"})
            return
        lines.send(caller, key, about, {"size": file.stat().st_size})
        _send_file(caller, file, until)
        return
    name, size = request.get("put"), request.get("size")
    if not isinstance(name, str) or type(size) is not int or size < 0:
        return
    folder, problem = store.room(name, size), "it is not wanted here"
    if folder is not None:
        try:
            is_kept = _keep(caller, folder, name, size, store, until)
            problem = "" if is_kept else "its bytes are not those of its name"
        except TimeoutError:
            return
        except OSError as error:  # a full disk
            problem = error.strerror or "it cannot be kept"
    lines.send(caller, key, about, {"problem": problem})


def _send_file(connection: socket.socket, file: Path, until: float) -> None:
    with file.open("rb") as source:
        while piece := source.read(_PIECE):
            lines.limit(connection, until)
            connection.sendall(piece)


def _keep(connection, folder: Path, name: str, size: int, store: FileStore, until: float) -> bool:
    """Writes this many bytes into a folder, where they become a file if they are good."""
    partial, found = folder / f"{name}.part", hashlib.sha256()
    try:
        with partial.open("wb") as file:
            while size:
                lines.limit(connection, until)
                if not (piece := connection.recv(min(size, _PIECE))):
                    return False
                found.update(piece)
                file.write(piece)
                size -= len(piece)
        if not store.is_good(name, found.hexdigest()):
            return False
        partial.rename(folder / name)
        return True
    finally:
        partial.unlink(missing_ok=True)
