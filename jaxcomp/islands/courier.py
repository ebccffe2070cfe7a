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

import jax
import numpy as np

from jaxcomp.islands import envelopes, runs

log = logging.getLogger("jaxcomp.islands")
_SOON = 0.01  # seconds until the thread looks again after something has moved
_READS = 5.0  # seconds that a step waits for a round that others have decided
_DECISION = ("round", "members", "left_out", "consensus", "saves")


class Message(NamedTuple):
    """One island's difference in one round: its header, and what it weighs and says."""

    name: str
    fence: int  # how often this name was claimed before
    round: int
    tokens: int  # since the last round of it that counted: its weight
    consensus: str  # checksum of the consensus that it started from
    payload: np.ndarray  # u8[bytes]
    digest: str


_HEADER = Message._fields[:-2]


class Rules(NamedTuple):
    """When a round is decided, and when snapshots are taken; see `join`."""

    quorum: int
    deadline: float
    snapshots: int
    poll: float


class Post(NamedTuple):
    """A difference that is to be sent: its arrays may still be computed."""

    round: int
    messages: Any
    tokens: int
    sums: Any  # u32[fragments], the checksums of the consensus


class Decided(NamedTuple):
    """A round that is ready to be merged."""

    round: int
    messages: list[Message]  # of its members, by name
    left_out: dict[str, str]  # why
    has_mine: bool  # whether this island's is among them, and not that of an older claim
    last: dict[str, list[int]]  # of all who are known, after it; see `runs.Snapshot`
    saves: bool  # whether this island takes a snapshot after it


