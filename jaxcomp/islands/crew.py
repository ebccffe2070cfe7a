"""The processes of one island: the first has the courier, and all hear of the same things together.

An island of several hosts is one program of `jax.distributed`, and all its processes must take the
same outer step after the same step of training. Only the first one opens the bucket. What it has
read reaches the others by collectives, which all processes enter at the same steps.
"""

import functools
import hashlib
import math
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.islands import runs
from jaxcomp.islands.courier import Courier, Decided, Post
from jaxcomp.islands.programs import in_turn

_BEAT = 5.0  # seconds that the others wait in one collective, at most: some give up after 30
_FIRST, _PIECE = 2**12, 2**24  # bytes that are sent at once, so that two programs send any number


class News(NamedTuple):
    """What the courier has seen."""

    opened: float  # the last round for which another island has sent
    seconds: float  # since the island joined
    ready: float  # how many events wait
    pause: float  # steps until several processes look again
    is_slow: float  # whether a step takes longer than the deadline


class Crew:
    """The courier of an island as all its processes see it; they call each method together."""

    def __init__(self, courier: Courier | None, poll: float):
        self.courier, self._poll, self._began = courier, poll, time.monotonic()
        self._news = News(-1, 0, 0, 1, 0)
        self._asked: jax.Array | None = None
        self._steps, self._looked = 0, math.inf  # since the last look; the first step compiles

    def look(self, params: Any) -> News:
        """What the courier has seen, after each step that has made such parameters.

        Several processes look about once a `poll`. They read what they asked for the time before,
        so that no step waits for the answer.
        """
        if jax.process_count() == 1:
            return self._seen(1)
        in_turn(lambda params: params)(params)  # the step is done before anything is sent
        self._steps += 1
        if self._steps < self._news.pause:
            return self._news._replace(ready=0)
        if self._asked is not None:
            self._news = News(*np.asarray(self._asked).view(np.float64).tolist())
        now = np.array(self._seen(self._steps), np.float64)
        self._asked, self._steps = _broadcast(now.view(np.uint32)), 0
        return self._news

    def _seen(self, steps: int) -> News:
        courier, now = self.courier, time.monotonic()
        if courier is None:
            return News(0, 0, 0, 0, 0)  # of another process: what all hear is a sum
        courier.trains = True
        pace, self._looked = (now - self._looked) / steps, now
        pause = min(max(self._poll / max(pace, 1e-9), 1), 2 * self._news.pause)
        is_slow, pause = pace > courier.rules.deadline, math.floor(pause)
        return News(courier.opened, now - self._began, courier.ready, pause, is_slow)

    def take(self, patience: float | None = None) -> Decided | runs.Snapshot | None:
        """What is ready next, or None; with `patience` waits, and a `TimeoutError` ends that."""
        end = None if patience is None else time.monotonic() + patience

        def next_event():
            assert self.courier is not None
            left = 0.0 if end is None else max(end - time.monotonic(), 0.0)
            found = self.courier.take(min(left, _BEAT))
            if found is None and patience is not None and left <= _BEAT:
                raise TimeoutError(self.courier.why(patience))
            return found

        while (event := from_first(next_event)) is None and end is not None:
            pass
        return event

    def post(self, post: Post) -> None:
        """Sends a difference; the devices gather what no process holds whole."""
        messages, sums = jax.tree.map(_replicated, (post.messages, post.sums))
        if self.courier is not None:
            self.courier.post(post._replace(messages=messages, sums=sums))

    def save(self, number: int, last: dict[str, list[int]], arrays: list[jax.Array]) -> None:
        """Writes a snapshot; gathers arrays that no process holds whole."""
        whole = list(map(gathered, arrays))
        if self.courier is not None:
            self.courier.save(number, last, whole)

    def end(self, leaves: bool, patience: float) -> None:
        """Ends the courier; an island that leaves is not waited for."""
        if self.courier is not None:
            self.courier.end(leaves)
            self.courier.join(timeout=patience)


def is_first() -> bool:
    """Whether this process has the courier."""
    return jax.process_index() == 0


def from_first(call: Callable[[], Any]) -> Any:
    """What a call returns or raises in the first process, in all of them; only that one calls."""
    if jax.process_count() == 1:
        return call()
    value = error = None
    if is_first():
        try:
            value = call()
        except Exception as caught:
            error = caught
    # A pickle, since both ends are one program of one person: messages of other islands are data.
    sent = _from_first(pickle.dumps((value, error)) if is_first() else b"")
    if not is_first():
        value, error = pickle.loads(sent)
    if error is not None:
        raise error
    return value


def on_first(call: Callable[[], Any]) -> Any:
    """What a call returns in the first process, and None in others; raises its error in all."""
    found: list[Any] = []
    from_first(lambda: found.append(call()))
    return found[0] if found else None


def require_one_island(tree: Any, given: dict[str, Any]) -> None:
    """Checks that all processes join one island, with parameters that they hold together.

    Raises:
      ValueError: In all processes, if arguments differ, or parameters are those of one process.
    """
    count = jax.process_count()
    if count == 1:
        return
    text = repr(sorted(given.items()))
    mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)
    others = multihost_utils.process_allgather(mine)
    differs = [i for i in range(count) if (others[i] != others[0]).any()]
    if differs:
        raise ValueError(
            f"islands.join got other arguments in process {differs[0]} than in process 0, here "
            f"{text}; connected processes are one island, and all join by the same arguments."
        )
    for leaf in jax.tree.leaves(tree):
        if len({device.process_index for device in leaf.sharding.device_set}) < count:
            raise ValueError(
                f"islands.join got parameters that not all of {count} connected processes hold; "
                "needs arrays of all: write jax.device_put(params, NamedSharding(mesh, "
                "PartitionSpec())) with a mesh of jax.devices()."
            )


def gathered(x: jax.Array) -> Any:
    """An array as a whole: on this host, if several processes hold its shards."""
    whole = _replicated(x)
    return x if whole is x else np.asarray(whole)


def _replicated(x: jax.Array) -> jax.Array:
    """An array that each process holds whole."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return _copies(NamedSharding(x.sharding.mesh, P()))(x)


@functools.cache
def _copies(everywhere):
    return in_turn(jax.jit(lambda x: x, out_shardings=everywhere))


def _from_first(data: bytes) -> bytes:
    """The first process's bytes."""
    sized = len(data).to_bytes(8, "little") + data
    head = np.asarray(_broadcast(_padded(sized[:_FIRST], _FIRST))).tobytes()
    size = 8 + int.from_bytes(head[:8], "little")
    pieces = [head]
    for start in range(_FIRST, size, _PIECE):
        piece = _padded(sized[start : start + _PIECE], _PIECE)
        pieces.append(np.asarray(_broadcast(piece)).tobytes())
    return b"".join(pieces)[8:size]


def _padded(data: bytes, size: int) -> np.ndarray:
    return np.frombuffer(data.ljust(size, b"\0"), np.uint8)


def _broadcast(x: np.ndarray) -> jax.Array:
    """The first process's array in all, since others give zeros; it may still be on its way."""
    rows, total = _adder()
    return total(jax.make_array_from_process_local_data(rows, x[None]))


@functools.cache
def _adder():
    """Where an array of one row for each process lies, and the program that adds the rows."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[i] for i in sorted(firsts)]), ("process",))
    add = lambda x: jnp.sum(x, axis=0, dtype=x.dtype)
    total = jax.jit(add, out_shardings=NamedSharding(mesh, P()))
    return NamedSharding(mesh, P("process")), in_turn(total)
