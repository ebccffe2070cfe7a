"""`benchmarks.scale` to the last line, at a toy size: text, tokens, trials, rows, and stops."""

import json
import subprocess

import pytest

from benchmarks import rows as rows_file
from benchmarks import scale, scale_sizes
from benchmarks.scale_sizes import BASELINES, METHODS, baseline_of, by_recipe
from train.models.decoder import DecoderConfig

METHOD, STEPS, CENTRE = "8 bits", 40, 0.02
TOY = scale_sizes.Size(
    DecoderConfig(layers=1, width=8, heads=1, context=8, vocab=300),
    *(STEPS, 4, 2),
    dict.fromkeys(BASELINES, CENTRE),
    scale_sizes.RECIPE,
)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The command's rows, and those of trials, after it ran with some arguments."""
    monkeypatch.setitem(scale_sizes.TEXTS, "text", ("simplejson",))
    monkeypatch.setattr(scale_sizes, "TEXT", tmp_path / "text")
    monkeypatch.setitem(scale_sizes.SIZES, "toy", TOY)

    def run(*arguments):
        argv = ["--size", "toy", "--methods", METHOD, "--json", str(tmp_path / "toy.json")]
        scale.run(scale.parsed([*argv, *arguments]))
        files = (tmp_path / "toy.json", tmp_path / "toy_tuning.json")
        return [json.loads(file.read_text()) if file.exists() else [] for file in files]

    return run


