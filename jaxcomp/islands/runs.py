"""What a run is: the facts that all its islands share, who has claimed a name, and snapshots."""

import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp.compressors.platforms import platform
from jaxcomp.compressors.policies import path_of, policy_of
from jaxcomp.exchange.wire import Transport
from jaxcomp.islands import envelopes
from jaxcomp.islands.programs import cuts_of
from jaxcomp.islands.store import Bucket
from jaxcomp.methods.moments import wide

META = "meta"
_PATH = re.compile(
    rf"(?P<kind>rounds/(?P<round>\d{{8}})|claims)/(?P<name>{envelopes.NAME.pattern})"
    r"(\.(?P<fence>\d{8})(?P<left>\.left)?)?|snapshots/(?P<snapshot>\d{8})"
)


class Room(NamedTuple):
    """A bucket with the key of the run that lies in it."""

    bucket: Bucket
    key: bytes

    def write(self, path: str, header: dict[str, Any], payload: bytes = b"") -> bool:
        """Writes a sealed object that is new; False if there is one already."""
        return self.bucket.create(path, envelopes.sealed(self.key, path, header, payload))

    def read(self, path: str, payload: int = 0) -> tuple[dict[str, Any], memoryview] | None:
        """The header and the payload of what is no message of an island; None if it is not there.

        Raises:
          ValueError: If it is not sealed by this run, or of another size.
        """
        try:
            data = self.bucket.get(path, envelopes.sizes_of(payload, envelopes.LONG))
            if data is None:
                return None
            return envelopes.opened(self.key, path, data, envelopes.LONG, payload)
        except ValueError as error:
            raise ValueError(
                f"{self.bucket.url}: {path} {error}; give the run's secret, or write another prefix"
            ) from None


class View(NamedTuple):
    """What one look at the store has found."""

    fences: dict[str, int]  # the newest claim of each name
    left: set[str]  # names whose newest claim is given up
    messages: dict[int, set[str]]  # of each round, names whose newest claim has written one
    decided: set[int]
    snapshots: list[int]
    paths: list[tuple[int, str]]  # what belongs to one round, with its number


def view_of(paths: list[str]) -> View:
    """Reads the names of objects; others than those of a run are ignored."""
    found = [(match, path) for path in paths if (match := _PATH.fullmatch(path))]
    fences: dict[str, int] = {}
    for match, _ in found:
        if match["kind"] == "claims" and match["fence"]:
            fences[match["name"]] = max(int(match["fence"]), fences.get(match["name"], 0))
    view = View(fences, set(), {}, set(), [], [])
    for match, path in found:
        name = match["name"]
        if match["snapshot"]:
            view.snapshots.append(int(match["snapshot"]))
            view.paths.append((int(match["snapshot"]), path))
            continue
        is_newest = match["fence"] is not None and int(match["fence"]) == fences.get(name)
        if match["round"]:
            number = int(match["round"])
            view.paths.append((number, path))
            if name == "members" and not match["fence"]:
                view.decided.add(number)
            elif is_newest and not match["left"]:
                view.messages.setdefault(number, set()).add(name)
        elif is_newest and match["left"]:
            view.left.add(name)
    view.snapshots.sort()
    return view


def claim(room: Room, name: str) -> tuple[int, View]:
    """Claims a name: an older island of this name is fenced off. The number, and what was there."""
    if not envelopes.NAME.fullmatch(name) or name == "members":
        raise ValueError(
            f"got the name {name!r:.80}; needs 1 to 64 letters, digits, '-' or '_', other than "
            "'members'; write name='garage-1'."
        )
    nonce = uuid.uuid4().hex
    for _ in range(8):
        view = view_of(room.bucket.paths())
        fence = view.fences.get(name, -1) + 1
        path = f"claims/{name}.{fence:08d}"
        # A store that answers too late makes its client write twice: the second is refused.
        found = None if room.write(path, {"nonce": nonce}) else room.read(path)
        if found is None or found[0].get("nonce") == nonce:
            return fence, view
    raise ConnectionError(f"{room.bucket.url}: others claim the name {name!r} all the time")


def facts_of(
    params: Any, transport: Transport, outer: optax.GradientTransformation, **others: Any
) -> dict[str, Any]:
    """What must be equal on all islands, in plain values."""
    keyed, _ = jax.tree_util.tree_flatten_with_path(params)
    policy = policy_of(transport.code)
    described = [(path_of(path), list(x.shape), str(x.dtype)) for path, x in keyed]
    return {
        "version": 1,
        "tree": [list(leaf) for leaf in described],
        "mean": repr(transport.exchange),
        "seed": transport.seed,
        "bucket_numel": transport.bucket_numel,
        "codes": [policy(path_of(path), x).name for path, x in keyed],
        "outer": _trial(outer, params),
        "tiles": platform() == "tpu",
        **others,
    }


