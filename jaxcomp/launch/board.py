"""The board of a run: short texts that its processes leave for each other, under the run's seal.

It is the key-value store of JAX's coordination service, which runs in process 0 and accepts
anybody's writes. The key of every text ends with a process number. Texts without the seal of this
start of the run, or from no process of it, are ignored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxcomp.launch import private, seals

_ROOT = "jaxcomp"
_LONGEST = 1 << 20  # characters of a text
# Key and address of this start; like JAX's client, one for each process.
_own = [(b"", "127.0.0.1")]


class Board(NamedTuple):
    """Texts by folder and process, common to all processes; both functions may block or raise."""

    put: Callable[[str, str], None]  # folder, text: this process's
    look: Callable[[str], dict[int, str]]  # folder -> texts by process


def trust(key: bytes, address: str) -> None:
    """Sets the key of this start of the run, and the address at which others reach this process."""
    _own[:] = [(key, address)]


def own() -> tuple[bytes, str]:
    """The key of this start, and this process's numeric address."""
    return _own[0]


def this_run() -> Board | None:
    """The board of the processes that JAX has connected; None if there are none."""
    state = private.state()
    if state.client is None:
        return None
    return for_client(state.client, state.process_id, state.num_processes, own()[0])


def numbers() -> tuple[int, int]:
    """The number of this process and that of all, also before JAX has devices."""
    return private.state().process_id, private.state().num_processes


def for_client(client: Any, me: int, count: int, key: bytes) -> Board:
    """The board of a client of JAX's coordination service.

    Args:
      client: The client.
      me: Number of this process, in [0, count).
      count: Processes of the run.
      key: From `seals.session`."""

    def put(folder, text):
        about = f"{_ROOT}/{folder}/{me}"
        # Somebody may have written there before.
        client.key_value_set(about, seals.seal(key, about, text), allow_overwrite=True)

    def look(folder):
        written = dict(client.key_value_dir_get(f"{_ROOT}/{folder}"))
        found = {}
        for number in range(count):
            about = f"{_ROOT}/{folder}/{number}"
            sealed = written.get(about, "")
            text = seals.unseal(key, about, sealed)
            if about in written and text is not None and len(sealed) <= _LONGEST:
                found[number] = text
        return found

    return Board(put, look)
