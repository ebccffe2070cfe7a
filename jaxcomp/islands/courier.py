"""The thread of an island: it writes and reads the store, and decides who counts in a round.

Nobody leads. The first island that creates `rounds/R/members` has decided round R, and all others
read that. Clocks are not compared: a deadline counts from what this island itself has seen.
"""

import collections
import logging
import queue
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from jaxcomp.islands import envelopes, runs
from jaxcomp.islands.envelopes import Message
from jaxcomp.islands.programs import Programs

log = logging.getLogger("jaxcomp.islands")
_SOON = 0.01  # seconds until the thread looks again after something has moved


class Post(NamedTuple):
    """A difference that is to be sent: its arrays may still be computed."""

    round: int
    messages: list[Any]
    tokens: int
    seconds: float
    consensus: Any  # u32[fragments, 2]


class Share(NamedTuple):
    """What one island adds to a round."""

    name: str
    tokens: int
    payload: memoryview


class Decided(NamedTuple):
    """A round that is ready to be merged."""

    round: int
    shares: list[Share]  # by name
    left_out: dict[str, str]  # why
    saves: str  # the name of the island that takes a snapshot after it; "" if none does


class Courier(threading.Thread):
    """Carries the messages of one island; all public methods return at once."""

    def __init__(
        self,
        room: runs.Room,
        name: str,
        fence: int,
        programs: list[Programs],
        like: list[Any],
        *,
        meta: dict[str, Any],
        absent: set[str],
        quorum: int,
        deadline: float,
        poll: float,
        snapshots: int,
        first: int,
    ):
        super().__init__(name=f"jaxcomp island {name}", daemon=True)
        self.room, self.island, self.fence = room, name, fence
        self.programs, self.like, self.meta = programs, like, meta
        self.quorum, self.deadline, self.poll, self.snapshots = quorum, deadline, poll, snapshots
        # What is ready to merge, in order: `Decided`, or a `Snapshot` that replaces all before it.
        self.ready: queue.Queue[Decided | runs.Snapshot] = queue.Queue(maxsize=2)
        self.trouble = ""  # of the store, which is tried again
        self.failure: Exception | None = None  # which has ended the thread
        self.waits_for = ""
        self.round = first  # the next to be decided
        self._absent = absent  # names whose islands missed the last round
        self._posts: collections.deque[Post] = collections.deque()
        self._snaps: collections.deque[tuple[int, list[str], list[Any]]] = collections.deque()
        self._mine: Message | None = None
        self._mine_since = 0.0
        self._reload_from: int | None = None
        self._found: dict[str, tuple[Message, Share, str]] = {}  # of the round, and their digests
        self._bad: dict[str, str] = {}
        self._seconds: dict[str, float] = {}  # that islands trained for between their last rounds
        self._wake, self._ends, self._leaves = threading.Event(), False, False

    def programs_of(self, number: int) -> Programs:
        """Those of the fragment whose turn it is in a round: as in `local_steps`."""
        return self.programs[(number + 1) % len(self.programs)]

    def post(self, post: Post) -> None:
        """Sends a difference."""
        self._posts.append(post)
        self._wake.set()

    def save(self, number: int, members: list[str], arrays: list[Any]) -> None:
        """Writes the snapshot of a round."""
        self._snaps.append((number, members, arrays))
        self._wake.set()

    def take(self, timeout: float) -> Decided | runs.Snapshot | None:
        """What is ready next, or None after so many seconds."""
        try:
            found = self.ready.get(timeout=timeout) if timeout else self.ready.get_nowait()
        except queue.Empty:
            return None
        self._wake.set()
        return found

    def end(self, leaves: bool) -> None:
        """Ends the thread, after its snapshots; an island that leaves is not waited for."""
        self._ends, self._leaves = True, leaves
        self._wake.set()

    def run(self) -> None:
        """Looks at the store, again and again, less often while nothing moves."""
        pause = _SOON
        while True:
            ends, moved = self._ends, False
            try:
                moved, self.trouble = self._turn(ends), ""
            except OSError as error:
                if not self.trouble:  # once until it answers again
                    log.warning("island %s tries again: %s", self.island, error)
                self.trouble = str(error)
            except Exception as error:  # the island raises it where its user can see it
                self.failure = error
                return
            if ends:
                return
            pause = _SOON if moved else min(2 * pause, self.poll)
            self._wake.wait(pause)
            self._wake.clear()

    def _turn(self, ends: bool) -> bool:
        """One look at the store, and what follows from it; whether anything has moved."""
        view = runs.view_of(self.room.bucket.paths())
        if view.fences.get(self.island, 0) > self.fence:
            raise RuntimeError(
                f"another process has joined as {self.island!r}, so that this one is fenced off; "
                "give each island a name of its own."
            )
        while self._snaps:
            self._save(*self._snaps[0])
            self._snaps.popleft()
        if ends:
            if self._leaves:
                self.room.write(f"claims/{self.island}.{self.fence:08d}.left", {})
            return False
        if self.ready.full():
            return False
        newest, decided = max(view.snapshots, default=-1), self.round in view.decided
        wanted = self.round + 1 if self._reload_from is None else self._reload_from
        if newest >= wanted and (self._reload_from is not None or not decided):
            return self._reload(view)
        if decided:
            return self._read(view)
        moved = self._send()
        self._gather(view)
        return self._decide(view) or moved

    def _send(self) -> bool:
        """Writes this island's difference, if it is for this round; a late one counts nowhere."""
        while self._posts and self._posts[0].round < self.round:
            self._posts.popleft()
        if not self._posts or self._mine is not None:
            return False
        post = self._posts[0]
        consensus = np.asarray(post.consensus).tobytes().hex()
        mine = Message(
            self.island, self.fence, self.round, post.tokens, float(post.seconds), consensus
        )
        payload = b"".join(np.asarray(message).tobytes() for message in post.messages)
        path = self._path(self.island, self.fence)
        data = envelopes.sealed(self.room.key, path, mine._asdict(), payload)
        if self._accept(self.island, self.fence, path, data):
            self.room.bucket.create(path, data)
        self._posts.popleft()
        self._mine, self._mine_since = mine, time.monotonic()
        return True

    def _path(self, name: str, fence: int) -> str:
        return f"rounds/{self.round:08d}/{name}.{fence:08d}"

    def _gather(self, view: runs.View) -> None:
        """Reads the messages of this round that have come since the last look."""
        for name in sorted(view.messages.get(self.round, ())):
            if name not in self._found and name not in self._bad:
                self._fetch(name, view.fences[name])

    def _fetch(self, name: str, fence: int) -> None:
        """Reads one message, unless it cannot be one by its size."""
        path, payload = self._path(name, fence), self.programs_of(self.round).payload
        try:
            data = self.room.bucket.get(path, envelopes.sizes_of(payload))
        except ValueError as error:
            self._refuse(name, str(error))
            return
        if data is not None:
            self._accept(name, fence, path, data)

    def _accept(self, name: str, fence: int, path: str, data: bytes) -> bool:
        """Checks a message; what is wrong with it is kept by name."""
        programs = self.programs_of(self.round)
        try:
            header, body = envelopes.opened(self.room.key, path, data, payload=programs.payload)
            message = envelopes.message_of(header)
            if (message.name, message.fence, message.round) != (name, fence, self.round):
                raise ValueError(f"says that it is of {message.name!r} in round {message.round}")
            envelopes.require_finite(body, programs.floats)
        except ValueError as error:
            self._refuse(name, str(error))
            return False
        share = Share(name, message.tokens, body)
        self._found[name] = message, share, envelopes.digest_of(data)
        return True

    def _refuse(self, name: str, why: str) -> None:
        self._bad[name] = why
        log.warning("round %d leaves out %s: its message %s", self.round, name, why)

    def _decide(self, view: runs.View) -> bool:
        """Decides the round if everybody is there, or the deadline has passed with a quorum."""
        there, own = set(self._found), self._mine
        # One that trains for longer than the deadline would not be here before it.
        missing = set(view.fences) - view.left - self._absent - there - set(self._bad)
        late = lambda name: own and self._seconds.get(name, 0) - own.seconds > self.deadline
        missing = {name for name in missing if not late(name)}
        self.waits_for = f"round {self.round} has messages of {sorted(there)}"
        if self._bad:
            self.waits_for += f", and leaves out {self._bad}"
        passed = time.monotonic() - self._mine_since >= self.deadline
        if own is None or len(there) < self.quorum or (missing and not passed):
            return False
        found = {name: self._found[name] for name in sorted(there)}
        hashes = [message.consensus for message, _, _ in found.values()]
        usual = max(sorted(set(hashes)), key=hashes.count)
        alike = [name for name, (message, _, _) in found.items() if message.consensus == usual]
        saves = (self.round + 1) % self.snapshots == 0 or len(alike) < len(found)
        header = {
            "round": self.round,
            "members": [
                [name, message.fence, digest] for name, (message, _, digest) in found.items()
            ],
            "left_out": {name: why[:200] for name, why in self._bad.items()},
            "consensus": usual,
            "saves": alike[0] if saves else "",
        }
        self.room.write(f"rounds/{self.round:08d}/members", header)
        return True  # who was first is read at the next look

    def _read(self, view: runs.View) -> bool:
        """Reads who counts in this round, and the messages that are still missing."""
        path = f"rounds/{self.round:08d}/members"
        found = self.room.read(path)
        if found is None:
            return False
        members, left_out, usual, saves = _members_of(found[0], f"{self.room.bucket.url}: {path}")
        self._bad = {name: why for name, why in self._bad.items() if name in left_out}
        shares = []
        for name, fence, digest in members:
            if name not in self._found or self._found[name][2] != digest:
                self._found.pop(name, None)
                self._fetch(name, fence)
            if name in self._bad:
                left_out[name] = self._bad[name]
            elif name not in self._found:
                if max(view.snapshots, default=-1) > self.round:
                    return self._reload(view)
                raise ConnectionError(f"{self.room.bucket.url}: {path} names {name}, who is lost")
            elif self._found[name][2] != digest:
                left_out[name] = "was changed after the round was decided"
            else:
                shares.append(self._found[name][1])
        own = self._mine
        if own is not None and own.consensus != usual:
            log.warning(
                "island %s rounds differently from the others after round %d, and reads their next "
                "snapshot", self.island, self.round - 1,
            )  # fmt: skip
            self._reload_from = self.round + 1
        self._seconds.update({name: found[0].seconds for name, found in self._found.items()})
        self._absent = set(view.fences) - {share.name for share in shares}
        self.ready.put(Decided(self.round, shares, left_out, saves))
        self._next(self.round + 1)
        return True

    def _next(self, number: int) -> None:
        self.round, self._mine, self._found, self._bad = number, None, {}, {}

    def _reload(self, view: runs.View) -> bool:
        """Goes on from the newest snapshot, which is of a later round or another consensus."""
        snapshot = runs.newest(self.room, view, self.meta, self.like)
        if snapshot.round < (self.round + 1 if self._reload_from is None else self._reload_from):
            return False
        self._reload_from = None
        self.ready.put(snapshot)
        if snapshot.round != self.round:
            self._absent = set(view.fences) - set(snapshot.members)
            self._next(snapshot.round)
        return True

    def _save(self, number: int, members: list[str], arrays: list[Any]) -> None:
        """Writes a snapshot, and deletes what nobody needs any more."""
        header, payload = runs.photographed(number, members, arrays)
        self.room.write(f"snapshots/{number:08d}", header, payload)
        view = runs.view_of(self.room.bucket.paths())
        if len(view.snapshots) > 1:
            old = [path for number, path in view.paths if number < view.snapshots[-2]]
            self.room.bucket.delete([*old, str(self.meta["start"])])


def _members_of(header: dict[str, Any], where: str):
    """The fields of a decision, checked."""
    try:
        members = [
            (str(name), int(fence), str(digest)) for name, fence, digest in header["members"]
        ]
        left_out = {str(name): str(why) for name, why in header["left_out"].items()}
        usual, saves = str(header["consensus"]), str(header["saves"])
        good = all(envelopes.NAME.fullmatch(name) and 0 <= f < 10**8 for name, f, _ in members)
        good = good and len({name for name, _, _ in members}) == len(members)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        good = False
    if not good:
        raise ValueError(f"{where} is no decision; delete it")
    return sorted(members), left_out, usual, saves
