"""A run goes on from what its processes keep for each other, and from nothing that is not whole."""

import contextlib
import os
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxcomp.launch import claims, parts
from jaxcomp.launch import copies as module
from tests.helpers.faults import (
    ended,
    last_step,
    metrics_of,
    said,
    started,
    until_checkpoint,
    until_row,
    write_config,
)
from tests.helpers.replicas import everywhere, mesh_of, rows
from tests.helpers.restoring import require_equal_bits, restore
from train import task as tasks
from train.checkpoints import emergency
from train.checkpoints.trees import described
from train.config import run as configs

STEPS = 60


def places_of(local):
    """The folders of the processes' copies, by their number."""
    return {int(path.name): path for path in local.glob(f"jaxcomp-{os.getuid()}/*/*")}


class Lost(Exception):
    """What ends a start of a run in these tests."""


@pytest.fixture
def start(tmp_path):
    """Opens the copies of a run of one process, as one start of it; they stay after `Lost`.

    With steps it begins the run, and keeps copies of these.
    """

    @contextlib.contextmanager
    def once(*kept, every=2):
        local = str(tmp_path / "local") if every else None
        with contextlib.suppress(Lost), claims.claimed(tmp_path / "run") as claim:
            with emergency.opened(tmp_path / "run", claim, local, 10, 10) as copies:
                if kept:
                    copies.begin(0, None)
                    keep(copies, *kept)
                yield copies
                raise Lost

    return once


def tree_of(step):
    return {"params": everywhere(mesh_of(2), {"w": np.full(5, step, np.float32)})}


def keep(copies, *steps):
    for step in steps:
        copies.keep(step, tree_of(step), emergency.record(tree_of(step), {"step": step}))
    copies.wait()


def steps_of(copies):
    return sorted({int(path.name.partition("-")[0]) for path in copies.folders[0].iterdir()})


def test_the_last_two_copies_stay_and_the_next_start_takes_the_newest(start):
    with start(2, 4, 6) as copies:
        assert steps_of(copies) == [4, 6]
    with start() as copies:
        found = copies.newest(5)
        held = copies.fetch(found)
        assert found.step == 6 and emergency.record_of(held) == {"step": 6}
        like = jax.tree.map(lambda x: x, tree_of(0))
        np.testing.assert_array_equal(emergency.load(held, like, "")["params"]["w"], [6.0] * 5)
        with pytest.raises(ValueError, match="other is of another model"):
            emergency.load(held, {"params": {"v": like["params"]["w"]}}, "other")
        assert copies.newest(7) == ""


@pytest.mark.parametrize("part", ["all", "0"])
def test_a_copy_that_is_damaged_is_not_taken(start, part):
    with start(2, 4) as copies:
        (path,) = copies.folders[0].glob(f"4-{part}-of-1.*")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with start() as copies:
        assert copies.newest(0).step == 2
        assert copies.newest(3) == f"nobody has these parts of step 4: {part}"


def test_copies_of_a_way_that_the_run_did_not_go_are_not_taken(start):
    with start(4, 6) as copies:
        later = [(path.name, path.read_bytes()) for path in copies.folders[0].glob("6-*")]
    with start() as copies:
        (found,) = [copies.newest(0)]
        copies.begin(4, found._replace(step=4, holders={}))  # the one of 6 was on a lost host
        assert steps_of(copies) == []
        keep(copies, 5)
        for name, data in later:  # which comes back
            (copies.folders[0] / name).write_bytes(data)
    with start() as copies:
        assert copies.newest(0).step == 5
    with start(every=0) as copies:  # who copies nothing goes on alone
        assert copies is None
    with start() as copies:
        assert copies.newest(0) == ""


def test_copies_of_another_run_in_the_same_folder_are_not_taken(start, tmp_path):
    with start(2):
        pass
    shutil.rmtree(tmp_path / "run")
    with start() as copies:
        assert copies.newest(0) == ""
        copies.begin(0, None)
        assert steps_of(copies) == []


def test_a_run_that_ends_leaves_no_folder_of_copies(start, tmp_path):
    with start(2) as copies:
        others = copies.folders[0].with_name("1")  # another process of the run on this host
        others.mkdir()
        copies.close()
        assert list(places_of(tmp_path / "local")) == [1]
        others.rmdir()
        copies.close()
        assert list((tmp_path / "local").glob("*/*")) == []


def test_a_start_that_copies_nothing_leaves_what_it_went_on_from(start):
    with start(2):
        pass
    for _ in range(2):
        with start() as copies:
            found = copies.newest(0)
            copies.begin(2, found)
            assert found.step == 2


