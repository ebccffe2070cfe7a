"""Runs side by side: the table, the picture and the demo."""

import dataclasses
import json
import pathlib
import subprocess

import pytest

from configs import nano_dense
from train import compare, demo
from train.config import Data
from train.models.decoder import DecoderConfig
from train.output import metrics
from train.placement import devices

ROOT = pathlib.Path(__file__).parents[2]


def make_run(folder, losses, sent_bytes, replicas=4, seconds=(0.1, 0.5, 0.2), fast=1):
    """A finished run of 1,000 parameters."""
    folder.mkdir(parents=True)
    plan = {"parameters": 1000, "replicas": replicas, "sent_bytes_per_step": sent_bytes}
    (folder / "config.json").write_text(json.dumps({"plan": plan, "config": {"fast": fast}}))
    for step, loss in enumerate(losses):
        row = {"step": step, "val_loss": loss, "sent_bytes": step * sent_bytes}
        metrics.append(folder / "metrics.jsonl", row)
    for second in seconds:
        row = {"step": len(losses), "step_seconds": second, "sent_bytes": 0}
        metrics.append(folder / "metrics.jsonl", row)
    return folder


def test_table_has_last_loss_bytes_ratios_and_median_speed(tmp_path):
    folders = {
        # A ring sends 2 (R - 1) / R of the gradient: 6,000 bytes in float32 of 1,000 parameters.
        "dense": make_run(tmp_path / "dense", [5.5, 2.25], 6000.0),
        "4-bit": make_run(tmp_path / "4bit", [5.5, 2.5, 2.75], 750.0),
        "broken": make_run(tmp_path / "broken", [5.5, float("nan")], 1500.0, seconds=()),
        "alone": make_run(tmp_path / "alone", [5.5], 0.0, replicas=1),
        # Between two hosts of two devices cross 2,000 bytes of each device's half.
        "2 x 2": make_run(tmp_path / "hybrid", [5.5], 500.0, fast=2),
    }
    picture = tmp_path / "comparison.png"
    assert [line.split("  ") for line in compact(compare.compare(folders, picture))] == [
        ["method", "val loss", "bytes/step", "of fp16", "of fp32", "steps/s"],
        ["dense", "2.2500", "6,000", "200.0%", "100.0%", "5.00"],
        ["4-bit", "2.7500", "750", "25.0%", "12.5%", "5.00"],
        ["broken", "not finite", "1,500", "50.0%", "25.0%", "-"],
        ["alone", "5.5000", "0", "-", "-", "5.00"],
        ["2 x 2", "5.5000", "500", "50.0%", "25.0%", "5.00"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def compact(table):
    """The lines of a table, its cells two blanks apart."""
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    return ["  ".join(cell.strip() for cell in line.split("  ") if cell.strip()) for line in lines]


def test_compare_takes_runs_of_one_name_in_two_folders(tmp_path, capsys):
    paths = [str(make_run(tmp_path / part / "nano", [5.5, 2.0], 8.0)) for part in ("a", "b")]
    compare.main(paths)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == paths
    assert lines[3] == str(tmp_path / "a" / "comparison.png")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: None, "does not exist; train the run first"),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), "holds no evaluated run"),
        (lambda folder: (folder / "metrics.jsonl").write_text('{"step": 1}\n'), "no evaluated run"),
    ],
)
def test_folder_without_an_evaluated_run_is_refused(tmp_path, capsys, prepare, message):
    prepare(tmp_path)
    with pytest.raises(SystemExit) as stop:
        compare.main([str(tmp_path)])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err


def test_demo_trains_all_and_ends_with_the_table_and_the_picture(tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(10):
        (text / f"{number}.txt").write_text(f"the cat {number} sat on the mat " * 40)
    small = dataclasses.replace(
        nano_dense.get_config(),
        model=DecoderConfig(layers=1, width=16, heads=2, context=16),
        data=Data(path=str(text), batch=8),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "base", lambda: small)
    monkeypatch.setattr(devices, "start", lambda replicas, num_processes=1: None)
    monkeypatch.setattr("sys.argv", ["train.demo", "--steps", "3", "--link", "1mbit"])
    make_run(tmp_path / "runs" / "demo" / "dense_Adam", [9.0] * 9, 8.0)  # an earlier demo's
    demo.main()
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].split()[-5:] == ["step", "on", "1mbit", "whole", "run"]
    assert lines[1].startswith("dense Adam ") and " 100.0% " in lines[1]
    assert [line[:11] for line in lines[2:4]] == ["4-bit mean ", "CocktailSGD"]
    assert lines[5].startswith("On 1mbit CocktailSGD: ")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "runs/demo/comparison.png" and pathlib.Path(lines[-1]).is_file()
    names = "dense_Adam", "4-bit_mean", "CocktailSGD"
    runs = [metrics.read(pathlib.Path(f"runs/demo/{name}/metrics.jsonl")) for name in names]
    assert len({run[0]["val_loss"] for run in runs}) == 1
    sent = [run[-1]["sent_bytes"] for run in runs]
    assert sent[0] > 2 * max(sent[1:]) and min(sent) > 0


def test_a_step_on_the_link_takes_what_it_takes_here_and_the_messages():
    rows = [{"step": n, "sent_bytes": 10.0 * n, "val_loss": 2.0} for n in range(3)]
    dense = demo.Outcome(rows, 2.0, 10.0, 0.1, 0.5)
    few = demo.Outcome(rows, 2.1, 1.0, 0.2, 0.25)
    runs = {"dense Adam": dense, "few": few}
    assert demo.finding(runs, "1gbit") == (
        "On 1gbit few: 2.0 times as fast as dense Adam, loss 2.10 (2.00)"
    )
    assert "do not compress" in demo.finding(runs | {"few": dense}, "1gbit")
    line = demo.table(runs, 60, "1gbit").splitlines()[2].split()
    assert line == ["few", "2.100", "10.0%", "200", "ms", "250", "ms", "0.2", "min"]


def test_demo_shortens_warmup_and_evaluations_with_the_steps():
    config = demo.config_of("dense Adam", 300)
    assert (config.steps, config.optimizer.warmup_steps, config.eval_every) == (300, 30, 30)
    tiny = demo.config_of("dense Adam", 1)
    assert (tiny.steps, tiny.optimizer.warmup_steps, tiny.eval_every, tiny.log_every) == (
        1,
        0,
        1,
        1,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "write at least 1"),
        (["--link", "fast"], "write a rate, like make demo LINK=100mbit"),
        (["--link", "0mbit"], "write a rate"),
    ],
)
def test_demo_refuses_no_steps_and_no_rate(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.demo", *arguments])
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_rates_are_read_as_tc_writes_them():
    assert [demo.bits_a_second(x) for x in ("100mbit", "2.5Gbit", "64kbit")] == [1e8, 2.5e9, 64e3]


def test_make_hands_the_steps_on_to_the_demo():
    done = subprocess.run(
        ["make", "-n", "demo", "STEPS=20", "LINK=1gbit"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "-m train.demo --steps 20 --link 1gbit\n" in done.stdout
