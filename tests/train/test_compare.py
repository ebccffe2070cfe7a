"""Runs side by side: the table, the picture, and the three runs of `make demo`."""

import json
import shlex
import subprocess

import pytest

from tests.helpers.launching import ROOT
from train import compare, program
from train.output import metrics


def make_run(
    folder, losses, sent_bytes, replicas=4, seconds=(0.1, 0.5, 0.2), fast=1, sha256="0a", **more
):
    """A finished run of 1,000 parameters."""
    folder.mkdir(parents=True)
    plan = {"trained": 1000, "replicas": replicas, "sent_bytes_per_step": sent_bytes} | more
    record = {"plan": plan, "config": {"fast": fast}, "data": {"sha256": sha256}}
    (folder / "config.json").write_text(json.dumps(record))
    for step, loss in enumerate(losses):
        row = {"step": step, "val_loss": loss, "sent_bytes": step * sent_bytes}
        metrics.append(folder / "metrics.jsonl", row)
    for second in seconds:
        row = {"step": len(losses), "step_seconds": second, "sent_bytes": 0}
        metrics.append(folder / "metrics.jsonl", row)
    return folder


def test_losses_of_other_steps_are_noted(tmp_path):
    runs = {name: make_run(tmp_path / name, [5.5, 2.25], 6000.0) for name in ("dense", "4-bit")}
    assert "note" not in compare.compare(runs)
    runs["long"] = make_run(tmp_path / "long", [5.5, 3.5, 2.0], 6000.0)
    note = "note: losses are of different steps: dense after step 1, 4-bit after step 1, long after"
    for rate in (None, 1e9):
        assert compare.compare(runs, rate).splitlines()[-1] == f"{note} step 2."


def test_table_has_last_loss_bytes_ratios_and_median_speed(tmp_path):
    folders = {
        # A ring sends 2 (R - 1) / R of the gradient: 6,000 bytes in float32 of 1,000 parameters.
        "dense": make_run(tmp_path / "dense", [5.5, 2.25], 6000.0),
        "4-bit": make_run(tmp_path / "4bit", [5.5, 2.5, 2.75], 750.0),
        "broken": make_run(tmp_path / "broken", [5.5, float("nan")], 1500.0, seconds=()),
        "alone": make_run(tmp_path / "alone", [5.5], 0.0, replicas=1),
        # Between two hosts of two devices cross 2,000 bytes of each device's half.
        "2 x 2": make_run(tmp_path / "hybrid", [5.5], 500.0, fast=2),
        # A dense mean of what is trained.
        "LoRA": make_run(tmp_path / "lora", [5.5], 600.0, trained=100),
    }
    table, _, _ = compare.compare(folders).partition("\n\n")
    assert [line.split("  ") for line in compact(table)] == [
        ["method", "val loss", "bytes/step", "of fp16", "of fp32", "steps/s"],
        ["dense", "2.2500", "6,000", "200.0%", "100.0%", "5.00"],
        ["4-bit", "2.7500", "750", "25.0%", "12.5%", "5.00"],
        ["broken", "not finite", "1,500", "50.0%", "25.0%", "-"],
        ["alone", "5.5000", "0", "-", "-", "5.00"],
        ["2 x 2", "5.5000", "500", "50.0%", "25.0%", "5.00"],
        ["LoRA", "5.5000", "600", "200.0%", "100.0%", "5.00"],
    ]


def test_a_run_that_went_on_with_fewer_replicas_has_the_mean_bytes_of_all_its_steps(tmp_path):
    dense = {"dense_bytes_per_step": 0.0}
    folder = make_run(tmp_path / "run", [5.5, 2.25], 0.0, replicas=1, seconds=(), **dense)
    row = {"step": 4, "val_loss": 2.0, "sent_bytes": 1600.0, "dense_bytes": 12000.0}
    metrics.append(folder / "metrics.jsonl", row)
    _, line = compact(compare.compare({"run": folder}))
    assert line.split("  ") == ["run", "2.0000", "400", "26.7%", "13.3%", "-"]


def test_losses_of_other_data_are_told(tmp_path):
    sources = {"a": "0a", "b": "0a", "c": "0c"}
    runs = {n: make_run(tmp_path / n, [5.5], 8.0, sha256=sha256) for n, sha256 in sources.items()}
    for rate in None, 1e6:
        last = compare.compare(runs, rate).splitlines()[-1]
        why = "c read other data or tokens than a"
        assert last == f"note: {why}, so that losses do not compare."
    assert "note" not in compare.compare({name: runs[name] for name in "ab"})


