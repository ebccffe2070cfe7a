"""An island: one JAX program that trains alone, and meets others in a bucket."""

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import require
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.quantize import quantize
from jaxcomp.exchange import wire
from jaxcomp.islands import crew, envelopes, runs, store, trees
from jaxcomp.islands.courier import Courier, Post, Rules
from jaxcomp.islands.crew import News
from jaxcomp.islands.programs import checksum, finite_drift, in_turn, place_of, programs_of
from jaxcomp.methods.local_steps import fragments_of, require_ranges
from jaxcomp.methods.moments import to_moment_dtype

_FOUR_BITS = quantize(4)
_checksum = in_turn(jax.jit(checksum))
_finite_drift = in_turn(jax.jit(finite_drift))
_NAME = "islands.join"
_MOST = 100  # rounds that are merged in one step


class Seconds(NamedTuple):
    """An interval by this island's own clock: `every=Seconds(60)`."""

    number: float


class Tokens(NamedTuple):
    """An interval by the tokens that `island.step(params, tokens=...)` names."""

    number: float


class Round(NamedTuple):
    """What a round has brought."""

    number: int
    members: tuple[str, ...]  # whose differences count
    left_out: dict[str, str]  # whose do not, and why
    counted: bool  # whether this island's does


class _Pending(NamedTuple):
    round: int
    step: int
    residual: Any
    tokens: int


