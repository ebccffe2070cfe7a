"""Peers: what they are told exists, they begin with our weights and rows, and the table is fair."""

import ast
import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

import benchmarks.peers
from benchmarks import peers_loss, slow_network, worker
from benchmarks.peers import AUTHORS, PEERS
from benchmarks.peers import path_of as path_of_peer
from benchmarks.worker import DENSE, MODELS, UPDATES
from jaxcomp.compressors.policies import path_of
from train import examples
from train.config.optimizer import schedule
from train.placement import build

FOLDER = pathlib.Path(benchmarks.peers.__file__).parent
MODEL = MODELS["0.5M"]


def make_of(peer):
    """The function of a peer, which only a Python with PyTorch can import."""
    file, _, name = peer.partition(".")
    tree = ast.parse((FOLDER / f"{file}.py").read_text())
    [make] = [node for node in tree.body if getattr(node, "name", "") == name]
    return make


@pytest.mark.parametrize("name", list(PEERS))
def test_a_peer_takes_what_its_row_tells_it(name):
    args = make_of(PEERS[name].peer).args
    taken = [arg.arg for arg in args.args]
    assert taken[:2] == ["module", "job"]
    needed = taken[2 : len(taken) - len(args.defaults)]
    assert set(needed) <= set(PEERS[name].options)
    assert args.kwarg or set(PEERS[name].options) <= set(taken[2:])


def test_the_authors_code_is_named_where_it_is_needed():
    for peer in {spec.peer for spec in PEERS.values()}:
        text = ast.unparse(make_of(peer))
        assert (peer in AUTHORS) == ("job.reach(" in text or "job.find(" in text), peer


def test_every_weight_of_the_decoder_has_a_name_in_pytorch():
    config = worker.config_of(UPDATES[DENSE], MODEL, 4, 1)
    leaves = jax.tree_util.tree_leaves_with_path(build.param_shapes(config))
    block = ["norm_attention", "norm_mlp", "qkv", "out", "up", "down"]
    modules = ["norm", *(f"blocks.{i}.{name}" for i in range(MODEL["layers"]) for name in block)]
    torch_names = [f"{module}.{kind}" for module in modules for kind in ("weight", "bias")]
    torch_names += ["embed.weight", "position"]
    assert {path_of_peer(name) for name in torch_names} == {path_of(key) for key, _ in leaves}


def test_the_work_of_peers_is_that_of_a_run(tmp_path):
    config = worker.config_of(UPDATES[DENSE], MODEL, 2, 3)
    config = dataclasses.replace(config, runs_dir=str(tmp_path), eval_batches=2)
    slow_network.write_work(tmp_path / "work.npz", config, 4)
    made, rows = examples.read(config), slice(0, 6)
    with np.load(tmp_path / "work.npz") as arrays:
        assert arrays["train"].shape == (4, 6, MODEL["context"] + 1)
        np.testing.assert_array_equal(arrays["train"][3], made.train(3, rows))
        np.testing.assert_array_equal(arrays["validation"][1], made.validation(1, rows))
        params = build.random_params(config)
        np.testing.assert_array_equal(
            arrays["block_1/qkv/kernel"], params["block_1"]["qkv"]["kernel"]
        )
        assert len(arrays) == len(jax.tree.leaves(params)) + 2


@pytest.mark.parametrize("name", list(peers_loss.OURS))
def test_our_rows_are_runs_of_the_training_program(name):
    config = peers_loss.run_of(name, 3e-3, 50)
    at = schedule(config.optimizer, config.steps)
    assert config.optimizer.update == peers_loss.OURS[name].update
    assert float(at(5)) == pytest.approx(3e-3) and float(at(50)) == pytest.approx(3e-4)
    assert config.data.batch == peers_loss.HOSTS * peers_loss.SEQUENCES


STUB = """
import sys
from benchmarks import commands

build = lambda **asked: {}
train = lambda rates: {"first_loss": float(sys.argv[1]), "val_loss": sum(rates)}
commands.serve(build=build, train=train)
"""


def first_loss(config):
    rows = examples.read(config).train(0, slice(0, config.data.batch))
    return float(build.loss_of(config)(build.random_params(config), rows))


def test_a_peer_that_does_other_work_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parents[2]))
    config = peers_loss.run_of(DENSE, 3e-3, 10)
    config = dataclasses.replace(config, runs_dir=str(tmp_path))
    first = first_loss(config)
    for begins, same in ((first, True), (1.001 * first, False)):
        host = [sys.executable, "-c", STUB, str(begins)]
        monkeypatch.setattr(peers_loss, "_hosts", lambda python, host=host: [host, host])
        run = lambda: peers_loss.peer_losses("PyTorch DDP float32", config, "python", None)
        if same:
            at = schedule(config.optimizer, 10)
            assert run()["val_loss"] == pytest.approx(sum(float(at(i)) for i in range(10)))
        else:
            with pytest.raises(RuntimeError, match="the work differs"):
                run()


def row(method, sent, milliseconds, rate):
    times = {"median": milliseconds / 1e3, "mean": 9.0}
    return {
        "method": method,
        "rate": rate,
        "nic_bytes": {"sent": sent},
        "step_seconds": times,
        "skips_rounds": False,
    }


def test_the_table_says_in_what_ours_is_worse():
    theirs, ours = peers_loss.PAIRS[0]
    rates = list(peers_loss.TIMED_AT)
    times = [row(theirs, 9000, 100, rates[0]), row(theirs, 2000, 200, rates[1])]
    times += [row(ours, 2099, ms, rate) for ms, rate in zip((104, 211), rates, strict=False)]
    losses = [
        {"method": theirs, "val_loss": 2.0},
        {"method": ours, "val_loss": 3.0},
        {"method": ours, "val_loss": 2.01},
        {"method": ours, "val_loss": float("nan")},
    ]
    _, _, first, second = peers_loss.table(times, losses).splitlines()
    assert first == f"| {theirs} | 2 | 100 | 200 |  |  | 2.000 |  |"
    assert second == f"| ours: {ours} | 2 | 104 | 211 |  |  | 2.010 | time: 1 Gbit/s |"
    at = dict.fromkeys(rates, 1.0)
    slow = peers_loss.Found(2200, dict.fromkeys(rates, 1.06), 2.03)
    assert peers_loss.worse(slow, peers_loss.Found(2000, at, 2.0)) == [
        "bytes",
        "time: every rate",
        "loss",
    ]
    assert peers_loss.worse(slow, slow) == []