def compact(table):
    """The lines of a table, its cells two blanks apart."""
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    return ["  ".join(cell.strip() for cell in line.split("  ") if cell.strip()) for line in lines]


def test_compare_takes_runs_of_one_name_in_two_folders(tmp_path, capsys):
    # In letters that matplotlib's font lacks, of which nobody has to hear.
    paths = [str(make_run(tmp_path / part / "日本", [5.5, 2.0], 8.0)) for part in ("a", "b")]
    compare.main(paths)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == paths
    assert lines[3] == str(picture := tmp_path / "a" / "comparison.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_cannot_be_written_costs_the_picture_alone(tmp_path, capsys, monkeypatch):
    def refuse(rows, path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(compare.plots, "loss_figure", refuse)
    run = make_run(tmp_path / "nano", [5.5, 2.0], 8.0)
    with pytest.raises(SystemExit) as stop:
        compare.main([str(run)])
    said = capsys.readouterr()
    assert stop.value.code == 2 and "comparison.png" in said.err
    assert said.out.splitlines()[1].split()[:2] == [str(run), "2.0000"]


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


def test_a_step_on_a_link_takes_what_it_takes_here_and_what_it_sends(tmp_path, capsys):
    paths = [
        str(make_run(tmp_path / "dense", [5.5], 6000.0, seconds=[0.1])),
        str(make_run(tmp_path / "few", [5.5], 750.0, seconds=[0.2])),
    ]
    for rate, steps, found in (
        ("480e3", ["200 ms", "213 ms"], f"At 0.48 Mbit/s {paths[0]} is the fastest: do not co"),
        ("48e3", ["1,100 ms", "325 ms"], f"At 0.048 Mbit/s {paths[1]} is 3.4 times as fast as "),
    ):
        compare.main([*paths, "--link-rate", rate])
        head, dense, few, _, finding, _ = capsys.readouterr().out.splitlines()
        assert head.split()[-4:-2] == ["step", "at"]
        assert [line[-8:].strip() for line in (dense, few)] == steps
        assert finding.startswith(found)


def test_a_run_without_a_step_is_neither_faster_nor_slower(tmp_path, capsys):
    none = str(make_run(tmp_path / "none", [5.5], 6000.0, seconds=()))
    some = str(make_run(tmp_path / "some", [5.5], 750.0))
    for runs, found in (
        ((none, some), f"{none} has made no st"),
        ((some, none), f"At 1 Mbit/s {some}"),
    ):
        compare.main([*runs, "--link-rate", "1e6"])
        *table, _, finding, _ = capsys.readouterr().out.splitlines()
        assert {line.split()[0]: line.split()[-1] for line in table[1:]} == {none: "-", some: "ms"}
        assert finding.startswith(found)


def test_a_run_alone_is_no_reason_not_to_compress(tmp_path, capsys):
    compare.main([str(make_run(tmp_path / "few", [5.5], 750.0)), "--link-rate", "1e6"])
    assert len(capsys.readouterr().out.splitlines()) == 3  # head, run, picture


@pytest.mark.parametrize("rate", ["0", "nan", "inf", "-1", "fast"])
def test_a_rate_that_is_none_is_refused(rate, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(["run", f"--link-rate={rate}"])
    assert stop.value.code == 2 and "--link-rate" in capsys.readouterr().err


def test_the_demo_is_three_runs_that_differ_in_their_method_alone():
    command = ["make", "-n", "demo", "STEPS=25", "LINK=1e9"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    *trained, compared = [
        line.split(" -m ")[1] for line in said.splitlines() if " -m train" in line
    ]
    configs = [program.read(shlex.split(line)[1:])[0] for line in trained]
    names = [f"runs/{config.name}" for config in configs]
    assert compared == f"train.compare {' '.join(names)} --link-rate 1e9" and len(names) == 3
    alike = {
        (config.steps, config.eval_every, config.optimizer.warmup_steps, config.model, config.data)
        for config in configs
    }
    assert len(alike) == 1 and len({config.optimizer.update for config in configs}) == 3
    assert (configs[0].steps, configs[0].eval_every, configs[0].link_rate) == (25, 3, 1e9)