def join(
    url: str,
    params: Any,
    *,
    name: str,
    every: int | Seconds | Tokens,
    code: Compressor | Policy | wire.Transport = _FOUR_BITS,
    outer: optax.GradientTransformation | None = None,
    error_decay: float | None = None,
    fragments: int | Callable[[str, Any], int] = 1,
    delay: int = 0,
    keep: float = 0.0,
    quorum: int = 1,
    deadline: float = 60.0,
    patience: float = 600.0,
    snapshots: int = 25,
    secret: str | None = None,
    poll: float = 1.0,
    options: dict[str, Any] | None = None,
) -> "Island":
    """Joins the run in a bucket or folder, or founds it: local steps of programs that come and go.

    Every island trains alone, with any loop, optimizer and mesh; if it is several connected
    processes, all call `join` and `step`. At the end of its interval it writes its coded difference
    from the consensus; all read the differences of a round, and take one outer step along their
    mean, weighted by tokens:

        e_i <- error_decay e_i + x_i - params,  g = -sum_i w_i C[e_i] / sum_i w_i,
        e_i <- e_i - C[e_i],  params <- params + outer(g),  x_i <- params.

    A round is decided as soon as nobody is missing; or when the deadline of one of its islands
    has passed, if a quorum is there. An island that missed it keeps its difference, moves along
    with the consensus, and sends all for the next round.

    Args:
      url: `s3://bucket/run`, `gs://...`, `az://...`, `file:///folder/run`, or `memory://run` within
        one process. One run has one URL.
      params: Any pytree. Floating arrays are exchanged; other leaves stay as they are.
      name: The name of this island, unique in the run. A process that joins by a name in use takes
        it over, and the older one stops with an error.
      every: Steps of an interval; or `Seconds`, or `Tokens`. The first island that has ended its
        interval opens a round; the others send at their next step.
      code: Code of the differences; or a policy `(path, leaf) -> Compressor`; or a transport:
        `jaxcomp.gathered(code, seed=1)`, or `jaxcomp.from_senders(code)` for sparse codes.
      outer: The outer optimizer. Default: `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      error_decay: Decay of the residual, in (0, 1]; None for no error feedback.
      fragments: Parts of the model that are sent in turn, one a round, `every / fragments` apart.
      delay: Steps after a round's message until its outer step; training goes on meanwhile, and
        waits only if the round is later.
      keep: Share of its own difference that an island keeps at an outer step, in [0, 1).
      quorum: Fewest islands of a round.
      deadline: Seconds from this island's message until it stops waiting for missing islands. One
        whose steps take longer counts after each of them, and is not waited for.
      patience: Seconds until `step` stops waiting for a round, by a `TimeoutError`; more than
        `deadline`.
      snapshots: Rounds between two snapshots of the consensus, from which others join. Members
        write them in turn.
      secret: Text of 16 or more characters, the same on all islands. Objects that are not sealed
        with it are refused.
      poll: Most seconds between two looks at the store.
      options: Arguments of `obstore.store.from_url`, such as `{"endpoint": "http://..."}`.

    Returns:
      The `Island`. Its `params` are the consensus: the given ones in a new run.

    Raises:
      ValueError: For arguments out of range, an unknown scheme, a store without conditional create,
        processes that do not join as one island, or a URL where there is a run of another tree,
        code, outer optimizer, fragments, quorum, snapshots or secret.
      OSError: If the store refuses or cannot be reached.
      ModuleNotFoundError: Without `obstore`; `pip install obstore`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxcomp import islands
      >>> island = islands.join("memory://docs", {"w": jnp.zeros(4)}, name="a", every=2)
      >>> params = {"w": island.params["w"] + 1.0}  # any step of training
      >>> params = island.step(island.step(params))
      >>> island.last.members
      ('a',)
      >>> params = island.leave(params)

    References:
      A. Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, algorithm 1; A.
      Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025, algorithm 2.
      Deviations: members of a round are those that came, and weigh as much as their tokens.
    """
    _check(every, fragments, delay, quorum, snapshots, deadline, patience, poll)
    steps = every if isinstance(every, int) else max(delay, 1)
    require_ranges(_NAME, steps, error_decay, fragments, delay, keep)
    transport = code if isinstance(code, wire.Transport) else wire.gathered(code)
    known = transport.exchange in (wire.gathered, wire.from_senders)
    needs, write = "gathered or from_senders", "jaxcomp.gathered(jaxcomp.quantize(4))"
    require(known, _NAME, needs, write, code=code)
    outer = outer or optax.sgd(0.7, momentum=0.9, nesterov=True)
    given = trees.floats(params)
    shared = {"quorum": quorum, "snapshots": snapshots}
    equal = {"url": url, "name": name, "every": every, "delay": delay, "keep": keep, **shared}
    crew.require_one_island(given, equal)
    parts = fragments_of(fragments, given)
    few = parts.number <= 256  # a message names the checksum of each
    require(few, _NAME, "at most 256", "fragments=16", fragments=parts.number)
    consensus = parts.cut(jax.tree.map(to_moment_dtype, given))
    outer_states = [outer.init(part) for part in consensus]
    arrays = jax.tree.leaves((consensus, outer_states))
    facts = runs.facts_of(given, parts.owners, transport, outer, **shared)
    # Only the first of several processes opens the bucket.
    opened = lambda: envelopes.Room(store.opened(url, options), envelopes.key_of(secret))
    room = crew.on_first(opened)
    cuts = crew.from_first(lambda: runs.founded(room, facts, given))
    fence, view = crew.from_first(lambda: runs.claim(room, name))
    if not view.snapshots:  # the first of those who begin together decides
        whole = list(map(crew.gathered, arrays))
        crew.on_first(lambda: runs.save(room, 0, {}, whole))
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    snapshot = crew.from_first(lambda: runs.newest(room, like))
    cut_tree = parts.cut(jax.tree.unflatten(jax.tree.structure(given), cuts))

    def compiled(part, cuts):
        leaf_cuts = tuple(jax.tree.structure(part).flatten_up_to(cuts))
        return programs_of(part, leaf_cuts, transport, outer, error_decay, keep)

    programs = list(map(compiled, consensus, cut_tree))
    courier = None
    if room is not None:
        sizes, rules = [each.payload for each in programs], Rules(quorum, deadline, snapshots, poll)
        courier = Courier(room, name, fence, sizes, like, snapshot, rules)
        courier.start()
    residual = [None] * parts.number
    if error_decay is not None:
        residual = jax.tree.map(jnp.zeros_like, consensus)
    state = consensus, outer_states, residual
    pace = every, delay, patience
    island = Island((url, name), params, parts, programs, crew.Crew(courier, poll), state, pace)
    island._adopt(snapshot)
    island._catch_up(view)
    return island


