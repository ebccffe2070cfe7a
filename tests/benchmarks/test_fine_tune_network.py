"""Fine-tuning over slow networks: what a run returns, and what is read from it."""

import argparse
import gzip
import json

import pytest

from benchmarks import scale_sizes
from benchmarks.studies import fine_tune, fine_tune_network
from benchmarks.studies.fine_tune_network import METHODS
from tests.helpers.launching import words
from tests.helpers.snippets import ROOT

DILOCO = "DiLoCo, 4 bits, every 10th"


def row(method, losses, rate="100mbit", **changes):
    curve = [[10 * n, 2.0 * n, 100.0 * n, loss] for n, loss in enumerate(losses)]
    made = {"method": method, "rate": rate, "seed": 0, "learning_rate": 0.1}
    return made | {"curve": curve, "val_loss": losses[-1], "trained": 5} | changes


def test_a_run_counts_usual_seconds_and_no_evaluation(monkeypatch):
    monkeypatch.setattr(fine_tune_network, "EVALUATIONS", 2)
    answers = iter([[0.1, 0.9], [9.0, 1.1]])

    def call(name, **arguments):
        if name == "train":
            assert arguments == {"steps": 2}
            seconds = next(answers)
            return [{"seconds": seconds, "sent_bytes": [10.0, 30.0]}] * 2
        return [7.0] * 2

    made = fine_tune_network.fine_tuned(call, 4)
    assert [point[0] for point in made["curve"]] == [0, 2, 4]
    assert made["curve"][1][1:] == pytest.approx([(0.1 + 9.0) / 2 + 1.0, 40.0, 7.0])
    assert made["step_seconds"] == pytest.approx([0.1, 0.9, 9.0, 1.1])


def test_the_rate_of_the_lowest_loss_on_the_other_seed_is_taken():
    tried = fine_tune_network.TRIED
    rates = {0.1: 3.0, 0.2: 2.0, 0.4: float("nan")}
    rows = [row("a", [x], seed=tried, learning_rate=rate) for rate, x in rates.items()]
    rows.append(row("a", [1.0], learning_rate=0.8))
    assert fine_tune_network.best(rows, "a") == 0.2
    with pytest.raises(ValueError, match="no rate of 'b' was tried; run with --trial first"):
        fine_tune_network.best(rows, "b")


def test_the_picture_says_who_is_sooner_at_the_loss_of_dense_adam(tmp_path):
    rows = [row("dense Adam", [5.0, 4.0, 3.0]), row("4-bit mean", [5.0, 2.5, 2.4])]
    rows += [row(DILOCO, [5.0, 4.5, 4.0]), row("LoRA, dense", [5.0, 3.0], rate="none")]
    assert fine_tune_network.seconds_to(rows[1], 3.0) == pytest.approx(1.6)
    assert fine_tune_network.seconds_to(rows[2], 3.0) is None
    said = "At 100 Mbit/s 4-bit mean comes within 0.01 of dense Adam's loss 2.5 times sooner"
    assert fine_tune_network.finding(rows) == said
    lines = fine_tune_network.table(rows).splitlines()
    assert lines[3] == "| 4-bit mean | 0.1 | 10 | 2.400 | 0.20 s | 2 s |"
    assert lines[4].endswith("| never |")
    assert "| LoRA, dense | 5 | 10 | 0.1 | 3.000 |" in fine_tune_network.table_of_lora(rows)
    fine_tune_network.draw(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_devices_of_one_process_are_fine_tuned(tmp_path):
    worker = fine_tune_network.functions(2)
    paths = {"model": ROOT / "tests" / "golden" / "huggingface" / "gpt2"}
    paths |= {"text": words(tmp_path / "text"), "cache": tmp_path / "cache"}
    options = argparse.Namespace(steps=2, **paths)
    spec = fine_tune_network.spec_of(METHODS[DILOCO], 1e-3, 0, options)
    facts = worker["build"](**spec | {"context": 8, "sequences": 1})
    worker["begin"]()
    before = worker["evaluate"]()
    made = worker["train"](2)
    assert len(made["seconds"]) == 2 and made["sent_bytes"] == [0.0, 0.0]  # the tenth is not there
    # After the last step all have met.
    assert worker["evaluate"]() != before and facts["trained"] > 1000


def test_texts_are_a_tokenizer_and_manual_pages(tmp_path):
    scale_sizes.write_tokenizer(
        tmp_path / "tokenizer", iter(["def f(self):\n" * 50]), fine_tune.VOCAB
    )
    made = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    assert 257 <= len(made["model"]["vocab"]) <= fine_tune.VOCAB
    (tmp_path / "man" / "man7").mkdir(parents=True)
    pages = {"a.7.gz": gzip.compress(b"page"), "b.7": b"other", "c.7": b".so man7/a.7"}
    for name, content in pages.items():
        (tmp_path / "man" / "man7" / name).write_bytes(content)
    assert fine_tune.write_manuals(tmp_path / "to", tmp_path / "man") == 9
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["a.7.txt", "b.7.txt"]
