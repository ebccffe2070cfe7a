"""What the program says at the end of a run."""

import pytest

from train import outputs
from train.config import Config, Optimizer

ROWS = [
    {"step": 0, "examples": 0, "loss": None, "val_loss": 5.0},
    {"step": 10, "examples": 80, "loss": 4.0, "step_seconds": 0.5},
    {"step": 20, "examples": 160, "loss": 3.0, "val_loss": 3.5, "step_seconds": 0.25}
    | {"sent_bytes": 2e6, "dense_bytes": 2e7, "skipped": 0, "left_out": 0},
]


def rows_of(**last):
    """Rows of which the last one says something else."""
    return [*ROWS[:2], ROWS[2] | last]


@pytest.fixture
def said(tmp_path):
    """Sums up a run of 20 steps."""

    def make(rows=ROWS, **changes):
        config = Config(
            name="run",
            steps=20,
            optimizer=Optimizer("adam(learning_rate)", 0.1),
            runs_dir=str(tmp_path),
            **changes,
        )
        folder = tmp_path / "run"
        (folder / "checkpoints" / "20").mkdir(parents=True, exist_ok=True)
        return outputs.summary(config, rows).replace(str(tmp_path), "runs").splitlines()

    return make


def test_time_bytes_losses_and_places_are_told(said):
    assert said(link_rate=8e6) == [
        "runs/run: step 20, validation loss 3.5000 nats per byte",
        "  time        7.5 s in 20 steps of 0.375 s, 21.3 examples/s",
        "  sent        2 MB by each replica, 10x fewer than dense float32, 20 MB",
        "  saved       18 s at 8 Mbit/s: sending takes 2 s instead of 20 s, if nothing hides it",
        "  losses      training 3.0000, validation 3.5000",
        "  checkpoint  runs/run/checkpoints/20",
        "runs/run/loss.png",
    ]


def test_what_is_not_known_is_left_out(said):
    assert [line.split()[0] for line in said()[1:-1]] == ["time", "sent", "losses", "checkpoint"]
    lines = said(rows_of(sent_bytes=0, dense_bytes=0), link_rate=1e6)
    assert [line.split()[0] for line in lines[1:-1]] == ["time", "losses", "checkpoint"]


def test_the_time_of_a_step_is_that_of_the_rows_that_are_left(said):
    assert said(ROWS[1:])[1] == "  time        2.5 s in 10 steps of 0.25 s, 32 examples/s"


def test_steps_without_a_time_do_not_count_in_that_of_a_step(said):
    """Those of a row that a start owed to the next one."""
    owed = {name: ROWS[1][name] for name in ("step", "examples", "loss")}
    line = "  time        2.5 s in 10 steps of 0.25 s, 32 examples/s"
    assert said([ROWS[0], owed, ROWS[2]])[1] == line


def test_the_rate_counts_examples_of_batches_of_other_sizes(said):
    assert said(rows_of(examples=100))[1].endswith("13.3 examples/s")


def test_a_dense_run_sends_what_a_dense_one_does(said):
    for dense, text in ((2e6, "100% of dense float32, 2 MB"), (1e6, "200% of dense float32, 1 MB")):
        line = f"  sent        2 MB by each replica, {text}"
        assert said(rows_of(dense_bytes=dense))[2] == line


def test_steps_that_were_skipped_are_told(said):
    why = "their updates were not finite"
    assert f"  skipped     20 of 20 steps: {why}" in said(rows_of(skipped=20))
    both = f"  skipped     1 of 20 steps and 3 steps of single replicas: {why}"
    assert both in said(rows_of(skipped=1, left_out=3))
    assert not any("skipped" in line for line in said())


def test_losses_that_are_not_finite_and_accuracies_are_told(said):
    first, *rest = said(rows_of(loss=None, val_loss=None, val_accuracy=0.25))
    assert first == "runs/run: step 20, validation loss not finite, accuracy 0.2500"
    assert "  losses      training not finite, validation not finite" in rest
