"""A run that loses processes goes on by itself, with all of them or with those that are left."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from jaxcomp.launch import options, restarts, ssh, supervise
from jaxcomp.launch.program import Plan, count_processes
from jaxcomp.launch.supervise import End
from tests.helpers import faults
from tests.helpers.launching import ROOT, environment, free_port, members, run, until
from train.checkpoints import files


def plan_of(saved=lambda: 0):
    """The plan of a run that 4, 2 or 1 processes can do."""
    fits = lambda count, least: count >= least and 8 % count == 0
    fewer = lambda processes, count, least: [f"--on={count}"] if fits(count, least) else None
    return Plan(pathlib.Path(), fewer, saved)


class Ends:
    """A group of four places whose starts end as they are told to."""

    def __init__(self, *ends, absent=(), back=None):
        self.ends, self.started, self.absent = list(ends), [], list(absent)
        self.group = restarts.Group("abcd", self.run, self.left, back)

    def run(self, places, overrides, is_wanted):
        self.started.append(("".join(places), " ".join(overrides)))
        end = self.ends.pop(0)
        return end(is_wanted) if callable(end) else end

    def left(self, places, lost):
        away = self.absent.pop(0) if self.absent else ""
        return [place for i, place in enumerate(places) if i not in lost and place not in away]


LOST = End(137, (1,))


@pytest.mark.parametrize(
    ("ends", "budget", "least", "status", "started"),
    [
        ([End(0)], 3, None, 0, ["abcd"]),
        ([LOST, End(0)], 3, None, 0, ["abcd", "abcd"]),
        ([LOST, End(0)], 0, None, 137, ["abcd"]),
        ([LOST, LOST, LOST], 2, None, 137, ["abcd", "abcd", "abcd"]),
        ([LOST, End(2)], 5, None, 2, ["abcd", "abcd"]),
        ([End(75, signalled=True)], 5, None, 75, ["abcd"]),
        # 8 sequences have no 3 replicas; then of "ac" the second is lost; then too few are left.
        ([LOST, LOST, End(139, (0,)), End(0)], 5, 1, 0, ["abcd", "ac", "a", "abcd"]),
        ([LOST, LOST, End(0)], 5, 2, 0, ["abcd", "ac", "abcd"]),
        ([End(75), End(0)], 5, 1, 0, ["abcd", "abcd"]),
        ([End(1), End(0)], 5, 1, 0, ["abcd", "abcd"]),
        ([End(85), End(0)], 5, 1, 0, ["abcd", "abcd"]),  # a host told its process to end
        ([End(85, signalled=True)], 5, 1, 85, ["abcd"]),
    ],
)
def test_a_run_is_started_again_where_that_is_of_use(ends, budget, least, status, started, capsys):
    group = Ends(*ends)
    assert restarts.keep_running(group.group, plan_of(), budget, least) == status
    assert [places for places, _ in group.started] == started
    assert capsys.readouterr().err.count("the run goes on with") == len(started) - 1


def test_a_run_goes_on_with_the_hosts_that_answer_and_waits_for_enough(monkeypatch, capsys):
    pauses = []
    monkeypatch.setattr(restarts.time, "sleep", pauses.append)
    group = Ends(End(75), End(75), End(0), absent=["d", "bcd", "bcd", "cd"])
    assert restarts.keep_running(group.group, plan_of(), 9, 2) == 0
    assert group.started == [("abcd", ""), ("ab", "--on=2"), ("ab", "--on=2")]
    assert len(pauses) == 2 and capsys.readouterr().err.count("1 of 4 processes could run") == 1


def test_any_program_goes_on_with_as_many_processes_as_there_are():
    given = options.parser().parse_args(["--local=4", "--restarts=2", "--min-replicas=3"])
    plan = count_processes(given, ["python", "script.py"])
    assert [plan.fewer(4, count, 3) for count in (3, 2)] == [[], None]
    group = Ends(LOST, LOST, End(0), absent=["", ""], back=lambda: "abcd")
    assert restarts.keep_running(group.group, plan, 2, 3) == 0
    assert group.started == [("abcd", ""), ("acd", ""), ("abcd", "")]
    given.restarts = 0
    with pytest.raises(ValueError, match="--min-replicas needs --restarts"):
        count_processes(given, [])


def until_told(is_wanted):
    """A start that ends when it is told to save and end."""
    until(is_wanted, 30)
    return End(85)


def test_who_is_back_takes_part_after_the_next_checkpoint_at_no_restart(monkeypatch, capsys):
    monkeypatch.setattr(restarts, "_PAUSE", 0.02)
    asked, saved = [], [20]

    def back():
        asked.append(1)
        if len(asked) == 3:
            saved.append(40)
        return "abcd"

    group = Ends(LOST, until_told, End(0), absent=["cd", ""], back=back)
    assert restarts.keep_running(group.group, plan_of(lambda: max(saved)), 1, 1) == 0
    assert [places for places, _ in group.started] == ["abcd", "a", "abcd"]
    assert len(asked) == 3  # until there was a checkpoint
    said = capsys.readouterr().err
    assert "4 of 4 processes can run again: the run saves\n" in said
    assert said.endswith("the run goes on with 4 of 4 processes\n")


@pytest.mark.parametrize(("back", "least"), [("ab", 1), ("abc", 1), ("abcd", None)])
def test_nobody_is_told_to_end_where_no_more_could_run(monkeypatch, back, least):
    monkeypatch.setattr(restarts, "_PAUSE", 0.02)
    asked, saved = [], [20]

    def a_while(is_wanted):
        saved.append(40)
        until(lambda: not least or len(asked) >= 3, 30)  # 8 sequences have no 3 replicas
        assert not is_wanted()
        return End(0)

    absent, ask = ["cd"] if least else [], lambda: asked.append(1) or back
    group = Ends(End(137, (3,)), a_while, absent=absent, back=ask)
    assert restarts.keep_running(group.group, plan_of(lambda: max(saved)), 1, least) == 0
    assert [places for places, _ in group.started] == ["abcd", "ab" if least else "abcd"]
    assert least or not asked


def test_hosts_are_asked_at_once_and_a_silent_one_is_not_waited_for(tmp_path):
    script = tmp_path / "ssh"
    script.write_text("#!/bin/sh\ncase $1 in gone) exit 255;; silent) exec sleep 60;; esac\n")
    script.chmod(0o755)
    places = ssh.places([ssh.Host("a", 2), ssh.Host("gone", 1), ssh.Host("silent", 1)])
    assert places == ["a", "a", "gone", "silent"]
    began = time.monotonic()
    assert ssh.answering(places, str(script), 1.0) == ["a", "a"]
    assert time.monotonic() - began < 10
    assert ssh.hosts_of(["a", "a", "b"]) == [ssh.Host("a", 2), ssh.Host("b", 1)]


def test_a_start_tells_all_once_when_more_are_wanted(tmp_path):
    body = "print('here', flush=True); input(); print('told', input()); sys.exit(85)"
    commands = [[sys.executable, "-c", f"import sys; {body}"]] * 2
    logs = [tmp_path / f"process_{number}.log" for number in range(2)]
    all_here = lambda: all(log.is_file() and "\nhere\n" in log.read_text() for log in logs)
    end = supervise.supervise(commands, tmp_path, 20.0, True, all_here)
    assert end == End(85, (), False)
    assert all(log.read_text().endswith("told TERM\n") for log in logs)


def rows_of(folder):
    return {row["step"]: row["loss"] for row in faults.metrics_of(folder)}


SSH = """#!/bin/sh
# What ssh does, on this machine, where one of two hosts is gone as long as a file is there.
host=$3; shift 3
[ "$host" = me@other ] && [ -e "$GONE" ] && exit 255
exec sh -c "$*"
"""


# The launcher, which asks the hosts that are gone more often than in a real run.
IMPATIENT = """
import runpy
from jaxcomp.launch import restarts

