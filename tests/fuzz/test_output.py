"""Rows of metrics, records of runs in comparisons, and lines of progress."""

import json

import pytest
from hypothesis import strategies as st

from jaxcomp.launch import progress
from tests.helpers.fuzzing import TEXT, fuzz, objects, refused, texts
from train import compare
from train.output import metrics, plots

ROW = {"step": 8, "loss": 0.5, "val_loss": 0.25, "learning_rate": 0.1, "sent_bytes": 10.0}
ROW |= {"step_seconds": 0.1, "rounds": 8, "skipped": 0, "left_out": 0}
LINES = "".join(json.dumps(ROW | {"step": step}) + "\n" for step in (0, 4, 8))
RECORD = {
    "plan": {"sent_bytes_per_step": 4.0, "trained": 100, "replicas": 4},
    "config": {"fast": 1},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RECORD))
    (tmp_path / "metrics.jsonl").write_text(LINES)
    return tmp_path


@fuzz(texts(LINES, st.sampled_from(sorted(ROW))))
def test_metrics(folder, text):
    log = folder / "metrics.jsonl"
    log.write_bytes(text)
    if refused(metrics.keep_until, log, 4) is None and (rows := refused(metrics.read, log)):
        assert all(0 <= row["step"] <= 4 for row in rows)
        refused(plots.curve, "run", rows)


@fuzz(objects(RECORD))
def test_the_record_of_a_run_in_a_comparison(folder, value):
    (folder / "config.json").write_text(json.dumps(value))
    if (facts := refused(compare._facts, folder / "config.json")) is not None:
        compare._line("run", metrics.read(folder / "metrics.jsonl"), *facts)


@fuzz(st.one_of(TEXT, st.just("run: step 1/2, loss 1, 01:00 left")))
def test_lines_of_progress(text):
    progress.read(text)
