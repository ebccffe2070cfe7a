"""Runs of the program that are islands: they meet in a store, and end at one consensus."""

import contextlib
import dataclasses
import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxcomp.islands import store
from jaxcomp.launch import exits, watchdog
from tests.helpers.launching import environment, run, write_config
from tests.helpers.tiny_runs import tiny_config
from train import island, loop
from train.checkpoints.files import latest
from train.checkpoints.store import choose
from train.config import Optimizer

numbers = itertools.count()


@pytest.fixture
def config(tmp_path, undrawn):
    run = f"memory://train-{next(numbers)}"
    join = {"island": run, "join": "join(every=2, poll=0.02, outer=sgd(1.0))"}
    return tiny_config(tmp_path, batch=2, name="garage", replicas=1, log_every=1, **join)


SHARDS = {
    "qsdp": "qsdp(axis_name, identity(), identity())",
    "optimizer": Optimizer("sgd(learning_rate)", 1e-2),
    "replicas": 2,
}


@pytest.mark.parametrize(
    "change", [{}, SHARDS, {"replicas": 4, "fast": 2, "in_shards": True}], ids=str
)
def test_an_island_that_comes_later_begins_at_the_consensus_of_the_others(config, change):
    config = dataclasses.replace(config, **change, data=dataclasses.replace(config.data, batch=4))
    rows = loop.run(config)
    assert [row["outer_steps"] for row in rows] == [0, 0, 1, 1, 2]
    assert rows[-1]["members"] == 1 and rows[-1]["island_bytes"] > 0
    later = loop.run(dataclasses.replace(config, name="attic", seed=7))
    assert later[0]["val_loss"] == rows[-1]["val_loss"] != rows[0]["val_loss"]


def test_an_island_draws_data_of_its_own(config):
    seeds = [island.with_own_order(dataclasses.replace(config, name=name)).seed for name in "ab"]
    assert seeds[0] != seeds[1]
    alone = dataclasses.replace(config, island=None)
    assert island.with_own_order(alone) is alone


def test_a_run_that_goes_on_takes_the_consensus_of_now(config):
    loop.run(config)
    rows = loop.run(dataclasses.replace(config, name="attic"))
    again = loop.run(dataclasses.replace(config, steps=6))
    assert [row["step"] for row in again] == [0, 1, 2, 3, 4, 5, 6]
    assert again[-1]["outer_steps"] == rows[-1]["outer_steps"] + 1
    claims = store.opened(config.island).paths("claims")
    assert loop.run(dataclasses.replace(config, steps=6)) == again
    assert store.opened(config.island).paths("claims") == claims  # it is done, and joins nobody


def test_who_waits_for_others_in_vain_saves_and_is_not_taken_for_hung(config, monkeypatch):
    waits = []

    @contextlib.contextmanager
    def watch(*args):
        yield watchdog.Watch(lambda *where: waits.append(where), lambda step, wish: wish)

    monkeypatch.setattr(watchdog, "watch", watch)
    join = "join(every=2, poll=0.02, quorum=2, deadline=0.1, patience=0.3)"
    with pytest.raises(TimeoutError, match="needs quorum=2, and waited patience=0.3"):
        loop.run(dataclasses.replace(config, join=join))
    assert waits[-2] == (2, "a round of islands", 300 + 2 * 0.3)
    saved = choose(Path(config.runs_dir, "garage", "checkpoints"), item="metadata")
    done = saved.metadata["progress"]
    assert (done["step"], done["examples"]) == (2, 2 * config.data.batch)


def test_a_run_whose_name_is_taken_saves_and_is_not_started_again(config, monkeypatch):
    """A machine that did so would take the name back."""
    join, others = island.member_of, []

    def taken(*arguments):
        mine = join(*arguments)
        others.append(join(*arguments))
        return mine

    monkeypatch.setattr(island, "member_of", taken)
    with pytest.raises(ValueError, match="another process has joined as 'garage'") as error:
        loop.run(config)
    assert exits.status(error.value) == exits.Exit.MISTAKE
    assert latest(Path(config.runs_dir, "garage", "checkpoints")) in (1, 2)  # when it hears of it
    others[0].leave()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"join": "join(every=0)"}, "islands.join got every=0"),
        ({"join": "join(evry=1)"}, "unexpected keyword"),
    ],
)
def test_mistakes_are_told(config, change, text):
    params = jax.tree.map(np.float32, {"w": [1.0]})
    with pytest.raises(ValueError, match=text):
        island.member_of(dataclasses.replace(config, **change), params)


def test_islands_with_other_shards_do_not_meet(config):
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch=4), **SHARDS)
    loop.run(config)
    with pytest.raises(ValueError, match="its leaf .*or write another prefix"):
        loop.run(dataclasses.replace(config, name="attic", replicas=4))


def test_an_island_of_two_processes_has_shards_on_both(tmp_path, config):
    """Two replicas of two devices each, whose parameters lie in shards."""
    path = write_config(tmp_path)
    command = [sys.executable, "-m", "train.launch", "--local", "2", "--", str(path)]
    command += "--steps 4 --replicas 4 --fast 2 --in-shards --name garage".split()
    command += ["--join", "join(every=2, poll=0.02, snapshots=1)", "--island"]
    done = run([*command, f"file://{tmp_path}/run"], env=environment(JAX_NUM_CPU_DEVICES="2"))
    assert done.returncode == 0, done.stdout
    rows = (tmp_path / "runs" / "garage" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["outer_steps"] for row in rows] == [0, 0, 1, 1, 2]
    assert (tmp_path / "run" / "snapshots" / "00000002").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [({"join": "leave()"}, "join: .*is not"), ({"name": "gärage 1"}, "needs 1 to 64 letters")],
)
def test_what_no_island_can_be_is_told_before_data_is_read(config, change, text):
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(config, **change)