restarts._PAUSE = 1.0
runpy.run_module("train.launch", run_name="__main__", alter_sys=True)
"""


def test_a_host_that_comes_back_is_taken_in_as_if_that_had_been_the_schedule(tmp_path):
    values = dict(steps=120, step_seconds=0.1, checkpoint_every=10)
    config = faults.write_config(tmp_path, **values)
    stand_in, hosts, gone = (tmp_path / name for name in ("ssh", "hosts", "gone"))
    stand_in.write_text(SSH)
    stand_in.chmod(0o755)
    hosts.write_text("127.0.0.1\nme@other\n")
    command = [sys.executable, "-c", IMPATIENT, "--hosts", str(hosts), "--restarts", "1"]
    command += ["--min-replicas", "1", "--ssh", f"{stand_in} -o BatchMode=yes", "--coordinator"]
    command += [f"127.0.0.1:{free_port(29500, 29600)}", "--heartbeat-timeout", "10", "--"]
    settings = [str(config), "--log-every", "1"]
    env = environment(GONE=str(gone))
    out, saved = tmp_path / "out.txt", tmp_path / "run" / "checkpoints"
    with (
        out.open("wb") as output,
        subprocess.Popen(
            [*command, *settings], cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT
        ) as launcher,
    ):
        try:
            deadline = time.monotonic() + 300

            def until_running(condition):
                while not condition():
                    assert launcher.poll() is None and time.monotonic() < deadline, out.read_text()
                    time.sleep(0.02)

            until_running(lambda: files.latest(saved))
            gone.touch()
            os.kill(members(launcher)[1], signal.SIGKILL)
            until_running(lambda: "on 1 replicas instead of 2" in out.read_text())
            gone.unlink()
            assert launcher.wait(300) == 0, out.read_text()
        finally:
            launcher.kill()
    said = out.read_text()
    assert "the run goes on with 1 of 2 processes --replicas 1 --accumulate 2\n" in said
    assert "2 of 2 processes can run again: the run saves\n" in said
    lost = int(re.search(r"from step (\d+) on 1 replicas instead of 2", said)[1])
    back = int(re.search(r"from step (\d+) on 2 replicas instead of 1", said)[1])
    again = faults.write_config(tmp_path / "again", **values | {"step_seconds": 0.0})
    program = [sys.executable, "-m", "train", str(again), "--log-every", "1"]
    fewer = ["--replicas", "1", "--accumulate", "2"]
    for more in (["--steps", str(lost)], [*fewer, "--steps", str(back)], []):
        done = run([*program, *more], cwd=ROOT, env=env)
        assert done.returncode == 0, done.stdout
    losses, expected = rows_of(tmp_path / "run"), rows_of(tmp_path / "again" / "run")
    assert list(losses) == list(range(121)) and 10 <= lost < back < 120
    assert losses == expected