def founded(
    room: Room, facts: dict[str, Any], params: Any, start: Callable[[], tuple[dict, bytes]]
) -> dict[str, Any]:
    """Founds a run, or finds that it is one of these facts; its meta object.

    Args:
      room: Where it lies.
      facts: Of `facts_of`.
      params: Whose sharding the run's messages get, if it is new.
      start: Makes the header and the payload of its first snapshot.

    Raises:
      ValueError: If there is another run, with the fact that differs.
    """
    found = room.read(META)
    if found is None:
        # The snapshot is there before the run is, so that nobody waits for a lost founder.
        path = f"starts/{uuid.uuid4().hex}"
        room.write(path, *start())
        cuts = [list(cuts_of(x)) for x in jax.tree.leaves(params)]
        if room.write(META, {**facts, "cuts": cuts, "start": path}):
            return {**facts, "cuts": cuts, "start": path}
        found = room.read(META)
        assert found is not None, META
        if found[0].get("start") != path:
            room.bucket.delete([path])
    meta = found[0]
    for name, mine in facts.items():
        if (theirs := meta.get(name)) != mine:
            raise ValueError(f"{room.bucket.url} holds another run: {_other(name, theirs, mine)}")
    return meta


def _other(name, theirs, mine):
    if isinstance(theirs, list) and isinstance(mine, list):
        pairs = zip(theirs, mine, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(theirs), len(mine)))
        number = f"{len(theirs)} and {len(mine)} entries; " if len(theirs) != len(mine) else ""
        theirs, mine = (values[at : at + 1] for values in (theirs, mine))
        name = f"{name} ({number}entry {at})"
    return (
        f"its {name} is {theirs!r:.120}, yours is {mine!r:.120}; join with the same, or write "
        "another prefix."
    )


def _trial(outer, params):
    """What two steps of the outer optimizer change, which tells most optimizers apart."""

    @jax.jit
    def changes(params):
        state, found = outer.init(params), []
        for _ in range(2):
            change, state = outer.update(params, state, params)
            leaves = enumerate(jax.tree.leaves(change), 1)
            found.append(sum(number * jnp.sum(leaf) for number, leaf in leaves))
        return found

    small = jax.tree.map(lambda x: jnp.full((1,) * x.ndim, 0.5, wide(x.dtype)), params)
    return [f"{float(change):.5g}" for change in changes(small)]


class Snapshot(NamedTuple):
    """The consensus before a round."""

    round: int
    members: list[str]  # of the round before it
    arrays: list[np.ndarray]  # leaves of the consensus, then of the outer states


def photographed(round_number: int, members: list[str], arrays: list[Any]) -> tuple[dict, bytes]:
    """The header and the payload of a snapshot; copies arrays from their devices."""
    payload = b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)
    return {"round": round_number, "members": members}, payload


def developed(room: Room, path: str, like: list[Any]) -> Snapshot | None:
    """Reads a snapshot of arrays of these shapes; None if it is not there any more."""
    sizes = [x.size * np.dtype(x.dtype).itemsize for x in like]
    found = room.read(path, sum(sizes))
    if found is None:
        return None
    header, payload = found
    number, members = header.get("round"), header.get("members")
    if not isinstance(number, int) or not isinstance(members, list) or number < 0:
        raise ValueError(f"{room.bucket.url}: {path} is no snapshot; delete it")
    arrays, start = [], 0
    for x, size in zip(like, sizes, strict=True):
        part = np.frombuffer(payload[start : start + size], x.dtype).reshape(x.shape)
        envelopes.require_finite(payload, (envelopes.Floats(start, x.dtype, x.size),) * is_float(x))
        arrays.append(part)
        start += size
    return Snapshot(number, [name for name in members if isinstance(name, str)], arrays)


def newest(room: Room, view: View, meta: dict[str, Any], like: list[Any]) -> Snapshot:
    """The newest snapshot that is whole; that of the start if there is no other."""
    for number in reversed(view.snapshots):
        try:
            found = developed(room, f"snapshots/{number:08d}", like)
        except ValueError:
            continue  # an older one and the rounds since it may still be there
        if found is not None:
            return found
    found = developed(room, str(meta.get("start")), like)
    if found is None:
        raise ValueError(f"{room.bucket.url}: the run has lost its snapshots; write another prefix")
    return found


def is_float(x: Any) -> bool:
    """Whether a leaf is an array that islands exchange."""
    return hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating)
