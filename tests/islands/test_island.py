"""Islands in one process: the arithmetic of `local_steps`, and members that come, go and fail."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import islands
from jaxcomp.islands import envelopes, programs, store
from jaxcomp.islands.crew import News
from tests.helpers import replicas
from tests.helpers.exact_islands import SHAPES, START, equal, moved, together
from tests.helpers.launching import until
from tests.helpers.replicas import history_of, one_value

RATE = 0.125


def gradients(steps, num_replicas):
    """Eighths, so that sums are exact in any order."""
    whole = lambda x: np.round(8 * x) / 8
    trees = [replicas.random_tree(100 + t, num_replicas, shapes=SHAPES) for t in range(steps)]
    return [jax.tree.map(whole, tree) for tree in trees]


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"code": jaxcomp.gathered(jaxcomp.identity()), "outer": optax.sgd(0.5), "delay": 1}, 0),
        (
            {
                "code": jaxcomp.gathered(jaxcomp.quantize(4, block=8), seed=3),
                "error_decay": 0.5,
                "fragments": lambda path, leaf: int(path == "bias"),
                "delay": 2,
                "keep": 0.5,
            },
            2e-6,
        ),
        ({"code": jaxcomp.from_senders(jaxcomp.group_top_1(4)), "outer": optax.sgd(1.0), "delay": 1,
          "error_decay": 1.0}, 2e-6),
    ],
)  # fmt: skip
def test_islands_are_local_steps(join, options, tolerance):
    """The first to the last bit: its numbers are exact."""
    grads = gradients(9, 2)
    tx = jaxcomp.local_steps(optax.sgd(RATE), "replica", every=4, **options)
    wanted = history_of(tx, START, grads, 2)
    options = {"outer": None, **options}
    members = [join(name, every=4, quorum=2, **options) for name in "ab"]
    params = [island.params for island in members]
    for grad, (consensus, state) in zip(grads, wanted[1:], strict=True):
        for i, island in enumerate(members):
            stepped = {k: params[i][k] - np.float32(RATE) * grad[k][i] for k in grad}
            params[i] = island.step(stepped)
            for name in SHAPES:
                own = np.asarray(consensus[name]) + np.asarray(state.drift[name])[i]
                np.testing.assert_allclose(params[i][name], own, rtol=0, atol=tolerance)
                found, asked = island.params[name], one_value(consensus[name])
                np.testing.assert_allclose(found, asked, rtol=0, atol=tolerance)
    under_way = members[0]._pending is not None
    assert members[0].rounds + under_way == int(state.rounds["all"]) > 1


def test_who_comes_counts_and_who_does_not_is_not_waited_for_twice(join):
    """One waits for a known member once, up to the deadline; a quorum of one goes on alone."""
    first = join("a", deadline=1.0)
    second = join("b", deadline=1.0)
    start = first.params
    together(lambda: first.step(moved(start, 1)), lambda: second.step(moved(start, 3)))
    assert first.last.members == second.last.members == ("a", "b")
    equal(first.params, moved(start, 2))
    seconds = []
    for _ in range(2):
        began = time.monotonic()
        params = first.step(moved(first.params, 1))
        seconds.append(time.monotonic() - began)
        assert first.last.members == ("a",)
    assert seconds[0] >= 1 > seconds[1]
    # The other hears of both rounds, and its own step was for none of them.
    params = second.step(moved(second.params, 8))
    assert second.rounds >= 2
    deadline = time.monotonic() + 10
    while second.last.number < 3 and time.monotonic() < deadline:
        params = second.step(params)
    assert second.last.counted


def test_a_difference_that_came_too_late_is_kept(join):
    first, second = join("a", deadline=0.2, delay=1), join("b", every=3, delay=1)
    start = first.params
    params = first.step(moved(start, 1))
    params = first.step(params)  # decided without b
    assert first.last.members == ("a",)
    first.leave(params)
    late = moved(start, 4)
    while second.rounds < 1:
        time.sleep(0.01)
        late = second.step(late)
    equal(late, moved(start, 5))  # its own difference, from the consensus that has moved by 1
    equal(second.params, moved(start, 1))
    while not (second.last and second.last.counted):
        late = second.step(late)
    assert second.last.members == ("b",)
    equal(second.params, moved(start, 5))


def test_who_missed_a_round_and_trains_is_waited_for_again(join):
    first, second = join("a", deadline=0.2), join("b", every=100)
    first.step(first.params)
    assert first.last.members == ("a",)
    first._crew.courier.rules = first._crew.courier.rules._replace(deadline=20.0)
    for number in 1, 2:
        second.step(second.params)
        here = f"rounds/{number:08d}/b.00000000.here"
        until(lambda here=here: here in first._crew.courier.room.bucket.paths())
        sent = lambda number=number: second._crew.courier.opened == number
        together(
            lambda: first.step(first.params),
            lambda sent=sent: (until(sent), second.step(second.params)),
        )
        assert first.last.members == second.last.members == ("a", "b")


def test_an_island_slower_than_the_rounds_counts_and_holds_nobody(join):
    """Its step takes longer than `deadline`: it sends as soon as it has read all rounds."""
    first, slow = join("a", deadline=0.2), join("b", every=100)
    params = first.params
    for _ in range(6):
        params = first.step(moved(params, 1))
    first._crew.courier.rules = first._crew.courier.rules._replace(deadline=20.0)
    read = slow._crew.courier._read  # from a store that answers late
    slow._crew.courier._read = lambda view: (time.sleep(0.05), read(view))[1]
    slow._crew._looked = time.monotonic() - 30  # the start of its step
    together(
        lambda: slow.step(moved(slow.params, 4)),
        lambda: (until(lambda: first._crew.courier.opened == 6), first.step(moved(params, 2))),
    )
    assert first.last == slow.last and slow.last.members == ("a", "b")
    equal(slow.params, moved(START, 6 + 3))
    # Its message may take long, so it said first that it was there.
    assert "rounds/00000006/b.00000000.here" in first._crew.courier.room.bucket.paths()
    # It counted in the last round, but missed those before, and does not train in this one.
    began = time.monotonic()
    first.step(first.params)
    assert first.last.members == ("a",) and time.monotonic() - began < 10


def test_a_first_step_is_not_slow_because_it_compiles(join):
    island = join("a", deadline=1e-9)
    assert [bool(island._crew.look(START).is_slow) for _ in range(2)] == [False, True]


def test_a_round_that_was_deleted_is_not_decided_again(join):
    """An island stops between its look and its decision until the others are three rounds ahead."""
    options = {"snapshots": 1, "deadline": 0.2}
    first, second, stopped = join("a", **options), join("b", delay=1, **options), []
    decide = second._crew.courier._decide

    def late(*of):
        if second._crew.courier._mine is not None and not stopped:
            stopped.append(True)
            for _ in range(3):
                first.step(moved(first.params, 1))
            paths = first._crew.courier.room.bucket.paths
            until(lambda: "rounds/00000000/members" not in paths())
        return decide(*of)

    second._crew.courier._decide = late
    params = second.step(moved(second.params, 4))
    params = second.step(params)
    assert stopped and second.rounds == 3
    equal(second.params, first.params)


@pytest.mark.parametrize(("mine", "mean"), [(8, 4), (np.nan, 0)])
def test_a_difference_that_counted_is_not_sent_again_after_a_pause(join, mine, mean):
    """An island is frozen from its message on until the others have deleted the round."""
    options, goes_on = {"snapshots": 1, "deadline": 0.2}, threading.Event()
    first, second = join("a", **options), join("b", delay=1, error_decay=1.0, **options)
    courier = second._crew.courier
    turn = courier._turn
    params = second.step(moved(second.params, mine))
    until(lambda: courier._mine is not None)
    courier._turn = lambda ends: goes_on.wait(20) and turn(ends)
    paths = first._crew.courier.room.bucket.paths
    while first.rounds < 3:
        first.step(first.params)
    assert first.last.members == ("a",) and first.params["bias"][0] == START["bias"][0] + mean
    until(lambda: "rounds/00000000/members" not in paths())
    goes_on.set()
    equal(second.step(params), moved(START, mean))
    assert second.rounds == 3 and second._counted == [1]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(second._residual))


def test_what_an_island_trains_during_a_pause_is_kept(join):
    """It is frozen before it sends anything, until the others have deleted the rounds."""
    first, goes_on = join("a", snapshots=1, deadline=0.2), threading.Event()
    second = join("b", snapshots=1)
    turn = second._crew.courier._turn
    second._crew.courier._turn = lambda ends: goes_on.wait(20) and turn(ends)
    paths = first._crew.courier.room.bucket.paths
    while first.rounds < 3:
        first.step(moved(first.params, 1))
    until(lambda: "rounds/00000000/members" not in paths())
    goes_on.set()
    equal(second.step(moved(START, 8)), moved(START, 3 + 8))
    equal(second.params, moved(START, 3))


def test_weights_are_tokens(join):
    # Any letters, digits, dashes: "members" is an object of the round, too.
    first, second = (join(name, quorum=2) for name in ("members", "members-1"))
    start = first.params
    together(
        lambda: first.step(moved(start, 4), tokens=1),
        lambda: second.step(moved(start, 8), tokens=3),
    )
    equal(first.params, moved(start, 7))
    equal(second.params, first.params)


@pytest.mark.parametrize("every", [10, islands.Tokens(10), islands.Seconds(10)])
def test_islands_of_other_intervals(join, every):
    """An interval ends by itself, or because another island has sent."""
    island = join("a", every=every)

    def is_due_at(amount, opened=-1):
        island._steps = island._tokens = amount
        news = News(opened, seconds=amount, ready=0, pause=1, is_slow=0)
        if is_due := island._is_due(news):
            island._end_interval(news)
        return is_due

    told = [is_due_at(9), is_due_at(10), is_due_at(14), is_due_at(14, 0), is_due_at(20)]
    assert told == [False, True, False, True, False]
    assert [is_due_at(23), is_due_at(25)] == [False, True]


def test_islands_come_to_send_together(join):
    """The second began later, and is in the midst of its interval when the first sends."""
    first, second = (join(name, every=4) for name in "ab")
    for _ in range(3):
        first.step(first.params)
    second.step(second.params)
    together(
        lambda: first.step(first.params),
        lambda: (until(lambda: second._crew.courier.opened == 0), second.step(second.params)),
    )
    assert first.last.members == second.last.members == ("a", "b") and second._steps == 2


def test_who_joins_while_another_sends_is_waited_for(join):
    options = {"every": 2, "delay": 1}
    first, second, may = join("a", **options), [], threading.Event()
    look = first._crew.courier._look

    def joined_after():
        seen = look()
        if may.is_set() and not second:
            second.append(join("b", **options))
            first.step(first.params)  # sends
        return seen

    first._crew.courier._look = joined_after
    first.step(first.params)
    may.set()
    until(lambda: second and second[0]._crew.courier.opened == 0)
    second[0].step(second[0].params)
    together(*(lambda island=island: island.step(island.params) for island in (first, *second)))
    assert first.last.members == second[0].last.members == ("a", "b")


@pytest.mark.parametrize("delay", [0, 1])
def test_a_ghost_is_fenced_off(join, delay):
    """Once it has heard, it waits for nothing, and takes no step as if it were an island."""
    ghost = join("a", every=2, delay=delay)
    ghost.step(ghost.params)
    returned = join("a")
    with pytest.raises(RuntimeError, match="another process has joined as 'a'"):
        for _ in range(300):
            time.sleep(0.02)
            ghost.step(ghost.params)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="has left its run; join again"):
        ghost.step(ghost.params)
    equal(ghost.leave(), START)
    assert time.monotonic() - began < 10
    returned.step(returned.params)
    assert returned.last.members == ("a",)


def test_who_returns_keeps_its_difference_if_that_of_its_ghost_counts(join):
    options = {"quorum": 3, "delay": 1}
    first, ghost, third = (join(name, **options) for name in "abc")
    ghost.step(moved(ghost.params, 3))
    params = first.step(first.params)
    until(lambda: first._crew.courier._found.keys() == {"a", "b"})
    ghost._end(leaves=False)
    returned = join("b", **options)
    returned._crew.courier._decide = third._crew.courier._decide = lambda *_: False
    late = returned.step(moved(returned.params, 6))
    third.step(third.params)
    first.step(params)
    late = returned.step(late)
    assert first.last.counted and not returned.last.counted
    equal(returned.params, moved(START, 1))
    equal(late, moved(START, 7))


@pytest.mark.parametrize(
    ("junk", "why"),
    [
        (lambda data: b"junk", "bytes; needs"),
        (lambda data: data[:-1] + b"\0" if data[-1] else data[:-1] + b"\1", "another digest"),
    ],
)
def test_a_bad_message_is_left_out_and_named(join, junk, why):
    first, second = (join(name, quorum=1) for name in "ab")
    path = "rounds/00000000/b.00000000"
    good = first.params
    second._end(leaves=False)
    sealed = sealed_of(second, moved(good, 5))
    first._crew.courier.room.bucket.create(path, junk(sealed))
    first.step(moved(good, 1))
    assert first.last.members == ("a",)
    assert why in first.last.left_out["b"]
    equal(first.params, moved(good, 1))


def test_a_message_that_was_changed_after_the_decision_is_left_out(join):
    first, second = join("a"), join("b")
    second._end(leaves=False)
    room, folder = first._crew.courier.room, "rounds/00000000"
    room.bucket.create(f"{folder}/b.00000000", sealed_of(second, moved(START, 5)))
    header = {"round": 0, "members": [["b", 0, "00" * 32]], "left_out": {}}
    room.write(f"{folder}/members", header | {"consensus": "00", "saves": ""})
    until(lambda: first._crew.courier.ready)
    params = first.step(moved(START, 1))
    assert first.last.members == ("a",) and first.last.number == 1
    equal(params, moved(START, 1))


def sealed_of(of, params):
    """A message of an island that has moved from START to `params`."""
    encode, of = of._programs[0].encode, of._crew.courier
    drift = params, START, None, np.int32(0), np.int32(0)
    payload = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(encode(*drift)[0]))
    header = {"name": of.island, "fence": of.fence, "round": 0, "tokens": 1,
              "consensus": "00"}  # fmt: skip
    return envelopes.sealed(of.room.key, f"rounds/00000000/{of.island}.00000000", header, payload)


def test_an_island_whose_parameters_are_not_finite_returns_to_the_consensus(join):
    first, second = (join(name, quorum=1) for name in "ab")
    start, found = first.params, []
    together(
        lambda: first.step(moved(start, 2)),
        lambda: found.append(second.step(moved(start, np.nan))),
    )
    assert first.last.members == ("a",) == second.last.members
    assert "not finite" in second.last.left_out["b"] and not second.last.counted
    equal(found[0], moved(start, 2))
    # It was there in time, and sends with the others, however slow it is.
    assert not second._is_due(News(opened=-1, seconds=0, ready=0, pause=1, is_slow=True))
    # What it has lost gives its next difference no weight.
    together(
        lambda: first.step(moved(start, 2 + 4)),
        lambda: second.step(moved(start, 2 + 8)),
    )
    equal(second.params, moved(start, 2 + 6))


def test_a_consensus_that_differs_is_replaced(join):
    """What another kind of device rounds differently is read from a snapshot."""
    first, second, third = (join(name, quorum=3) for name in "abc")
    third._consensus = [moved(third.params, 1)]
    third._sums = [programs.checksum(third._consensus[0])]
    params = [first.params, second.params, third.params]

    def steps(i, island):
        for _ in range(3):
            params[i] = island.step(params[i])
            time.sleep(0.1)

    together(*(lambda i=i, x=x: steps(i, x) for i, x in enumerate((first, second, third))))
    equal(third.params, first.params)
    equal(second.params, first.params)


@pytest.mark.parametrize("deadline", [20.0, 0.01])
def test_a_store_that_is_away_is_tried_again(join, monkeypatch, deadline):
    island, away = join("a", deadline=deadline), {"paths": 3, "create": 0}

    def refuses(name, call, *of):
        if away[name]:
            away[name] -= 1
            raise ConnectionError("away")
        return call(*of)

    for name in away:
        known = name, getattr(store.Bucket, name)
        monkeypatch.setattr(store.Bucket, name, lambda *of, known=known: refuses(*known, *of))
    equal(island.step(moved(START, 1)), moved(START, 1))
    assert away["paths"] == 0
    # Nobody would wait for it longer than that.
    away["create"] = 3 if deadline > 1 else 10**6
    equal(island.leave(), moved(START, 1))
    is_known = "claims/a.00000000.left" in island._crew.courier.room.bucket.paths()
    assert is_known == (deadline > 1) and not island._crew.courier.is_alive()


def test_while_it_trains_an_island_lists_its_round_alone(join, monkeypatch):
    asked, paths = [], store.Bucket.paths
    monkeypatch.setattr(
        store.Bucket, "paths", lambda self, *of: (asked.extend(of), paths(self, *of))[1]
    )
    island = join("a")
    island.step(island.params)
    until(lambda: asked[-3:] == ["rounds/00000001"] * 3)
    assert "claims" in asked


def test_who_waits_for_a_store_that_refuses_is_told_that_alone(join, monkeypatch):
    def full(self, *_):
        raise OSError(28, "the disk is full")

    island = join("a", deadline=0.2, patience=0.5)
    until(lambda: island._crew.courier.waits_for)
    monkeypatch.setattr(store.Bucket, "create", full)
    with pytest.raises(TimeoutError, match=r"^needs round 0, and waited .* s; .* disk is full$"):
        island.step(island.params)


def test_waiting_ends_and_says_for_what(join):
    island = join("a", quorum=2, deadline=0.2, patience=0.3)
    with pytest.raises(TimeoutError, match=r"messages of \['a'\]; needs quorum=2, and waited"):
        island.step(island.params)
    with pytest.raises(RuntimeError, match="has left its run"):
        island.step(island.params)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": {"bias": np.zeros(6, np.float32)}}, r"its leaf 'kernel' is .*, yours is None"),
        ({"params": {k: x.astype(jnp.bfloat16) for k, x in START.items()}}, "'float32'.*bfloat16"),
        ({"code": jaxcomp.sign()}, r"its leaf 'bias' is .*identity\(\).*sign\(\)"),
        ({"outer": optax.sgd(0.5)}, "its outer "),
        ({"quorum": 3}, "its quorum is 1, yours is 3"),
        ({"secret": "sixteen letters!"}, "another digest: .*the run's secret"),
        ({"secret": "short"}, "needs 16 or more"),
        ({"name": "a/b"}, "needs 1 to 64 letters"),
        ({"every": 0}, "needs more than 0"),
        ({"delay": 2}, "from 0 to every / fragments"),
        ({"deadline": 60.0}, "patience=60.0, deadline=60.0; needs patience above .* patience=600"),
        (
            {
                "params": {str(i): np.zeros(1, np.float32) for i in range(257)},
                "fragments": 257,
                "every": 300,
            },
            "at most 256",
        ),
        ({"code": jaxcomp.two_shot(jaxcomp.sign())}, "gathered or from_senders"),
    ],
)
def test_mistakes_are_told(join, options, text):
    join("a")
    options = dict(options)
    with pytest.raises(ValueError, match=text):
        join(options.pop("name", "b"), options.pop("params", START), **options)


def test_leaving_is_an_event_for_nobody(join):
    first, second = join("a", deadline=30.0), join("b", deadline=30.0)
    start = first.params
    together(lambda: first.step(moved(start, 1)), lambda: second.step(moved(start, 1)))
    began = time.monotonic()
    # It leaves while the other one waits for it.
    together(lambda: first.step(first.params), lambda: (time.sleep(0.3), second.leave()))
    assert first.last.members == ("a",) and time.monotonic() - began < 10


def test_a_folder_is_a_run_too(join, tmp_path):
    url = f"file://{tmp_path}/run"
    secret = "a secret of some letters"
    params = join("a", url=url, secret=secret).step(moved(START, 1))
    assert (tmp_path / "run" / "rounds" / "00000000" / "members").is_file()
    again = join("a", START, url=url, secret=secret)
    while again.rounds < 1:
        again.step(again.params)
    equal(again.params, params)
