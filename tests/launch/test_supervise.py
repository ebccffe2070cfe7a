"""Processes that are watched: all end together, hear signals, and the first to fail is named."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxcomp.launch import supervise
from tests.helpers.launching import ROOT, run, until

MEMBER = """
import signal, sys, time
sys.path.append({folder!r})  # without the package, which takes a second to import
import control
told = []
for name in ("TERM", "INT", "HUP"):
    signal.signal(getattr(signal, "SIG" + name), lambda *_, name=name: told.append(name))
secret = control.obey()
print("here", flush=True)
"""
MEMBER = MEMBER.format(folder=str(ROOT / "jaxcomp" / "launch"))
WAITS = "while not told: time.sleep(0.01)\ntime.sleep(0.3)\nprint(*told, flush=True)\n"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(0.01)\n"


def member(body):
    """The command of a process that obeys, and then does what `body` says."""
    return [sys.executable, "-c", MEMBER + body]


def launcher_of(folder, *commands, last="sys.exit(end.status)"):
    """The command of a launcher in a process of its own."""
    program = (
        "import pathlib, signal, sys; from jaxcomp.launch import supervise\n"
        f"end = supervise.supervise({[*commands]!r}, pathlib.Path({str(folder)!r}), 10.0)\n"
    )
    return [sys.executable, "-c", program + last]


@pytest.fixture
def signal_before(monkeypatch):
    """Sends a signal to this process before it starts that of a number."""

    def install(number, kind):
        def start(command, log, secret):
            if log.name == f"process_{number}.log":
                os.kill(os.getpid(), kind)
            return started(command, log, secret)

        started = supervise._start
        monkeypatch.setattr(supervise, "_start", start)

    return install


def test_all_end_well_with_one_secret_a_start_which_no_log_shows(tmp_path, capfd):
    body = "import hashlib; print(hashlib.sha256(secret).hexdigest(), len(secret), flush=True)"
    for _ in range(2):
        assert supervise.supervise([member(body)] * 2, tmp_path, 10.0).status == 0
        start = f"2 processes; logs: {tmp_path}/process_*.log\nhere\n"
        assert capfd.readouterr().out.startswith(start)
    logs = [(tmp_path / f"process_{number}.log").read_text() for number in range(2)]
    first, second = ([re.findall(r"^(\w{64}) 64$", log, re.MULTILINE)] for log in logs)
    assert first == second and len(set(first[0])) == 2
    assert all(log.startswith("--- ") for log in logs)


def test_the_first_failure_ends_all_and_is_told_with_its_log(tmp_path, capfd):
    bodies = [WAITS, "print('old')", "time.sleep(0.5); print('no disk'); sys.exit(3)"]
    (tmp_path / "process_2.log").write_text("an earlier start\n")
    assert supervise.supervise([member(body) for body in bodies], tmp_path, grace=0.5).status == 3
    said = capfd.readouterr().err
    log = tmp_path / "process_2.log"
    assert said == (
        f"error: process 2 failed first, with status 3; {log} ends:\n    here\n    no disk\n"
    )
    assert "an earlier start" in log.read_text()
    assert (tmp_path / "process_0.log").read_text().endswith("here\nTERM\n")


def test_who_does_not_listen_is_killed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervise, "PATIENCE", 0.3)
    # The second one has no thread that listens, as if it hung.
    deaf = [member(DEAF), [sys.executable, "-c", "import time; time.sleep(600)"]]
    fails = member("time.sleep(0.5); import os; os.kill(os.getpid(), 9)")
    began = time.monotonic()
    assert supervise.supervise([*deaf, fails], tmp_path, grace=0.2).status == 128 + 9
    assert time.monotonic() - began < 30
    how = "signal SIGKILL (did its host or pod run out of memory?)"
    assert f"process 2 failed first, with {how}" in capfd.readouterr().err


def test_who_ends_because_another_is_gone_is_not_to_blame(tmp_path, capfd):
    """And who is has time to end by itself."""
    bodies = ["sys.exit(75)", "time.sleep(0.5); print('by myself'); sys.exit(2)"]
    assert supervise.supervise([member(body) for body in bodies], tmp_path, grace=30.0).status == 2
    assert (tmp_path / "process_1.log").read_text().endswith("here\nby myself\n")
    assert "process 1 failed first, with status 2" in capfd.readouterr().err


LOST, MISTAKE = "import os; os.kill(os.getpid(), 9)", "time.sleep(0.5); sys.exit(2)"


@pytest.mark.parametrize(
    ("bodies", "end"),
    [
        ([DEAF, LOST], (128 + 9, (1,), False)),
        ([MISTAKE, "sys.exit(75)"], (2, (), False)),  # which a person has to hear of
        (["sys.exit(1)", "time.sleep(0.5); sys.exit(1)"], (1, (), False)),  # an error of all
    ],
)
def test_a_run_that_starts_again_waits_for_nobody_who_can_only_end(tmp_path, bodies, end):
    began = time.monotonic()
    found = supervise.supervise([member(body) for body in bodies], tmp_path, 60.0, hurry=True)
    assert found == end and time.monotonic() - began < 30


def test_a_stop_is_obeyed_in_a_run_that_would_start_again(tmp_path, signal_before, monkeypatch):
    monkeypatch.setattr(supervise, "PATIENCE", 0.2)  # saving takes longer
    signal_before(0, signal.SIGTERM)
    bodies = ["while not told: time.sleep(0.01)\ntime.sleep(1)\nprint('saved')", LOST]
    found = supervise.supervise([member(body) for body in bodies], tmp_path, 20.0, hurry=True)
    assert found.signalled and (tmp_path / "process_0.log").read_text().endswith("saved\n")


def test_a_signal_while_processes_start_reaches_those_that_start_later(tmp_path, signal_before):
    signal_before(1, signal.SIGINT)
    assert supervise.supervise([member(WAITS)] * 3, tmp_path, 10.0).status == 0
    for number in range(3):
        assert (tmp_path / f"process_{number}.log").read_text().endswith("here\nINT\n")


@pytest.mark.parametrize(("orders", "status"), [(2, 0), (3, 130)])
def test_a_third_order_ends_processes_that_ignore_all(
    tmp_path, signal_before, monkeypatch, orders, status
):
    monkeypatch.setattr(supervise, "PATIENCE", 0.2)
    for number in range(orders):
        signal_before(number, signal.SIGINT)
    found = supervise.supervise([member("time.sleep(2)")] * 3, tmp_path, 10.0)
    assert found == supervise.End(status, signalled=True)


@pytest.fixture
def launcher(tmp_path):
    """A launcher of two members in a process of its own, when both are there."""
    logs = [tmp_path / f"process_{number}.log" for number in range(2)]
    command = launcher_of(tmp_path, *[member(WAITS)] * 2)
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    until(lambda: all(log.exists() and log.read_text().endswith("\nhere\n") for log in logs))
    yield process, logs
    process.kill()
    process.wait()


def test_a_signal_to_the_launcher_reaches_each_process_once(launcher):
    process, logs = launcher
    # As a terminal does that is closed: to the launcher's whole group.
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(30) == 0
    for log in logs:
        assert log.read_text().endswith("here\nHUP\n")


def test_processes_end_when_the_launcher_is_killed(launcher):
    process, logs = launcher
    process.kill()
    process.wait()
    until(lambda: all(log.read_text().endswith("here\nTERM\n") for log in logs), 20)


def test_members_go_on_when_nobody_reads_the_launcher(tmp_path):
    body = (
        "import pathlib, sys, time\n"
        "for i in range(20): print(i, flush=True); time.sleep(0.1)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'saved').write_text('all')"
    )
    command = launcher_of(tmp_path, member(body))
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert (tmp_path / "saved").read_text() == "all"


def test_a_launcher_without_a_reader_still_returns_who_failed(tmp_path):
    commands = member("sys.exit(3)"), member(WAITS)
    last = "pathlib.Path(sys.argv[1]).write_text(str(end))"
    command = [*launcher_of(tmp_path, *commands, last=last), str(tmp_path / "end")]
    reader, writer = os.pipe()
    os.close(reader)
    subprocess.run(command, stdout=writer, stderr=writer, cwd=ROOT, timeout=60)
    os.close(writer)
    assert (tmp_path / "end").read_text() == str(supervise.End(3, (0,)))


def test_processes_of_a_launcher_under_nohup_hear_what_it_ignores(tmp_path):
    body = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)\n"
    body += "print(*(signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGUSR1)))"
    last = "print(end.status, end.signalled, signal.getsignal(signal.SIGHUP).name)"
    command = launcher_of(tmp_path, [sys.executable, "-c", body], last=last)
    shell = f"trap '' HUP USR1; exec {shlex.join(command)}"
    done = run(["sh", "-c", shell], cwd=ROOT)
    assert done.stdout.endswith("\nSIG_DFL SIG_DFL\n0 False SIG_IGN\n"), done.stdout


def test_who_was_told_to_stop_hears_no_more_when_the_launcher_goes():
    command = member("time.sleep(1); print(*told, flush=True)")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"secret\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdin.write(b"INT\n")
        process.stdin.close()
        assert process.stdout.read() == b"INT\n"


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path):
    (tmp_path / "process_0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        supervise.supervise([["true"]], tmp_path, 1.0)
    assert not (tmp_path / "elsewhere").exists()


def test_a_log_on_a_full_disk_is_named(tmp_path, monkeypatch):
    full = lambda *_, open=os.open: open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(supervise, "os", SimpleNamespace(**vars(os) | {"open": full}))
    with pytest.raises(OSError, match="No space left on device: .*process_0.log"):
        supervise.supervise([[sys.executable, "-V"]], tmp_path, 1)


def test_a_folder_of_logs_that_cannot_be_made_is_named_with_what_to_write(tmp_path):
    (tmp_path / "file").touch()
    message = f"cannot make {tmp_path}/file/logs: Not a directory; write another folder as --logs"
    with pytest.raises(OSError, match=message):
        supervise.supervise([["true"]], tmp_path / "file" / "logs", 1.0)