def test_one_process_goes_on_from_the_copies_of_three(start):
    tree = tree_of(4) | {"state": rows(mesh_of(3), np.arange(12.0).reshape(3, 4))}
    record = {"leaves": described(tree), "run": {}}
    with start() as copies:
        copies.begin(0, None)
        of = {"all": []}  # one process holds everything
        for entry, array in parts.cut(tree, 0)["all"]:
            part = str(entry.spans[0][0]) if entry.path == "state" else "all"
            of.setdefault(part, []).append((entry, array))
        for part, pairs in of.items():
            parts.write(copies.folders[0], copies.claim.token, 4, part, 3, pairs, record)
    with start() as copies:
        files = copies.fetch(copies.newest(0))
        assert len(files) == 4
        like = jax.tree.map(np.zeros_like, tree)
        found = emergency.load(files, everywhere(mesh_of(2), like), "")
        jax.tree.map(np.testing.assert_array_equal, found, tree)


def test_the_newest_copy_that_all_have_stays_however_long_one_fails(start, monkeypatch):
    with start(2) as copies:
        monkeypatch.setattr(module.jax, "process_count", lambda: 3)
        all_have = lambda last: np.array([last, 2, last])
        monkeypatch.setattr(module.multihost_utils, "process_allgather", all_have)
        keep(copies, 4, 6, 8)
        assert steps_of(copies) == [2, 6, 8]


def test_a_full_disk_ends_no_run_and_is_told_once(start, monkeypatch, capsys):
    with start(2) as copies:
        with monkeypatch.context() as patch:
            patch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=3))
            keep(copies, 4, 6)
        said = capsys.readouterr().err
        assert said.count("no emergency copy of step 4: ") == said.count("\n") == 1
        keep(copies, 8)
        assert steps_of(copies) == [2, 8]
        keep(copies, 10)
        assert steps_of(copies) == [8, 10]


def test_only_a_ward_brings_copies_and_no_older_ones(start):
    with start() as copies:
        copies.begin(0, None)
        copies.peers, copies.kept_for, copies.last = ["", "", ""], [1], 4
        name = lambda step, part, count=3: f"{step}-{part}-of-{count}.{'a' * 64}"
        assert copies.wanted(name(4, 1), 10) == copies.folders[0]
        for other in (name(2, 1), name(6, 2), name(6, "all"), name(6, 1, 2), "x", "../6"):
            assert copies.wanted(other, 10) is None
        assert copies.wanted(name(6, 1), 1 << 60) is None


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A run of three processes that loses one, and then two that keep each other's copies."""
    folder = tmp_path_factory.mktemp("run")
    local, words = folder / "local", []
    config = write_config(
        folder, steps=STEPS, replicas=3, step_seconds=0.1, checkpoint_every=20, batch=9
    )
    copied = ("--emergency-every", 2, "--emergency-dir", local)
    seen = {}
    for row, lost in ((30, [1]), (46, [1, 2])):
        with started(config, 3, *copied, heartbeat=10) as run:
            until_row(run, row)
            until_checkpoint(run, row // 20 * 20)
            run.processes[1].kill()
            seen[row] = last_step(run)
            ended(run)
            words.append(said(run))
        for number in lost:
            shutil.rmtree(places_of(local)[number])
    with started(config, 3, *copied) as run:
        assert ended(run) == [0, 0, 0], said(run)
        words.append(said(run))
    return config, words, seen, places_of(local)


def test_a_lost_process_and_its_disk_cost_the_steps_since_the_last_copy(chain):
    _, words, seen, _ = chain
    line = r"run: from step (\d+) on with emergency copies; the last checkpoint is step 20\n"
    found = re.search(line, words[1][0])
    assert found, words[1][0]
    assert seen[30] - 4 <= int(found[1]) <= seen[30] + 2
    assert not any(re.search(line, text) for text in words[0] + words[1][1:])


def test_two_lost_neighbours_leave_the_checkpoint(chain):
    _, words, _, _ = chain
    # The newest copies may lack more parts, if the kill came before all were written.
    line = r"run: from step 40 on without emergency copies: nobody has these parts of step \d+: "
    found = re.search(line + r"(.+)\n", words[2][0])
    assert found and "1" in found[1].split(", "), words[2][0]


def test_a_run_that_went_on_from_copies_equals_one_that_was_left_alone(chain, tmp_path):
    config = chain[0]
    whole = write_config(tmp_path, steps=STEPS, replicas=3, checkpoint_every=20, batch=9)
    # Sums of three numbers go another way in one process.
    with started(whole, 3) as run:
        assert ended(run) == [0, 0, 0], said(run)
    own, expected = metrics_of(config.parent / "run"), metrics_of(whole.parent / "run")
    assert own == expected and own[-1]["step"] == STEPS
    like = tasks.make_task(configs.load(str(whole))).like
    trees = [restore(each.parent / "run" / "checkpoints", like)[0] for each in (config, whole)]
    require_equal_bits(*trees)


def test_a_run_that_has_ended_leaves_no_copies(chain):
    assert chain[3] == {}
