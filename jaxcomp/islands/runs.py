"""What a run is: the facts that all its islands share, who has claimed a name, and snapshots."""

import re
import uuid
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._printing import text
from jaxcomp.compressors.platforms import platform
from jaxcomp.compressors.policies import path_of, policy_of
from jaxcomp.exchange.wire import Transport
from jaxcomp.islands import envelopes
from jaxcomp.islands.envelopes import Room
from jaxcomp.islands.programs import cuts_of
from jaxcomp.methods.moments import wide

_NAME = envelopes.NAME.pattern
_PATH = re.compile(
    rf"claims/({_NAME})\.(\d{{8}})(\.left)?|rounds/(\d{{8}})/(members|{_NAME}\.\d{{8}}(?:\.here)?)"
    r"|snapshots/(\d{8})"
)
_ROUND = re.compile(r"(?:rounds|snapshots)/(\d{8})\b")


class View(NamedTuple):
    """What one look at the store has found."""

    fences: dict[str, int]  # the newest claim of each name
    left: set[str]  # names whose newest claim is given up
    rounds: dict[int, set[str]]  # "members", NAME.FENCE of messages, NAME.FENCE.here before them
    snapshots: list[int]


def view_of(paths: list[str]) -> View:
    """Reads the names of objects; others than those of a run are ignored."""
    view = View({}, set(), {}, [])
    for match in filter(None, map(_PATH.fullmatch, sorted(paths))):  # a name's newest claim is last
        name, fence, left, round_number, object_name, snapshot = match.groups()
        if name:
            view.fences[name] = int(fence)
            (view.left.add if left else view.left.discard)(name)
        elif round_number:
            view.rounds.setdefault(int(round_number), set()).add(object_name)
        else:
            view.snapshots.append(int(snapshot))
    return view


def is_before(number: int, path: str) -> bool:
    """Whether an object is a message, a decision or a part of a snapshot of an earlier round."""
    found = _ROUND.match(path)
    return found is not None and int(found[1]) < number


def require_name(name: Any) -> None:
    """Checks the name of an island; a ValueError if it cannot be part of a path."""
    if not (isinstance(name, str) and envelopes.NAME.fullmatch(name)):
        raise ValueError(
            f"got the name {name!r:.80}; needs 1 to 64 letters of A to Z, digits, '-' or '_'; "
            "write name='garage-1'."
        )


def claim(room: Room, name: str) -> tuple[int, View]:
    """Claims a name: an older island of this name is fenced off. The number, and what was there."""
    require_name(name)
    nonce = uuid.uuid4().hex
    for _ in range(8):
        view = view_of(room.bucket.paths())
        fence = view.fences.get(name, -1) + 1
        path = f"claims/{name}.{fence:08d}"
        # A store that answers too late makes its client write twice: the second is refused.
        found = room.write(path, {"nonce": nonce}) or room.read(path)
        if found is not None and found.header == {"nonce": nonce}:
            return fence, view
    raise ConnectionError(f"{room.bucket.url}: others claim the name {name!r} all the time")


def facts_of(
    params: Any,
    owners: tuple[int, ...],
    transport: Transport,
    outer: optax.GradientTransformation,
    **others: Any,
) -> dict[str, Any]:
    """What must be equal on all islands, in plain values; `owners` are the leaves' fragments."""
    policy, leaves = policy_of(transport.code), {}
    for (keys, x), owner in zip(jax.tree.leaves_with_path(params), owners, strict=True):
        path = path_of(keys)
        described = [str(x.dtype), list(x.shape), policy(path, x).name, f"fragment {owner}"]
        leaves[f"leaf {path!r}"] = described
    return leaves | {
        "version": 4,
        "exchange": repr(transport.exchange),
        "seed": transport.seed,
        "bucket_numel": transport.bucket_numel,
        "tiles": platform() == "tpu",
        "order": transport.order and text(transport.order),
        "outer": _trial(outer, params),
        **others,
    }


def founded(room: Room, facts: dict[str, Any], params: Any) -> list[tuple[int, ...]]:
    """Founds a run, or finds that it is one of these facts.

    Returns:
      How messages cut each leaf: as its founder had sharded it.

    Raises:
      ValueError: If there is another run, with the fact that differs.
    """
    cuts = [list(cuts_of(x)) for x in jax.tree.leaves(params)]
    found = room.read("meta") or room.write("meta", {**facts, "cuts": cuts}) or room.read("meta")
    assert found is not None
    meta = dict(found.header)
    cuts = meta.pop("cuts", None)
    for name in sorted({*facts, *meta}):
        if (theirs := meta.get(name)) != (mine := facts.get(name)):
            raise ValueError(
                f"{room.bucket.url} holds another run: its {name} is {theirs!r:.120}, yours is "
                f"{mine!r:.120}; join with the same, or write another prefix."
            )
    return list(map(tuple, cuts))


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
    # Of all known names: fence and round of the last message that counted, or a round of -1.
    last: dict[str, list[int]]
    arrays: list[np.ndarray]  # leaves of the consensus, then of the outer states
    has_mine: bool = False  # whether what this island has sent for an earlier round is in it


def save(room: Room, number: int, last: dict[str, list[int]], arrays: list[Any]) -> None:
    """Writes a snapshot, if there is none of this round; copies arrays from their devices.

    The arrays are an object of their own, which counts once a small one names it. If another island
    was first, they stay until they are old: a store that answers too late refuses also who was.
    """
    path, nonce = f"snapshots/{number:08d}", uuid.uuid4().hex
    if path in room.bucket.paths("snapshots"):
        return
    room.upload(f"{path}.{nonce}", list(map(np.asarray, arrays)))
    room.write(path, {"round": number, "last": last, "nonce": nonce})


def newest(room: Room, like: list[Any]) -> Snapshot:
    """The newest snapshot that is whole, with arrays of these shapes."""
    sizes = [x.size * np.dtype(x.dtype).itemsize for x in like]
    tried = set[int]()
    # It looks again each time: others may have deleted what it saw, and written newer ones.
    while untried := {*view_of(room.bucket.paths()).snapshots} - tried:
        tried.add(number := max(untried))
        path = f"snapshots/{number:08d}"
        try:
            if (found := room.read(path)) is None:
                continue
            header = envelopes.checked(found.header, ("round", "last", "nonce"))
            if (whole := room.read(f"{path}.{header['nonce']}", sum(sizes))) is None:
                continue
        except ValueError:
            continue  # an older one and the rounds since it may still be there
        *pieces, _ = np.split(whole.payload, np.cumsum(sizes))
        pairs = zip(pieces, like, strict=True)
        arrays = [piece.view(x.dtype).reshape(x.shape) for piece, x in pairs]
        return Snapshot(number, header["last"], arrays)
    raise ValueError(f"{room.bucket.url}: the run has lost its snapshots; write another prefix")