class Courier(threading.Thread):
    """Carries the messages of one island; all public methods return at once, but for `take`."""

    def __init__(
        self,
        room: envelopes.Room,
        name: str,
        fence: int,
        sizes: list[int],
        like: list[Any],
        start: runs.Snapshot,
        rules: Rules,
    ):
        super().__init__(name=f"jaxcomp island {name}", daemon=True)
        self.room, self.island, self.fence = room, name, fence
        self.sizes, self.like, self.round = sizes, like, start.round  # sizes of payloads
        self.rules = rules
        self.trouble = ""  # of the store, which is tried again
        self.waits_for = ""
        self.opened = -1  # the last round for which another island has sent
        self.trains = False  # whether the island has made a step in this round
        self.sent_bytes = self.received_bytes = 0  # of differences
        # What is ready, in order; a `Snapshot` replaces all before it, an error has ended the run.
        self._ready: queue.SimpleQueue[Decided | runs.Snapshot | Exception] = queue.SimpleQueue()
        self._last = start.last
        self._missed = {*_missed(start.last, start.round), name}  # who missed the last round
        self._absent = set(self._missed)  # who missed one of the last two, and is not back yet
        self._posts: collections.deque[Post] = collections.deque()
        self._snaps: collections.deque[tuple] = collections.deque()
        self._mine: str | None = None  # checksum of the consensus that it has sent from
        self._mine_since = 0.0
        self._reload_from: int | None = None
        self._known: runs.View | None = None  # claims and snapshots; None to look at them again
        self._found: dict[str, Message] = {}  # of the round
        self._bad: dict[str, str] = {}
        self._wake, self._ends, self._leaves, self._until = threading.Event(), False, False, 0.0
        self._is_behind = False  # from when two events wait until it finds a round undecided

    @property
    def ready(self) -> int:
        """How many events wait to be taken."""
        return self._ready.qsize()

    def post(self, post: Post) -> None:
        """Sends a difference."""
        self._posts.append(post)
        self._wake.set()

    def save(self, *snapshot: Any) -> None:
        """Writes a snapshot: number, last, arrays."""
        self._snaps.append(snapshot)
        self._wake.set()

    def take(self, timeout: float) -> Decided | runs.Snapshot | None:
        """What is ready next, or None after so many seconds; raises what has ended the thread.

        Of many rounds the thread reads two ahead; once they are taken, this waits for the next.
        """
        began, found = time.monotonic(), None
        while found is None:
            passed = time.monotonic() - began
            more = self._is_behind and passed < _READS
            try:
                found = self._ready.get(timeout=_SOON if more else max(timeout - passed, 0))
            except queue.Empty:
                if not more:
                    return None
        self._wake.set()
        if isinstance(found, Exception):
            raise found
        return found

    def why(self, patience: float) -> str:
        """Why nothing was ready after so many seconds."""
        if self.trouble or not self.waits_for:
            answers = self.trouble or "the store does not answer"
            return f"needs round {self.round}, and waited patience={patience:g} s; {answers}"
        return (
            f"{self.waits_for}; needs quorum={self.rules.quorum}, and waited patience={patience:g} "
            "s; start more islands, or found the run with a smaller quorum."
        )

    def end(self, leaves: bool) -> None:
        """Ends the thread, after its snapshots; an island that leaves is not waited for.

        If the store is away, an island that leaves tries for as long as others would wait for it.
        """
        self._until = time.monotonic() + self.rules.deadline if leaves else 0.0
        self._ends, self._leaves = True, leaves
        self._wake.set()

    def run(self) -> None:
        """Looks at the store, again and again, less often while nothing moves."""
        pause, ends = _SOON, False
        while not ends:
            ends, moved = self._ends, False
            try:
                moved, self.trouble = self._turn(ends), ""
            except OSError as error:
                self._known, ends = None, ends and time.monotonic() >= self._until
                if ends or not self.trouble:  # once until it answers again
                    does = "ends, and cannot tell the others" if ends else "tries again"
                    log.warning("island %s %s: %s", self.island, does, error)
                self.trouble, self._is_behind = str(error), False
            except Exception as error:  # the island raises it where its user can see it
                self._ready.put(error)
                return
            pause = _SOON if moved else min(2 * pause, self.rules.poll)
            self._wake.wait(0 if ends else pause)
            self._wake.clear()

    def _turn(self, ends: bool) -> bool:
        """One look at the store, and what follows from it; whether anything has moved."""
        while self._snaps:
            runs.save(self.room, *self._snaps[0])
            self._clear()
            self._snaps.popleft()
        if ends or self._ready.qsize() > 1:
            if ends and self._leaves:
                self.room.write(f"claims/{self.island}.{self.fence:08d}.left", {})
            self._is_behind = True
            return False
        here, view = self._look()
        wanted = self.round + 1 if self._reload_from is None else self._reload_from
        later = sum(number >= wanted for number in view.snapshots)
        # After two of them the round may have been deleted, and decided here a second time.
        if later > 1 or (later and (self._reload_from is not None or "members" not in here)):
            return self._reload(wanted)
        if "members" in here:
            return self._read(view)
        self._is_behind = False
        if self.island in self._absent and (self.trains or self._posts) and self._mine is None:
            self.room.write(f"{self._path(self.island, self.fence)}.here", {})
            self._absent.remove(self.island)
        moved = self._send()
        for name, fence in sorted(view.fences.items()):
            if f"{name}.{fence:08d}" in here:
                self._fetch(name, fence)
        if self._found.keys() - {self.island}:
            self.opened = self.round
        here_again = {name for name, f in view.fences.items() if f"{name}.{f:08d}.here" in here}
        # Others may have joined between this look and its message, so it looks again first.
        return moved or self._decide(view, self._absent - here_again)

    def _look(self) -> tuple[set[str], runs.View]:
        """The objects of the round, and the claims and snapshots of its last longer look.

        It looks at those in a new round, while its message waits, and while it needs a snapshot.
        """
        paths, known = self.room.bucket.paths, self._known
        waits = self._posts or self._mine is not None
        here = runs.view_of(paths(f"rounds/{self.round:08d}")).rounds.get(self.round, set())
        if known is None or waits or self._reload_from is not None:
            known = self._known = runs.view_of([*paths("claims"), *paths("snapshots")])
        if known.fences.get(self.island, 0) > self.fence:
            raise RuntimeError(
                f"another process has joined as {self.island!r}, so that this one is fenced off; "
                "give each island a name of its own."
            )
        return here, known

    def _clear(self) -> None:
        """Deletes what nobody needs any more: all before the last snapshot but one."""
        paths = self.room.bucket.paths()
        kept = sorted([0, 0, *runs.view_of(paths).snapshots])[-2]
        self.room.bucket.delete([path for path in paths if runs.is_before(kept, path)])

    def _path(self, name: str, fence: int) -> str:
        return f"rounds/{self.round:08d}/{name}.{fence:08d}"

    def _send(self) -> bool:
        """Writes this island's difference, if it is for this round; a late one counts nowhere."""
        while self._posts and self._posts[0].round < self.round:
            self._posts.popleft()
        if not self._posts or self._mine is not None:
            return False
        post = self._posts[0]
        sums = np.asarray(post.sums).tobytes().hex()
        header = self.island, self.fence, post.round, post.tokens, sums
        payload = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(post.messages))
        path = self._path(self.island, self.fence)
        sealed = self.room.write(path, dict(zip(_HEADER, header, strict=True)), payload)
        self.sent_bytes += len(payload)
        if sealed is not None:  # else it was written before the store was away, and is read
            self._found[self.island] = Message(*header, sealed.payload, sealed.digest)
        self._posts.popleft()
        self._mine, self._mine_since = sums, time.monotonic()
        return True

    def _fetch(self, name: str, fence: int) -> None:
        """Reads a message, unless it was; what is wrong with it is kept by name."""
        if name in self._found or name in self._bad:
            return
        try:
            size = self.sizes[(self.round + 1) % len(self.sizes)]
            found = self.room.read(self._path(name, fence), size, envelopes.HEADER)
            if found is None:
                return
            header = envelopes.checked(found.header, _HEADER)
            if (header["name"], header["fence"], header["round"]) != (name, fence, self.round):
                raise ValueError(f"says that it is of {header['name']!r}")
        except ValueError as error:
            self._bad[name] = str(error)
            log.warning("round %d leaves out %s: its message %s", self.round, name, error)
        else:
            self.received_bytes += size
            self._found[name] = Message(**header, payload=found.payload, digest=found.digest)

    def _decide(self, view: runs.View, absent: set[str]) -> bool:
        """Decides the round if everybody is there, or the deadline has passed with a quorum."""
        there = dict(sorted(self._found.items()))
        missing = set(view.fences) - view.left - absent - set(there) - set(self._bad)
        self.waits_for = f"round {self.round} has messages of {list(there)}"
        if self._bad:
            self.waits_for += f", and leaves out {self._bad}"
        passed = time.monotonic() - self._mine_since >= self.rules.deadline
        if self._mine is None or len(there) < self.rules.quorum or (missing and not passed):
            return False
        sums = [message.consensus for message in there.values()]
        usual = max(sorted(set(sums)), key=sums.count)
        alike = [name for name, message in there.items() if message.consensus == usual]
        number, turn = divmod(self.round + 1, self.rules.snapshots)
        saves = turn == 0 or len(alike) < len(there)
        members = [[message.name, message.fence, message.digest] for message in there.values()]
        left_out = {name: why[:200] for name, why in self._bad.items()}
        saver = alike[number % len(alike)] if saves else ""
        header = self.round, members, left_out, usual, saver
        path = f"rounds/{self.round:08d}/members"
        self.room.write(path, dict(zip(_DECISION, header, strict=True)))
        return True  # who was first is read at the next look

    def _read(self, view: runs.View) -> bool:
        """Reads who counts in this round, and the messages that are still missing."""
        path = f"rounds/{self.round:08d}/members"
        if (found := self.room.read(path)) is None:
            return False
        decision = envelopes.checked(found.header, _DECISION)
        left_out, messages = decision["left_out"], []
        for name, fence, digest in sorted(decision["members"]):
            if name not in self._found or self._found[name].digest != digest:
                self._found.pop(name, None)
                self._bad.pop(name, None)
                self._fetch(name, fence)
            message = self._found.get(name)
            if message is not None and message.digest == digest:
                messages.append(message)
            elif message is not None or name in self._bad:
                left_out[name] = self._bad.get(name, "was changed after the round was decided")
            elif max(view.snapshots, default=-1) > self.round:
                return self._reload(self.round + 1)
            else:
                raise ConnectionError(f"{self.room.bucket.url}: {path} names {name}, who is lost")
        if self._mine not in (None, decision["consensus"]):
            log.warning(
                "island %s rounds differently from the others after round %d, and reads "
                "their next snapshot",
                self.island,
                self.round - 1,
            )
            self._reload_from = self.round + 1
        last = {name: [0, -1] for name in view.fences} | self._last
        last |= {message.name: [message.fence, self.round] for message in messages}
        has_mine = last.get(self.island) == [self.fence, self.round]
        saves = decision["saves"] == self.island
        decided = Decided(self.round, messages, left_out, has_mine, last, saves)
        self._go_on(self.round + 1, last)
        self._ready.put(decided)
        return True

    def _go_on(self, number: int, last: dict[str, list[int]]) -> None:
        # Who came back for one round may be slow: it is waited for again once it trains.
        before, self._missed = self._missed, _missed(last, number)
        self.round, self._last, self._absent = number, last, before | self._missed
        self._mine, self._found, self._bad, self._known = None, {}, {}, None
        self.trains = False

    def _reload(self, wanted: int) -> bool:
        """Goes on from the newest snapshot, which is of a later round or another consensus."""
        snapshot = runs.newest(self.room, self.like)
        if snapshot.round < wanted:
            return False
        self._reload_from = None
        mine = [self.fence, self.round]  # the message that waits is of this round
        has_mine = self._mine is not None and snapshot.last.get(self.island) == mine
        if snapshot.round != self.round:
            self._go_on(snapshot.round, snapshot.last)
        self._ready.put(snapshot._replace(has_mine=has_mine))
        return True


def _missed(last: dict[str, list[int]], number: int) -> set[str]:
    """The known names without a message in the round before this one."""
    return {name for name, (_, counted) in last.items() if counted < number - 1}