class Island:
    """One island of a run, made by `join`.

    Attributes:
      last: The last `Round` that it took part in or heard of; None before the first.
      rounds: Outer steps that the consensus has taken.
      patience: Seconds until `step` stops waiting for a round.
    """

    def __init__(self, place, given, parts, programs, crew, state, pace):
        self.last: Round | None = None
        self.rounds = 0
        self._url, self._name = place
        self._number = zlib.crc32(self._name.encode()) & 0x7FFFFFFF  # of its rounding noise
        self._given, self._tree = trees.with_own_others(given), trees.form_of(given)
        self._parts, self._programs, self._crew = parts, programs, crew
        self._consensus, self._outer, self._residual = state
        self._every, self._delay, self.patience = pace
        self._steps = self._tokens = 0
        self._counted = [0] * parts.number  # tokens at the last round of each fragment that counted
        self._origin, self._ended = 0.0, 0  # where intervals count from, and how many have ended
        self._pending: _Pending | None = None
        self._has_left = False

    def __repr__(self) -> str:
        return f"Island({self._url!r}, name={self._name!r}, rounds={self.rounds})"

    @property
    def sent_bytes(self) -> int:
        """Bytes of the differences that this island has written; 0 but in its first process."""
        return self._crew.courier.sent_bytes if self._crew.courier else 0

    @property
    def received_bytes(self) -> int:
        """Bytes of the differences of others that it has read; 0 but in its first process."""
        return self._crew.courier.received_bytes if self._crew.courier else 0

    @property
    def params(self) -> Any:
        """The consensus, in the form of the parameters that were given to `join`."""
        return self._copied(self._given)

    def step(self, params: Any, *, tokens: int = 1) -> Any:
        """Counts a step of training, and sends or merges what is due.

        Args:
          params: The parameters after the step; they may be donated to the next one.
          tokens: What the step has trained on, at least 1; this island's weight. All islands must
            count the same thing.

        Returns:
          The parameters to go on with: those given, unless the consensus has moved.

        Raises:
          ValueError: For parameters of another structure.
          RuntimeError: If another process has taken the name, or the island has left.
          TimeoutError: If a round is not decided within `patience`.
        """
        if self._has_left:
            raise RuntimeError(f"{self} has left its run; join again.")
        require(tokens >= 1, "island.step", "at least 1", "tokens=batch.size", tokens=tokens)
        self._require_same_tree(params)
        self._steps, self._tokens = self._steps + 1, self._tokens + int(tokens)
        news = self._crew.look(params)
        if not self._acts(news):
            return params
        start = self._cut(params)
        others_are_ahead = news.ready > (self._pending is not None)
        held = self._settled(start)
        if others_are_ahead:
            held = self._merged_ready(held)
        if self._is_due(news):
            self._end_interval(news)
            self._send(held)
            held = held if self._delay else self._settled(held)
        return params if held is start else trees.dressed(params, self._parts.merged(held))

    def leave(self, params: Any = None) -> Any:
        """Merges the round under way, gives up the name, and ends the thread.

        Args:
          params: The last parameters; leaves that are not exchanged are taken from them.

        Returns:
          The consensus. What was trained since the last round is not in it.

        Raises:
          ValueError: For parameters of another structure.
          TimeoutError: If the round is not decided within `patience`.
        """
        params = self._given if params is None else params
        self._require_same_tree(params)
        try:
            if self._pending is not None and not self._has_left:
                self._settled(self._cut(params))
        finally:
            self._end(leaves=True)
        return self._copied(params)

    def __enter__(self) -> "Island":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._end(leaves=kind is None)

    def _end(self, leaves):
        if not self._has_left:
            self._has_left = True
            self._crew.end(leaves, self.patience)

    def _copied(self, params: Any) -> Any:
        """The consensus in the form of `params`: a training step may donate what it gets."""
        consensus = jax.tree.map(jnp.copy, self._parts.merged(self._consensus))
        return trees.dressed(trees.with_own_others(params), consensus)

    def _cut(self, params: Any) -> list[Any]:
        """The floating leaves of each fragment."""
        return self._parts.cut(trees.floats(params))

    def _require_same_tree(self, params: Any) -> None:
        if self._tree != (tree := trees.form_of(params)):
            raise ValueError(
                f"{self} got parameters of another structure than join did; give the same "
                f"pytree. It was {self._tree}, and is {tree}."
            )

    def _acts(self, news: News) -> bool:
        """Whether anything is sent or merged after this step; most steps cost nothing here."""
        if self._pending is not None:
            return self._steps >= self._pending.step + self._delay
        return news.ready > 0 or self._is_due(news)

    def _is_due(self, news: News) -> bool:
        """Whether an interval has ended, or another island has opened the round.

        So all come to send together, whenever they have begun and however fast they are. One whose
        steps are longer than the deadline would be late each time: it opens the next round itself.
        """
        last = self.last
        is_late = last is not None and not last.counted and self._name not in last.left_out
        opens = self._intervals(news) > self._ended or (is_late and news.is_slow)
        return bool(opens) or news.opened == self.rounds

    def _intervals(self, news: News) -> int:
        """How many intervals have ended since their origin."""
        passed, parts = self._amount(news) - self._origin, self._parts.number
        if isinstance(self._every, Seconds | Tokens):
            return int(passed * parts / self._every.number)
        return int(((passed + 1) * parts - 1) / self._every)

    def _amount(self, news: News) -> float:
        """What intervals count."""
        if isinstance(self._every, Seconds):
            return news.seconds
        return self._tokens if isinstance(self._every, Tokens) else self._steps

    def _end_interval(self, news: News) -> None:
        """Counts an interval; the next ones count from here if another island has opened it."""
        intervals = self._intervals(news)
        if intervals <= self._ended:
            self._origin, intervals = self._amount(news), 0
        self._ended = intervals

    def _send(self, held) -> None:
        """Encodes the difference of the fragment whose turn it is; the thread does the rest."""
        part, count = self._turn(self.rounds)
        given = held[part], self._consensus[part], self._residual[part]
        keys = np.int32(count), np.int32(self._number)
        sent, left = self._programs[part].encode(*given, *keys)
        tokens, sums = max(self._tokens - self._counted[part], 1), jnp.stack(self._sums)
        self._crew.post(Post(self.rounds, sent, tokens, sums))
        self._pending = _Pending(self.rounds, self._steps, left, self._tokens)

    def _turn(self, number: int) -> tuple[int, int]:
        """The fragment of a round, and how many rounds it has had before: as in `local_steps`."""
        had, part = divmod(number + 1, self._parts.number)
        return part, had if part else had - 1

    def _catch_up(self, view: runs.View) -> None:
        """Takes the outer steps of rounds that were decided before this island came."""
        decided = self.rounds
        while "members" in view.rounds.get(decided, ()):
            decided += 1
        while self.rounds < decided:
            self._merged(list(self._consensus), self._event(self.patience))

    def _event(self, patience):
        """What the courier has next, or None; an error of it ends the island."""
        try:
            return self._crew.take(patience)
        except Exception:
            self._end(leaves=False)
            raise

    def _settled(self, held):
        """Waits for the round under way, if there is one, and merges it and those before."""
        while self._pending is not None:
            held = self._merged(held, self._event(self.patience))
        return held

    def _merged_ready(self, held):
        """Merges the rounds that are decided; not all, if others make them faster than that."""
        for _ in range(_MOST):
            if (event := self._event(None)) is None:
                break
            held = self._merged(held, event)
        return held

    def _merged(self, held, event):
        if isinstance(event, runs.Snapshot):
            return self._moved(held, event)
        (part, count), pending = self._turn(event.round), self._pending
        programs, left_out, members = self._programs[part], event.left_out, []
        most = max((message.tokens for message in event.messages), default=1)
        sums = programs.nothing()
        for message in event.messages:
            weight, sent = np.float32(message.tokens / most), programs.cut(message.payload)
            sums, is_finite = programs.add(sums, sent, weight, np.int32(count))
            if is_finite:
                members.append(message.name)
            else:
                left_out[message.name] = "is not finite"
        mine = pending if pending is not None and pending.round == event.round else None
        counted = mine is not None and event.has_mine and self._name in members
        stays = np.bool_(not counted)
        arguments = held[part], self._consensus[part], sums, self._outer[part], stays
        new, self._consensus[part], self._outer[part], self._sums[part] = programs.merge(*arguments)
        held = [new if number == part else tree for number, tree in enumerate(held)]
        if mine is not None:
            if event.has_mine:  # if it is not finite, nothing of these tokens is left
                self._counted[part] = mine.tokens
            if counted:
                self._residual[part] = mine.residual
            self._pending = None
        self.rounds = event.round + 1
        self.last = Round(event.round, tuple(members), left_out, counted)
        if event.saves:
            arrays = jax.tree.leaves((self._consensus, self._outer))
            self._crew.save(self.rounds, event.last, arrays)
        return held

    def _moved(self, held, snapshot):
        """Goes over to another consensus, and keeps the difference from it, if none counted."""
        old, pending = list(self._consensus), self._pending
        self._adopt(snapshot)
        if pending is not None and snapshot.has_mine:
            part, _ = self._turn(pending.round)
            old[part] = jax.tree.map(to_moment_dtype, held[part])
            self._residual[part], self._counted[part] = pending.residual, pending.tokens
        if pending is not None and pending.round < snapshot.round:
            self._pending = None
        drifts = list(map(_finite_drift, held, old))
        moved = lambda p, drift, new: (new + drift).astype(p.dtype)
        return jax.tree.map(moved, held, drifts, self._consensus)

    def _adopt(self, snapshot: runs.Snapshot) -> None:
        leaves, treedef = jax.tree.flatten((self._consensus, self._outer))
        meshes = [place.mesh for place in map(place_of, leaves) if place]
        # Counts, say, of the outer optimizer lie on all devices of the consensus.
        everywhere = NamedSharding(meshes[0], P()) if meshes else None

        def put(new, old):
            if not meshes and not old.committed:
                return jnp.array(new)
            place = place_of(old) or everywhere or old.sharding
            return jax.make_array_from_callback(new.shape, place, lambda index: new[index])

        leaves = [put(*pair) for pair in zip(snapshot.arrays, leaves, strict=True)]
        self._consensus, self._outer = treedef.unflatten(leaves)
        self._sums = list(map(_checksum, self._consensus))
        self.rounds = snapshot.round


def _check(every, fragments, delay, quorum, snapshots, deadline, patience, poll):
    number = every.number if isinstance(every, Seconds | Tokens) else every
    require(number > 0, _NAME, "more than 0", "every=100", every=every)
    share = every / fragments if isinstance(every, int) and isinstance(fragments, int) else delay
    require(delay <= share, _NAME, "from 0 to every / fragments", "delay=1", delay=delay)
    rounds = {"quorum": quorum, "snapshots": snapshots}
    require(min(rounds.values()) >= 1, _NAME, "at least 1", "quorum=1", **rounds)
    times = {"deadline": deadline, "patience": patience, "poll": poll}
    require(min(times.values()) > 0, _NAME, "more than 0 seconds", "deadline=60.0", **times)
    # An island would give up before any round with a missing island could be decided.
    longer, waits = f"patience={10 * deadline:g}", {"patience": patience, "deadline": deadline}
    require(patience > deadline, _NAME, "patience above deadline", longer, **waits)
