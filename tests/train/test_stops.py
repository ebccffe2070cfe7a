"""Signals ask a run to stop; of Ctrl-C and SIGTERM the third stops it at once."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest

from jaxcomp.launch.exits import clean_exits
from jaxcomp.launch.signals import STOPS, stop_signals
from tests.helpers.launching import ROOT, environment, run, write_config
from train.checkpoints import files
from train.output import metrics

STOPPED = """
import os, runpy, signal, sys, time
from train.checkpoints import store
from train.data import texts

names = sys.argv.pop(1).split()
draw, write = texts.batch, store.write_checksums

def be_told():
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.3)
    names.clear()

def batch(tokens, seed, step, *rest):
    print(f"step {step} begins", flush=True)
    return draw(tokens, seed, step, *rest)

def slowly(directory):
    hangs = len(names) > 2
    be_told()
    while hangs:
        time.sleep(1)
    write(directory)

texts.batch, store.write_checksums = batch, slowly
runpy.run_module("train", run_name="__main__")
"""
ONCE = (
    "already stopping: the run saves and ends; a third Ctrl-C or SIGTERM ends it at once, unsaved\n"
)
WARNINGS = [name for name in STOPS if name not in ("SIGINT", "SIGTERM")]


@pytest.mark.parametrize(
    ("names", "status", "step"), [("SIGINT SIGTERM", 0, 2), ("SIGINT SIGTERM SIGTERM", 130, None)]
)
def test_a_second_signal_does_not_discard_the_save_and_a_third_stops_it(
    tmp_path, names, status, step
):
    """A run of two steps gets the signals in its save."""
    command = [sys.executable, "-c", STOPPED, names, str(write_config(tmp_path))]
    ended = run(command, cwd=ROOT, env=environment())
    said = ended.stdout
    assert (ended.returncode, said.count(ONCE)) == (status, 1), said
    # Each replica's rows are drawn by themselves.
    assert {int(number) for number in re.findall(r"step (\d+) begins", said)} == {0, 1}
    assert files.latest(tmp_path / "runs" / "tiny" / "checkpoints") == step
    if step is None:
        assert said.endswith("interrupted\n") and "Traceback" not in said


def test_a_run_whose_terminal_is_closed_keeps_all_steps(tmp_path):
    config, folder = write_config(tmp_path), tmp_path / "runs" / "tiny"
    program = (
        "import fcntl, runpy, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "runpy.run_module('train', run_name='__main__')\n"
    )
    screen, terminal = os.openpty()
    os.set_blocking(screen, False)
    termios.tcsetwinsize(terminal, (24, 80))  # a bar of no width is not drawn
    command = [sys.executable, "-c", program, str(config), "--steps", "1000000"]
    with subprocess.Popen(
        command,
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
        **{"cwd": ROOT, "env": environment(), "start_new_session": True},
    ) as process:
        try:
            os.close(terminal)
            said, deadline = b"", time.monotonic() + 100
            while not re.search(rb" [1-9]\d*/1000000", said):  # the bar
                assert process.poll() is None and time.monotonic() < deadline, said
                with contextlib.suppress(BlockingIOError):
                    said += os.read(screen, 65536)
                time.sleep(0.01)
            os.close(screen)  # the kernel sends SIGHUP, and whatever is printed now fails
            process.wait(60)
        finally:
            process.kill()
    last = metrics.read(folder / "metrics.jsonl")[-1]["step"]
    assert files.latest(folder / "checkpoints") == last >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_asks_the_second_is_told_and_the_third_interrupts(number, capfd):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stop_signals() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        assert asked() and capfd.readouterr().err == ""
        os.kill(os.getpid(), number)
        assert asked() and capfd.readouterr().err == ONCE
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(ZeroDivisionError), stop_signals():
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("module", ["train", "train.launch"])
def test_ctrl_c_during_the_imports_ends_at_once_without_a_traceback(module, tmp_path):
    kill = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit('not ended')\n"
    (tmp_path / "jax.py").write_text(kill)
    program = (
        "import runpy, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    env = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    ended = run([sys.executable, "-c", program, "configs/nano_dense.py"], cwd=tmp_path, env=env)
    assert (ended.returncode, ended.stdout) == (130, "interrupted\n")


def test_ctrl_c_in_a_callback_of_the_garbage_collector_is_not_lost(capsys):
    def callback(phase, info):
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    hook = sys.unraisablehook
    try:
        with pytest.raises(SystemExit) as end, clean_exits():
            gc.callbacks.append(callback)
            gc.collect()
            time.sleep(60)
            pytest.fail("the sleep went on")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (end.value.code, capsys.readouterr().err) == (130, "interrupted\n")
    assert sys.unraisablehook is hook


def test_a_second_signal_is_no_trouble_where_nothing_can_be_said(monkeypatch):
    def disk_full(descriptor, text):
        raise OSError(28, "No space left on device")

    with stop_signals() as asked, monkeypatch.context() as patch:
        patch.setattr("os.write", disk_full)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_asks_however_often_it_comes_and_is_no_haste(name, capfd):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with stop_signals() as asked:
        try:
            for _ in range(3):  # as SIGXCPU, every second
                os.kill(os.getpid(), number)
                assert asked()
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            pytest.fail("a warning was taken for haste")
        assert capfd.readouterr().err == ONCE
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) == before


def test_a_warning_that_is_ignored_stays_so_and_an_order_does_not():
    numbers = signal.SIGHUP, signal.SIGINT
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with stop_signals() as asked:
            os.kill(os.getpid(), signal.SIGHUP)  # nohup wants the run to go on
            assert not asked()
            os.kill(os.getpid(), signal.SIGINT)  # a shell ignores it for what runs in background
            assert asked()
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_the_page_has_the_table_of_signals():
    text = (ROOT / "docs" / "many_hosts.md").read_text()
    assert re.findall(r"^\| (SIG\w+) \| (.+) \|$", text, re.MULTILINE) == [*STOPS.items()]


def test_in_another_thread_no_stop_is_ever_asked_for():
    answers = []

    def body():
        with stop_signals() as asked:
            answers.append(asked())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert answers == [""]
