"""What an exit status means is said once, and everywhere alike."""

import json
import os
import re
import shlex
import subprocess
import sys

import jax
import pytest

from jaxcomp.launch.exits import (
    Drained,
    Exit,
    Transient,
    clean_exits,
    from_returncode,
    may_restart,
    status,
    words,
)
from tests.helpers.launching import ROOT, environment, two_processes


def test_the_page_has_the_table_of_all_statuses():
    text = (ROOT / "docs" / "many_hosts.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert rows == [(str(int(end)), end.meaning, end.again) for end in Exit]
    assert {end.again for end in Exit} == {"nobody has to", "a person", "a machine"}


@pytest.mark.parametrize(
    ("status", "again"), [(0, False), (1, True), (2, False), (75, True), (130, False), (137, True)]
)
def test_a_machine_restarts_what_no_person_has_to_mend(status, again):
    assert may_restart(status) is again
    assert may_restart(9)  # which nobody has heard of


def test_a_signal_is_seen_as_a_shell_sees_it():
    assert [from_returncode(code) for code in (0, 2, -9, -11)] == [0, 2, Exit.KILLED, Exit.CRASHED]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt("stopped at step 3"), 0, "stopped at step 3\n"),
        (Drained("stopped at step 3"), 85, "stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (ValueError("too many"), 2, "error: too many\n"),
        (Transient("gone apart"), 75, "error: gone apart\n"),
        (ConnectionError("lost"), 75, "error: lost\n"),
    ],
)
def test_ends_are_one_message_and_a_status(capsys, error, status, message):
    with pytest.raises(SystemExit) as stop, clean_exits():
        raise error
    assert (stop.value.code, capsys.readouterr().err) == (status, message)


class Fault(jax.errors.JaxRuntimeError):
    """What XLA raises is a RuntimeError."""


@pytest.mark.parametrize(
    "error", [KeyError("b"), RuntimeError("a"), Fault("c"), MemoryError(), AssertionError("no")]
)
def test_an_error_that_nobody_foresaw_has_status_1_and_its_traceback(error, capsys):
    with pytest.raises(SystemExit) as end, clean_exits():
        raise error
    assert end.value.code == status(error) == Exit.UNFORESEEN
    assert "Traceback" in capsys.readouterr().err
    assert words(error).startswith(f"{type(error).__name__}: ")


def test_a_mistake_is_told_in_its_own_words():
    assert words(ValueError("write --steps 3")) == "write --steps 3"
    assert status(json.JSONDecodeError("no value", "", 0)) == Exit.MISTAKE


UNFORESEEN = """
import sys
from jaxcomp.launch import agree, distributed, watchdog
from jaxcomp.launch.distributed import Cluster
from jaxcomp.launch.exits import ended

process, coordinator, case = int(sys.argv[1]), sys.argv[2], sys.argv[3]


def fail():
    return {}["a key that is not there"]


def run():
    with watchdog.watch(60.0, lambda: 40):
        if case == "common":
            agree.from_first(fail)
        if process == int(case):
            fail()
        agree.from_first(lambda: 1)


distributed.connect(Cluster(coordinator, 2, process, "flags"))
distributed.abandon(ended(run))
"""


# Of process 1: test_who_ends_slowly_still_says_why_when_the_store_has_gone.
@pytest.mark.parametrize("case", ["0", "common"])
def test_an_unforeseen_error_of_one_process_ends_all_with_status_1(case):
    with two_processes(UNFORESEEN, case) as processes:
        ends = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1], ends
    if case == "0":
        assert ends[0].rstrip().endswith("KeyError: 'a key that is not there'")
        told = "error: process 0 of 2 has ended: KeyError: 'a key that is not there'"
        assert ends[1].splitlines()[-1] == told


def unread():
    """A pipe whose reader is gone, as after `| head`, or `| tee` and Ctrl-C."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full():
    """A file on a full disk."""
    return os.open("/dev/full", os.O_WRONLY)


# Without the package, which takes a second to import, as in test_supervise.py.
ALONE = f"import sys\nsys.path.append({str(ROOT / 'jaxcomp' / 'launch')!r})\n"
UNWRITTEN = """
from exits import Drained, clean_exits, say, show
with clean_exits():
    say("it runs")
    show("result")
    {last}
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("out", "err", "last", "status"),
    [
        (unread, unread, "", 0),
        (None, full, "raise Drained('saved')", 85),
        (None, full, "raise ValueError('no')", 2),
        (full, None, "", 2),
    ],
)
def test_a_program_that_cannot_tell_its_end_keeps_its_status(out, err, last, status, unbuffered):
    streams = {"stdout": out and out(), "stderr": err and err()}
    command = [sys.executable, "-c", ALONE + UNWRITTEN.format(last=last)]
    env = environment(PYTHONUNBUFFERED=unbuffered)
    assert subprocess.run(command, cwd=ROOT, env=env, **streams).returncode == status
    for stream in filter(None, streams.values()):
        os.close(stream)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("count", [1, 10_000])
def test_a_long_text_that_nobody_reads_to_its_end_is_no_error(count, unbuffered):
    program = ALONE + "from exits import *\nwith clean_exits(), while_read():\n "
    program += f"[print('a line') for _ in range({count})]"
    out, env = unread(), environment(PYTHONUNBUFFERED=unbuffered)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.PIPE)
    os.close(out)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"\\xe9\\udcff\n"), ("utf-8", b"\xc3\xa9\\udcff\n")]
)
def test_a_result_is_shown_on_terminals_that_lack_its_characters(encoding, shown):
    program = f"{ALONE}from exits import show; show('\\xe9\\udcff')"
    env = environment(PYTHONIOENCODING=encoding)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True)
    assert done.stdout == shown


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_whose_caller_has_closed_its_streams_runs(closed, tmp_path):
    program = (
        "import subprocess, sys; from jaxcomp.launch.exits import clean_exits, say\n"
        "with clean_exits():\n"
        f"    with open({str(tmp_path / 'file')!r}, 'w') as file:\n"
        "        print('out'); say('err'); print(sys.stderr.isatty(), sys.stdin.read())\n"
        "        subprocess.run(['sh', '-c', 'echo child; echo child >&2'], check=True)\n"
        "        file.write(str(file.fileno() > 2))"
    )
    shell = f"exec {shlex.join([sys.executable, '-c', program])} {closed}"
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "True"
