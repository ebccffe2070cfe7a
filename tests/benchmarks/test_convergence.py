"""Which runs the convergence benchmark makes, and which of them its table shows."""

import dataclasses

import pytest
from matplotlib.figure import Figure

from benchmarks import convergence, figures
from train.placement import sharded


def row(rate, seed, loss, method="a", task="nano", steps=10):
    return {
        "task": task,
        "method": method,
        "seed": seed,
        "steps": steps,
        "learning_rate": rate,
        "val_loss": loss,
        "curve": [[0, 5.0], [steps, loss]],
        "bits_per_parameter": 4.0,
        "sent_bytes_per_step": 7e6,
    }


@pytest.mark.parametrize("task", convergence.TASKS)
def test_rows_are_runs_of_their_own_that_differ_in_the_method_alone(task):
    dense, *others = (
        convergence.config_of(task, method, 3e-3, 1, 50) for method in convergence.METHODS
    )
    assert dense.optimizer.learning_rate == 3e-3 and dense.optimizer.warmup_steps == 5
    assert (dense.seed, dense.steps) == (1, 50)
    for config in others:
        fields = "optimizer", "qsdp", "replicas", "fast"
        method = {field: getattr(dense, field) for field in fields}
        assert dataclasses.replace(config, name=dense.name, **method) == dense
        assert config.optimizer != dense.optimizer
        if config.qsdp and task == "nano":
            assert sharded.qsdp_of(config).axis_name == "replica"
    names = {config.name.removeprefix(f"convergence/{task}/") for config in (dense, *others)}
    assert len(names) == len(convergence.METHODS) and not any("/" in name for name in names)


def test_the_rate_is_the_tuning_seeds_choice_and_nan_is_the_worst():
    rows = [row(0.1, 0, 1.0), row(0.3, 0, 2.0), row(0.1, 1, 9.0), row(0.5, 0, None)]
    assert convergence.best_rate(rows, [0]) == 0.1
    assert convergence.best_rate(rows, [0, 1]) == 0.3


def test_the_table_shows_the_rate_with_most_seeds_and_of_these_the_best():
    rows = [
        *(row(0.1, seed, 2.0 + seed) for seed in range(3)),
        *(row(0.2, seed, 1.0 + seed) for seed in range(3)),
        *(row(0.3, 0, 0.5), row(0.4, 0, None), row(0.2, 3, 0.1, steps=20)),
        row(0.1, 0, 3.0, "b"),
        row(0.1, 0, 0.2, "b", task="nano_bert"),
    ]
    a, b = figures.summarize(rows, "nano", 10)
    assert (a.method, a.learning_rate, a.losses) == ("a", 0.2, [1.0, 2.0, 3.0])
    assert (b.method, b.losses) == ("b", [3.0])
    lines = figures.table([a, b]).splitlines()
    assert lines[2] == "| a | 0.2 | 4 | 7 | 2.000 (1.000 to 3.000) | 3 |"
    assert lines[3] == "| b | 0.1 | 4 | 7 | 3.000 | 1 |"


def test_the_trade_off_is_drawn_up_to_the_loss_that_is_asked_for(tmp_path):
    summaries = figures.summarize([row(0.1, 0, 1.0), row(0.1, 0, 3.0, "b")], "nano", 10)
    for most in (2.0, 4.0):
        figures.draw_tradeoff(summaries, most, tmp_path / f"{most}.png")
    few, all_ = ((tmp_path / f"{most}.png").stat().st_size for most in (2.0, 4.0))
    assert 0 < few < all_


def test_the_front_has_no_method_that_another_beats_with_as_few_bits():
    rows = [
        row(0.1, 0, 1.0) | {"bits_per_parameter": 32.0},
        row(0.1, 0, 1.2, "beaten") | {"bits_per_parameter": 8.0},
        row(0.1, 0, 1.1, "b"),
        row(0.1, 0, 1.4, "c") | {"bits_per_parameter": 0.5},
    ]
    summaries = figures.summarize(rows, "nano", 10)
    assert [s.method for s in figures.front(summaries)] == ["c", "b", "a"]
    assert figures.finding(summaries) == "c: 64 times fewer bits, loss 1.40, a 1.00"
    rows += [row(0.1, 0, 0.9, "few, Muon") | {"bits_per_parameter": 0.5}]
    rows += [row(0.1, 0, 0.5, "dense Muon") | {"bits_per_parameter": 32.0}]
    with_muon = figures.finding(figures.summarize(rows, "nano", 10))
    assert with_muon == "few, Muon: 64 times fewer bits, loss 0.90, dense Muon 0.50"
    axes = Figure().subplots()
    figures.points(axes, summaries, ["a", "b"])
    names = [line.get_label() for line in axes.get_lines()]
    assert [name for name in names if name[0] != "_"] == ["a", "b"]


@pytest.mark.parametrize("ablated", figures.ABLATIONS.values(), ids=figures.ABLATIONS)
def test_the_panels_of_an_ablation_are_methods_of_a_task(ablated):
    assert ablated.task in convergence.TASKS and ablated.dense in convergence.METHODS
    for methods in ablated.panels.values():
        assert len(methods) > 2 and set(methods.values()) <= set(convergence.METHODS)


def test_an_ablation_draws_the_rows_that_there_are(tmp_path):
    rows = [row(0.1, seed, 1.0 + seed, "SLAMB") for seed in range(2)]
    few = figures.summarize(rows, "nano", 10)
    more = figures.summarize([*rows, row(0.1, 0, 3.0, "SLAMB, every 5")], "nano", 10)
    sizes = []
    for number, summaries in enumerate((few, more)):
        figures.draw_ablation(summaries, figures.ABLATIONS["slamb"], tmp_path / f"{number}.png")
        sizes.append((tmp_path / f"{number}.png").stat().st_size)
    assert 0 < sizes[0] < sizes[1]
