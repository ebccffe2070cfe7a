"""The launcher's command: each process gets its place, and what is wrong gets one message."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from jaxcomp.launch import __main__ as launch
from jaxcomp.launch import distributed, local, options, place, ssh
from jaxcomp.launch.distributed import Cluster, Timeouts
from tests.helpers.launching import ROOT, environment, listening, members, until, write_config
from train.launch.program import TRAIN


def test_local_processes_use_the_loopback_interface_only():
    commands = local.commands([0, 1, 2], None, Timeouts(), ["c.py"])
    parsed = [options.parser().parse_args(command[4:-2]) for command in commands]
    assert {found.interface for found in parsed} == {"lo"}
    assert len({found.coordinator for found in parsed}) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+", parsed[0].coordinator)
    assert [found.process_id for found in parsed] == [0, 1, 2]
    assert [found.local_id for found in parsed] == [0, 1, 2]


def test_an_order_to_end_that_came_before_the_start_is_no_traceback(monkeypatch, capsys):
    def obey():
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxcomp.launch.control.obey", obey)
    with pytest.raises(SystemExit) as end:
        launch.main(["--obey-stdin", "--single", "--", "python", "-c", "pass"])
    assert (end.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_accelerators_are_divided_among_the_processes_of_each_host():
    of = lambda command: options.parser().parse_args(command[4:-2]).local_devices
    commands = local.commands([0, 2], None, Timeouts(), ["c.py"], [[4, 5], [6], [7]])
    assert [of(command) for command in commands] == [[4, 5], [7]]
    assert [of(command) for command in local.commands([0], None, Timeouts(), ["c.py"])] == [None]
    shares = {"a": [[0, 1]], "b": [[0], [1]]}
    commands = ssh.commands(
        *([ssh.Host("a", 1), ssh.Host("b", 2)], None, None, Timeouts(), ["c.py"]),
        **dict(ssh="ssh", python="python", folder="/", environ={}, devices=shares),
    )
    found = [re.search(r"--local-devices (\S+) -- c.py", remote)[1] for *_, remote in commands]
    assert found == ["0,1", "0", "1"]


@pytest.fixture
def no_scheduler(monkeypatch):
    """An environment that no scheduler has touched."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "JOB_COMPLETION")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--local 2", "no config file; write python -m train.launch"),
        ("-- c.py", "it is unknown which process.*--local N.*--hosts FILE.*--single"),
        ("--process-id 1 -- c.py", "write --coordinator, --num-processes as well"),
        ("--local 2 --secret-file x -- c.py", "--secret-file is for one process"),
        ("--secret-file nowhere -- c.py", "No such file.*nowhere"),
        ("--secret-file /dev/null -- c.py", "/dev/null has 0 characters, and needs 16"),
        ("--local 2 --coordinator a:1 -- c.py", "leave out --coordinator"),
        ("--local 2 -- c.py", "'c.py' is no config file"),
        (
            "--hosts nowhere -- configs/nano_dense.py",
            "'nowhere' cannot be read .No such file.*write",
        ),
        ("--hosts node1:4,node2:4 -- configs/nano_dense.py", "write the name of a text file with"),
        ("--local 2 c.py --steps 3", "write python -m train.launch --local 2 -- c.py --steps 3"),
        ("c.py", "no -- before the config file 'c.py'"),
        ("--local 2 --steps 3 -- c.py", "--steps 3 before -- is unknown to the launcher"),
        ("--local 2 --env 1A=b -- configs/nano_dense.py", "'1A' is no name of a variable"),
        ("--local 2 --env NOT_SET -- configs/nano_dense.py", "it is not set here; write --env"),
        ("--env A=b -- configs/nano_dense.py", "--env is for --local and --hosts"),
        ("--local 2 --local-devices 0,1,2 -- configs/nano_dense.py", "names 3 accelerators for 2"),
        ("--local 2 --local-devices 0,0 -- configs/nano_dense.py", "'0,0' names a number twice"),
        ("--coordinator a --num-processes 2 --process-id 0 -- c.py", "needs a host and a port"),
        ("--coordinator a:1 --num-processes 2 --process-id 2 -- c.py", r"in \[0, 2\)"),
        ("--local 2 --hosts x -- c.py", "not allowed with argument --local"),
        ("--local none -- c.py", "'none' must be a number, 1 or more"),
        ("--local-devices 0,x -- c.py", "'x' must be a number, 0 or more"),
    ],
)
def test_a_wrong_command_gets_one_message(args, message, no_scheduler, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NPROC", os.environ.get("NPROC", "32"))
    with pytest.raises(SystemExit) as end:
        launch.main(shlex.split(args), TRAIN)
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--local 2", "no program; write python -m jaxcomp.launch .options. -- PROGRAM"),
        ("--local 2 python a.py", "write python -m jaxcomp.launch --local 2 -- python a.py"),
        ("--local 2 --steps 3 -- python a.py", "its arguments come after PROGRAM"),
        ("--local 2 --min-replicas 1 -- python a.py", "--min-replicas needs --restarts"),
        ("--single -- python nowhere.py", "there is no program 'nowhere.py' in"),
        ("--single -- python -m nowhere.x", "there is no module 'nowhere.x' in .*, nor installed"),
        ("--single -- ./nowhere", "'./nowhere' cannot be started: No such file or directory.$"),
        ("--single -- a.py --x 'b c'", "'a.py' cannot be .*; write python a.py --x 'b c'.$"),
    ],
)
def test_a_wrong_command_of_any_program_gets_one_message(args, message, no_scheduler, capsys):
    with pytest.raises(SystemExit) as end:
        launch.main(shlex.split(args))
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_flags_reach_connect_and_the_rest_the_program(no_scheduler, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(distributed, "connect", lambda *args: calls.append(args))
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "c.py").write_text(
        "import json, pathlib, sys\nfrom jaxcomp import launch\n"
        "assert __name__ == '__main__' and sys.path[0] == str(pathlib.Path(__file__).parent)\n"
        "told = json.dumps([launch.connect(), sys.argv])\n"
        "pathlib.Path(__file__).with_name('told').write_text(told)"
    )
    flags = "--local-count 2 --coordinator a:1 --num-processes 2 --process-id 1 --interface eth1 "
    (tmp_path / "secret").write_text("of sixteen bytes\n")
    flags += f"--secret-file {tmp_path / 'secret'} "
    flags += "--start-timeout 5 --heartbeat-timeout 6 --local-devices 2,3 -- python -u "
    launch.main(shlex.split(f"{flags} {tmp_path / 'c.py'} --steps 4"))
    cluster = Cluster("a:1", 2, 1, "flags", local_count=2)
    assert os.environ["NPROC"] == "4"
    assert calls == [(cluster, "eth1", Timeouts(5, 6), [2, 3], b"of sixteen bytes")]
    told = json.loads((tmp_path / "told").read_text())
    assert told == [2, [str(tmp_path / "c.py"), "--steps", "4"]]