def test_trials_then_rows_and_nothing_twice(command, monkeypatch):
    with pytest.raises(ValueError, match="add --tune first"):
        command()
    rows, trials = command("--tune")
    assert rows == []
    assert {(row["seed"], row["steps"]) for row in trials} == {(0, STEPS // 2)}
    rates = [row["learning_rate"] for row in trials]
    assert rates[:3] == [CENTRE, CENTRE / 2, CENTRE * 2] and len(set(rates)) == len(rates)
    best = min(trials, key=lambda row: row["val_loss"])["learning_rate"]
    assert min(rates) < best < max(rates) or len(rates) == scale.MOST_TRIALS

    rows, _ = command("--seeds", "1", "2")
    assert [(row["seed"], row["learning_rate"]) for row in rows] == [(1, best), (2, best)]
    for row in rows:
        assert row["update"].startswith("chain(compressed_mean(quantize(8), axis_name), chain(clip")
        assert (row["baseline"], row["replicas"], row["local_batch"]) == ("dense Adam", 4, 1)
        assert [step for step, _ in row["curve"]] == [*range(4, STEPS + 1, 4)]
        assert 8 < row["bits_per_parameter"] < 32
    assert rows[0]["val_loss"] != rows[1]["val_loss"] and rows[0]["val_loss"] < 5.7  # log 300
    assert len({row["data_sha256"] for row in (*rows, *trials)}) == 1

    monkeypatch.setattr(scale, "train", lambda *_: pytest.fail("trained again"))
    assert command("--seeds", "1", "2")[0] == rows


def test_fine_tuning_goes_on_from_a_dense_run_that_is_made_once(command, monkeypatch):
    monkeypatch.setitem(scale_sizes.TEXTS, "other", ("fsspec",))
    before = scale_sizes.Before("toy", STEPS, 0.02)
    monkeypatch.setitem(scale_sizes.SIZES, "tuned", TOY._replace(text="other", before=before))
    arguments = ("--size", "tuned", "--rate", "1e-6", "--steps", "10")
    rows, _ = command(*arguments, "--seeds", "1")
    config = scale_sizes.config_of("tuned", METHODS[METHOD], 1, 10)
    random = scale.build.random_params(config)
    loop = scale.simulated(config, scale.examples.read(config))
    untrained = loop.loss(random, loop.start()[1])
    assert rows[0]["curve"][0][1] < untrained - 0.1  # at a rate that moves nothing

    again = scale.train
    monkeypatch.setattr(
        scale,
        "train",
        lambda config, *_: (
            again(config, *_) if config.name == "tuned" else pytest.fail("trained again")
        ),
    )
    assert command(*arguments, "--seeds", "2")[0][1]["seed"] == 2


def test_a_run_cut_short_is_made_again(command):
    rows, _ = command("--rate", "1e-2", "--seeds", "1", "--minutes", "0")
    assert [row["stopped_at"] for row in rows] == [4]
    rows, _ = command("--rate", "1e-2", "--seeds", "1")
    assert len(rows) == 1 and "stopped_at" not in rows[0]


def test_bits_come_where_there_is_a_mesh(command, monkeypatch):
    with monkeypatch.context() as one_gpu:
        one_gpu.setattr(scale.jax, "device_count", lambda: 1)
        rows, _ = command("--rate", "1e-2", "--seeds", "1")
    assert "bits_per_parameter" not in rows[0]
    again, _ = command("--rate", "1e-2", "--seeds", "1")
    assert again[0]["bits_per_parameter"] > 1 and rows[0].items() <= again[0].items()


def test_processes_share_a_device_and_the_runs(monkeypatch):
    started = []

    class Process:
        def __init__(self, command, env):
            started.append((command[3:], env["XLA_PYTHON_CLIENT_MEM_FRACTION"]))

        def wait(self):
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(scale, "data_of", lambda size: started.append(size.model.vocab))
    argv = ["--methods", METHOD, "dense Adam", "--seeds", "1", "--processes", "2"]
    with pytest.raises(SystemExit, match="0"):
        scale.main(argv)
    assert started == [8192, *(([*argv, "--part", part], "0.450") for part in ("0", "1"))]

    made = []
    monkeypatch.setattr(scale, "row_of", lambda *_, name, **__: made.append(name))
    for part in ("0", "1"):
        scale.run(scale.parsed([*argv, "--rate", "1", "--part", part]))
    assert made == [METHOD, "dense Adam"]


@pytest.mark.parametrize(
    ("best", "tried"),
    [(1.0, [1, 0.5, 2]), (4.0, [1, 0.5, 2, 4, 8]), (64.0, [1, 0.5, 2, 4, 8])],
)
def test_trials_go_on_while_the_best_is_at_an_edge(best, tried, monkeypatch):
    monkeypatch.setitem(scale_sizes.SIZES, "toy", TOY._replace(centres={"dense Adam": 1.0}))
    rates = []

    def make(steps, learning_rate):
        rates.append(learning_rate)
        loss = abs(learning_rate - best)
        return {"learning_rate": learning_rate, "val_loss": None if learning_rate == 0.5 else loss}

    scale.tune("toy", METHODS[METHOD], make)
    assert rates == tried


def test_a_method_stands_beside_dense_training_with_its_inner_optimizer():
    of = {name: baseline_of(method) for name, method in METHODS.items()}
    for name, beside in of.items():
        assert of[beside] == beside  # which is a method of the table, and its own baseline
        assert ("Muon" in name or "MuLoCo" in name or name == "Dion") == (beside == "dense Muon")
    assert (of["0/1 Adam"], of["SLAMB"], of["PowerSGD"], of["CocktailSGD, 88x"]) == (
        *("dense Adam", "dense LAMB", "dense SGD", "dense Adam"),
    )


def results(name):
    return rows_file.read(rows_file.RESULTS / f"{name}.json")


TUNED = [size for size, of in scale_sizes.SIZES.items() if of.centres and results(size)]
# The pages say so.
UNTUNED = {("micro_batch_64", "MuLoCo, mean momenta")}


@pytest.mark.parametrize("size", TUNED)
def test_rows_have_the_best_rate_of_as_many_trials(size):
    key = {"task": size, "seed": scale.TRIAL_SEED, "steps": scale.steps_of(size)}
    trials = [row for row in results(f"{size}_tuning") if key.items() <= row.items()]
    for row in results(size):
        name = row["method"]
        losses = {x["learning_rate"]: x["val_loss"] for x in trials if x["method"] == name}
        if (size, name) not in UNTUNED:
            assert row["learning_rate"] == scale.lowest(losses), name
            assert len(losses) == scale.MOST_TRIALS or not scale.beyond(losses), name
            assert row["update"] == by_recipe(METHODS[name], size).update, name
