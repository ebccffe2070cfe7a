"""`python -m train`: a run, a report, and mistakes that end with one message."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.helpers.launching import ROOT, TINY_ARGS, words
from train import compare, deepspeed, export, generate, program
from train.placement import devices

NANO = ROOT / "configs" / "nano_dense.py"
ADAM = "chain(compressed_mean({}, axis_name), adam(learning_rate))"
ZERO_ONE_ADAM = (
    "zero_one_adam(learning_rate, axis_name, sync_at=schedules.every(4, steps, after=1), "
    "variance_at=schedules.every(4, steps, after=1))"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return words(tmp_path_factory.mktemp("text"))


def main(monkeypatch, capsys, *args):
    """Runs the program in this process, whose devices exist; returns status, output, errors."""
    monkeypatch.setattr(devices, "start", lambda replicas, num_processes=1: None)
    status = 0
    try:
        program.main([str(arg) for arg in args])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def reported(monkeypatch, capsys, tmp_path, text):
    """Prints the report of `nano_dense` with another update, and other settings."""
    monkeypatch.chdir(tmp_path)

    def report(update, args=""):
        args = [*TINY_ARGS.split(), "--data.path", text, *args.split()]
        args += ["--optimizer.update", update]
        status, out, err = main(monkeypatch, capsys, NANO, "--report", *args)
        assert (status, err, os.listdir(tmp_path)) == (0, "", [])
        return out

    return report


def test_report_prints_bytes_and_makes_nothing(reported):
    # Wide enough that most parameters do not travel exact.
    out = reported(ADAM.format("sign(block=128)"), "--model.width 128")
    for line in ("all-to-all", "bytes a step", "MiB of parameters"):
        assert line in out
    assert re.search(r"in float32, \d+ arrays: block_\*/", out) and out.count("note: ") == 1


def test_report_of_a_run_that_skips_rounds_counts_its_bits(reported):
    out = reported(ZERO_ONE_ADAM, "--steps 12 --optimizer.warmup-steps 1")
    number = lambda pattern: float(re.search(pattern, out)[1].replace(",", ""))
    total, bits = number(r"([\d,]+) bytes over the run"), number(r"run, ([\d.]+) bits")
    dense = number(r"\(dense: ([\d,]+), 32;")
    assert dense == 12 * 4 * number(r"([\d,]+) parameters on 4 replicas") * 2 * 3 / 4
    assert bits == pytest.approx(32 * total / dense, abs=0.005)
    assert "of 12 steps 4 send anything: synchronize 4 times" in out and bits < 32 * 5 / 12
    # 0.15 of 32 bits, and 0.85 of one with a float32 scale for 1,024.
    assert number(r"dense steps: about [\d,]+, ([\d.]+)\)") == 5.68


def test_one_replica_reports_that_it_sends_nothing(reported):
    out = reported(ZERO_ONE_ADAM, "--replicas 1")
    assert "one replica sends 0 bytes a step" in out and "nothing to send with one replica" in out


def test_run_ends_with_the_loss_and_the_picture(monkeypatch, capsys, tmp_path, text):
    monkeypatch.chdir(tmp_path)
    args = [
        *TINY_ARGS.split(),
        *"--steps 2 --optimizer.warmup-steps 0 --model.width 128".split(),
        "--data.path",
        text,
    ]
    update = ADAM.format("sign()")
    status, out, err = main(monkeypatch, capsys, NANO, *args, "--optimizer.update", update)
    assert status == 0
    first, *facts, picture = out.splitlines()
    assert re.fullmatch(r"runs/nano_dense: step 2, validation loss \d\.\d{4} nats per byte", first)
    assert [fact.split()[0] for fact in facts] == ["time", "sent", "losses", "checkpoint"]
    assert picture == "runs/nano_dense/loss.png" and pathlib.Path(picture).is_file()
    assert err.startswith("note: compressed_mean at ") and "second moment trains badly" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--data.path {tmp}/missing", "missing' does not exist; name a text file"),
        ("--replicas 16", "replicas=16, but there are 8 cpu devices"),
        ("--replicas 0 --data.batch 9", "must be divisible by 8 replicas"),
        ("--runs-dir {tmp}/empty.txt", "Not a directory"),
        ("--optimizer.update compressed_mean(sign(),'x')", "the axis 'x' is unknown"),
        ("--optimizer.update adam(learning_rate)", "compressed_mean"),
        ("--optimizer.update scale(learning_rate)", "does not fit gradients"),
    ],
)
def test_mistake_ends_with_status_2_and_one_message(
    monkeypatch, capsys, tmp_path, text, args, message
):
    (tmp_path / "empty.txt").write_text("")
    own = "--model.layers 1 --model.width 16 --model.heads 2"
    own = [*own.split(), "--runs-dir", str(tmp_path / "runs"), "--data.path", text]
    own += ["--data.cache", str(tmp_path / "tokens")]
    wrong = args.format(tmp=tmp_path).split()
    status, out, err = main(monkeypatch, capsys, NANO, *own, *wrong)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err and "Traceback" not in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("args", [[], ["--report"]])
def test_no_config_is_answered_with_the_usage(monkeypatch, capsys, args):
    status, out, _ = main(monkeypatch, capsys, *args)
    assert status == 2 and out.startswith("usage: python -m train CONFIG.py")


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (AssertionError(), ValueError, "JAX_PLATFORMS=.* finds no device here; write JAX_PL"),
        (RuntimeError("'x' is not in the list of known backends"), ValueError, "JAX_PLATFORMS="),
        (RuntimeError("CUDA_ERROR_UNKNOWN"), RuntimeError, "CUDA"),  # a fault of a device
    ],
)
def test_a_platform_that_is_not_there_is_told(monkeypatch, error, raised, message):
    def fail():
        raise error

    monkeypatch.setenv("NPROC", "1")
    monkeypatch.setattr("jax.devices", fail)
    with pytest.raises(raised, match=message):
        devices.start(0)


def test_device_start_makes_a_device_for_each_replica_and_threads_for_all():
    code = (
        "import os, jax; from train.placement import devices; devices.start(5); "
        "print(len(jax.devices()), os.environ['NPROC'], len(os.listdir('/proc/self/task')))"
    )
    env = {k: v for k, v in os.environ.items() if k != "NPROC"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], **{"cwd": ROOT, "env": env, "capture_output": True}
    )
    count, pool, threads = map(int, done.stdout.split())
    assert count == 5 and pool == max(20, os.cpu_count()) and threads > pool


@pytest.mark.parametrize("module", [compare, deepspeed, export, generate])
def test_commands_start_without_docstrings_as_under_python_oo(monkeypatch, capsys, module):
    monkeypatch.setattr(module, "__doc__", None)
    with pytest.raises(SystemExit) as stop:
        module.main(["--help"])
    assert stop.value.code == 0
    assert f"usage: python -m {module.__name__}" in capsys.readouterr().out
