"""The table and the figure of `benchmarks.scale` compare a method with its own baseline."""

import matplotlib.image
import pytest

from benchmarks import scale_figure


def row(method, baseline, seed, loss, bits=32.0, **more):
    return {
        "task": "toy",
        "method": method,
        "baseline": baseline,
        "seed": seed,
        "steps": 100,
        "learning_rate": 2e-3,
        "replicas": 4,
        "parameters": 1000,
        "bits_per_parameter": bits,
        "val_loss": loss,
        "curve": [[50, loss + 1], [100, loss]] if loss else [],
        **more,
    }


ROWS = [
    *(row("dense Adam", "dense Adam", seed, 3.0 + seed) for seed in (1, 2, 3)),
    *(row("4 bits", "dense Adam", seed, 3.1 + seed, bits=4.0) for seed in (1, 2)),
    row("MuLoCo", "dense Muon", 1, 2.0, bits=0.125),
    row("0/1 Adam", "dense Adam", 1, 4.5, bits=1.0, stopped_at=50),
    row("1 bit", "dense Adam", 1, None, bits=1.0),
    row("4 bits", "dense Adam", 1, 9.0) | {"task": "another"},
]


def test_a_line_for_each_method_beside_its_own_baseline():
    lines = scale_figure.table(ROWS, "toy", 100).splitlines()[2:]
    assert lines == [
        "| dense Adam | 0.002 | 1 | 5.00 (4.00 to 6.00) |  | 3 |",
        "| 4 bits | 0.002 | 8 | 4.60 (4.10 to 5.10) | dense Adam: 4.50 (4.00 to 5.00) | 2 |",
        "| MuLoCo | 0.002 | 256 | 2.00 | dense Muon: not measured | 1 |",
        "| 0/1 Adam | 0.002 | 32 | 4.50 at step 50 | dense Adam: 5.00 | 1 |",
        "| 1 bit | 0.002 | 32 | diverges | dense Adam: 4.00 | 1 |",
    ]
    assert scale_figure.table(ROWS, "toy", 200) == ""


def test_a_baseline_has_the_rate_of_its_method_if_it_was_trained_at_it():
    rates = {"learning_rate": 1e-3}
    rows = [*ROWS[:3], row("dense Adam", "dense Adam", 1, 3.5, **rates)]
    rows += [row("4 bits", "dense Adam", 1, 3.6, bits=4.0, **rates)]
    lines = scale_figure.table(rows, "toy", 100).splitlines()[2:]
    assert lines[1:] == [
        "| dense Adam | 0.001 | 1 | 3.50 |  | 1 |",
        "| 4 bits | 0.001 | 8 | 3.60 | dense Adam: 3.50 | 1 |",
    ]


def test_the_figure_has_the_difference_on_the_same_seeds(tmp_path):
    costs = scale_figure.costs(ROWS, "toy", 100)
    wanted = {"4 bits": 0.1, "0/1 Adam": -0.5, "1 bit": float("inf")}
    assert costs == {name: (1000, pytest.approx(above)) for name, above in wanted.items()}
    old = {"replicas": 4, "sent_bytes_per_step": 6000.0, "bits_per_parameter": 32.0}
    assert scale_figure.parameters(old) == 1000
    scale_figure.draw([costs], tmp_path / "scale.png")
    assert matplotlib.image.imread(tmp_path / "scale.png").std() > 0.05
