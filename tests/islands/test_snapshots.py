"""Snapshots of the consensus, from which islands join."""

import time

import jax
import numpy as np
import optax

from jaxcomp.islands import envelopes, runs, store
from tests.helpers.exact_islands import START, equal, moved, together
from tests.helpers.launching import until


def test_a_joiner_takes_the_newest_consensus_and_its_optimizer(join):
    outer = optax.sgd(0.5, momentum=0.5)
    first = join("a", outer=outer, snapshots=2)
    params = first.params
    for _ in range(5):
        params = first.step(moved(params, 1))
    time.sleep(0.1)
    second = join("b", moved(START, 77), outer=outer, snapshots=2, every=100)
    assert second.rounds == 5 and first._crew.courier.room.bucket.paths()
    equal(second.params, first.params)
    equal(second._outer, first._outer)
    kept = second._crew.courier.room.bucket.paths()
    assert "rounds/00000000/members" not in kept and "rounds/00000004/members" in kept


def test_a_joiner_whose_snapshot_is_replaced_meanwhile_reads_the_next(join, monkeypatch):
    """Between its look and its answer the others take two snapshots, and delete those before."""
    first, get, looked = join("a", snapshots=1, deadline=0.2), store.Bucket.get, []

    def late(self, path, sizes):
        if path.startswith("snapshots/") and not looked:
            looked.append(path)
            for _ in range(3):
                first.step(moved(first.params, 1))
            until(lambda: path not in self.paths() and "snapshots/00000003" in self.paths())
        return get(self, path, sizes)

    monkeypatch.setattr(store.Bucket, "get", late)
    second = join("b", snapshots=1)
    assert looked == ["snapshots/00000000"] and second.rounds == 3
    equal(second.params, moved(START, 3))


def test_the_arrays_of_a_snapshot_count_once_it_is_whole(join, monkeypatch):
    """A killed member leaves arrays that no snapshot names, and others write it once more."""
    first = join("a", snapshots=1, deadline=0.2)
    room = first._crew.courier.room
    paths, lost = room.bucket.paths, f"snapshots/00000001.{'0' * 32}"
    room.bucket.upload(lost, [b"cut"])
    assert join("b", snapshots=1, every=100).rounds == 0
    for _ in range(3):
        first.step(moved(first.params, 1))
    until(lambda: lost not in paths() and "snapshots/00000003" in paths())
    arrays = [path for path in paths("snapshots") if path.startswith("snapshots/00000003.")]
    monkeypatch.setattr(store.Bucket, "upload", None)  # who comes second sends nothing
    runs.save(room, 3, {}, [])
    assert [path for path in paths("snapshots") if "00000003." in path] == arrays
    assert len(room.bucket.get("snapshots/00000003", range(4096))) < 1024 and len(arrays) == 1


def test_of_two_snapshots_of_one_round_the_first_counts(url, monkeypatch):
    """Both look before either has written."""
    room = envelopes.Room(store.opened(url), b"")
    with monkeypatch.context() as both_look:
        both_look.setattr(store.Bucket, "paths", lambda *of: [])
        for value in 1.0, 2.0:
            runs.save(room, 0, {}, [np.float32(value)])
    assert runs.newest(room, [jax.ShapeDtypeStruct((), "float32")]).arrays == [1.0]


def test_a_snapshot_counts_if_its_store_answers_too_late(url, monkeypatch):
    """The client of the store has asked a second time, and is refused."""
    room, create = envelopes.Room(store.opened(url), b""), store.Bucket.create
    monkeypatch.setattr(store.Bucket, "create", lambda *of: create(*of) and create(*of))
    runs.save(room, 0, {}, [np.float32(1.0)])
    assert runs.newest(room, [jax.ShapeDtypeStruct((), "float32")]).arrays == [1.0]


def test_members_write_snapshots_in_turn(join):
    members, saved = [join(name, quorum=2, snapshots=1) for name in "ab"], []
    for number in range(2):
        together(*(lambda x=x: x.step(x.params) for x in members))
        decided = members[0]._crew.courier.room.read(f"rounds/{number:08d}/members")
        saved.append(decided.header["saves"])
    assert sorted(saved) == ["a", "b"]