def test_single_ignores_half_a_scheduler(monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    script = tmp_path / "c.sh"
    script.write_text("echo $JAX_NUM_PROCESSES $JAX_PROCESS_ID $* > told\nexit 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        launch.main(["--single", "--", "sh", "c.sh", "a word"])
    assert end.value.code == 3 and (tmp_path / "told").read_text() == "1 0 a word\n"


def test_a_place_is_found_by_a_program_that_runs_below_the_launcher_s_process():
    own = place.Place(Cluster("a:1", 2, 1, "flags"), "eth1", Timeouts(5, 6), [2, 3], b"a secret")
    found = place.environ(own)
    assert place.from_environ(found) == own and place.from_environ({}) is None
    assert found["JAX_COORDINATOR_ADDRESS"] == "a:1" and found["JAX_LOCAL_DEVICE_IDS"] == "2,3"
    assert (found["JAX_NUM_PROCESSES"], found["JAX_PROCESS_ID"]) == ("2", "1")


def test_local_processes_train_listen_on_loopback_only_and_stop_together(tmp_path):
    config = write_config(tmp_path)
    command = [sys.executable, "-m", "train.launch", "--local", "2", "--", str(config)]
    output = open(tmp_path / "out.txt", "wb")
    rows = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    with (
        output,
        subprocess.Popen(
            [*command, "--steps", "100000", "--optimizer.schedule", "constant"],
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as launcher,
    ):
        try:
            until(lambda: rows.exists() and rows.read_text().count("\n") > 2, 240)
            pids = members(launcher)
            heard = [listening(pid) for pid in pids]
            # gloo's, and in the first process the coordinator's.
            assert len(pids) == 2 and len(heard[0]) > len(heard[1]) >= 1
            assert all(address.is_loopback for addresses in heard for address in addresses)
            for number in (signal.SIGINT, signal.SIGTERM):
                launcher.send_signal(number)
            assert launcher.wait(120) == 0
        finally:
            launcher.kill()
    said = (tmp_path / "out.txt").read_text()
    assert f"logs: {tmp_path}/runs/tiny/logs/process_*.log" in said
    assert "process 0 of 2 (flags); coordinator 127.0.0.1:" in said
    ends = re.findall(r"stopped at step (\d+)", said)
    log = (tmp_path / "runs" / "tiny" / "logs" / "process_1.log").read_text()
    assert "Traceback" not in said + log
    assert len(ends) == 1 and f"stopped at step {ends[0]}" in log
    assert (tmp_path / "runs" / "tiny" / "checkpoints" / ends[0]).is_dir()
