"""Launchers: all processes start, end together, and say who failed; nothing is left behind."""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from jaxcomp.launch import __main__ as launch
from jaxcomp.launch import distributed, local, options, place, ssh, supervise
from jaxcomp.launch.distributed import Cluster, Timeouts
from tests.helpers.launching import ROOT, environment, free_port, listening, run, write_config
from train.launch.__main__ import TRAIN

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


def until(condition, seconds=60.0):
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.05)


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
    assert "process 2 failed first, with signal SIGKILL" in capfd.readouterr().err


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


def test_a_stop_is_obeyed_in_a_run_that_would_start_again(tmp_path, monkeypatch):
    start = supervise._start

    def interrupted(command, log, secret):
        os.kill(os.getpid(), signal.SIGTERM)
        return start(command, log, secret)

    monkeypatch.setattr(supervise, "_start", interrupted)
    bodies = ["while not told: time.sleep(0.01)\ntime.sleep(1)\nprint('saved')", LOST]
    found = supervise.supervise([member(body) for body in bodies], tmp_path, 20.0, hurry=True)
    assert found.signalled and (tmp_path / "process_0.log").read_text().endswith("saved\n")


@pytest.fixture
def launcher(tmp_path):
    """A launcher of two members in a process of its own, when both are there."""
    program = (
        "import pathlib, sys; from jaxcomp.launch import supervise\n"
        f"commands = [{member(WAITS)!r}] * 2\n"
        f"sys.exit(supervise.supervise(commands, pathlib.Path({str(tmp_path)!r}), 10.0).status)"
    )
    logs = [tmp_path / f"process_{number}.log" for number in range(2)]
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    until(lambda: all(log.exists() and log.read_text().endswith("\nhere\n") for log in logs))
    yield process, logs
    process.kill()
    process.wait()


def test_members_go_on_when_nobody_reads_the_launcher(tmp_path):
    body = (
        "import pathlib, sys, time\n"
        "for i in range(20): print(i, flush=True); time.sleep(0.1)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'saved').write_text('all')"
    )
    program = (
        "import pathlib, sys; from jaxcomp.launch import supervise\n"
        f"commands = [{member(body)!r}]\n"
        f"sys.exit(supervise.supervise(commands, pathlib.Path({str(tmp_path)!r}), 10.0).status)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 0
    assert (tmp_path / "saved").read_text() == "all"


def test_a_signal_to_the_launcher_reaches_each_process_once(launcher):
    process, logs = launcher
    # As a terminal does that is closed: to the launcher's whole group.
    os.killpg(process.pid, signal.SIGHUP)
    assert process.wait(30) == 0
    for log in logs:
        assert log.read_text().endswith("here\nHUP\n")


def test_processes_of_a_launcher_under_nohup_hear_what_it_ignores(tmp_path):
    body = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)\n"
    body += "print(*(signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGUSR1)))"
    program = (
        "import pathlib, signal, sys; from jaxcomp.launch import supervise\n"
        f"end = supervise.supervise([[sys.executable, '-c', {body!r}]], "
        f"pathlib.Path({str(tmp_path)!r}), 10.0)\n"
        "print(end.status, end.signalled, signal.getsignal(signal.SIGHUP).name)"
    )
    shell = f"trap '' HUP USR1; exec {shlex.join([sys.executable, '-c', program])}"
    done = run(["sh", "-c", shell], cwd=ROOT)
    assert done.stdout.endswith("\nSIG_DFL SIG_DFL\n0 False SIG_IGN\n"), done.stdout


def test_a_signal_while_processes_start_reaches_those_that_start_later(tmp_path, monkeypatch):
    start = supervise._start

    def interrupted(command, log, secret):
        if log.name == "process_1.log":
            os.kill(os.getpid(), signal.SIGINT)
        return start(command, log, secret)

    monkeypatch.setattr(supervise, "_start", interrupted)
    assert supervise.supervise([member(WAITS)] * 3, tmp_path, 10.0).status == 0
    for number in range(3):
        assert (tmp_path / f"process_{number}.log").read_text().endswith("here\nINT\n")


def test_processes_end_when_the_launcher_is_killed(launcher):
    process, logs = launcher
    process.kill()
    process.wait()
    until(lambda: all(log.read_text().endswith("here\nTERM\n") for log in logs), 20)


def test_who_was_told_to_stop_hears_no_more_when_the_launcher_goes():
    command = member("time.sleep(1); print(*told, flush=True)")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"secret\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdin.write(b"INT\n")
        process.stdin.close()
        assert process.stdout.read() == b"INT\n"


def test_a_hosts_file_is_read():
    text = "# two hosts\nnode1\n\nme@10.0.0.2 slots=2  # with two\nfe80::1\nme@::1 slots=2"
    assert ssh.read_hosts(text) == [
        ssh.Host("node1", 1),
        ssh.Host("me@10.0.0.2", 2),
        ssh.Host("fe80::1", 1),
        ssh.Host("me@::1", 2),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("node1\n-oProxyCommand=x", "line 2: '-oProxyCommand=x'; write"),
        ("node1 slots=0", "line 1"),
        ("node1 node2", "line 1"),
        ("node1; reboot", "line 1"),
        ("node1\nnode1", "line 2: node1 is there already; write slots=K"),
        ("h1\n\nbob@H1", "line 3: bob@H1 is there already"),
        ("h1\nnode1:4", "line 2: 'node1:4' is neither.*write 'node1 slots=4' to start 4 processes"),
        ("me@10.0.0.1:2222", "write 'me@10.0.0.1 slots=2222'.*or 'me@10.0.0.1' alone and --ssh"),
        ("node1:", "write 'node1 slots=K'"),
        ("[::1]:22", "line 1: .*an IPv6 address without brackets"),
        ("node1 slots=4 max_slots=8", "line 1: 'node1 slots=4 max_slots=8'; write"),
        ("h1 slots=4097", "line 1: slots=4097 is more than 4096"),
    ],
)
def test_a_wrong_hosts_file_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        ssh.read_hosts(text)


def test_logs_are_their_users_and_hold_no_values_of_forwarded_variables(tmp_path, monkeypatch):
    secrets = {"NCCL_NOTE": "it's $ecret", "JAX_NAME": "plain", "WANDB_API_KEY": "for nobody"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    fields = dict(ssh="true", python="python", folder="/", environ=os.environ)
    made = ssh.commands([ssh.Host("h", 1)], None, None, Timeouts(), ["a.py"], **fields)
    assert supervise.supervise(made, tmp_path, 1.0).status == 0
    log = tmp_path / "process_0.log"
    text = log.read_text()
    assert "NCCL_NOTE=... " in text and "JAX_NAME=... " in text and "a.py" in text
    assert not any(word in text for word in ("ecret", "plain", "nobody"))
    assert "nobody" not in str(made)  # nor a process list
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path):
    (tmp_path / "process_0.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        supervise.supervise([["true"]], tmp_path, 1.0)
    assert not (tmp_path / "elsewhere").exists()


def test_remote_commands_survive_the_shell(tmp_path):
    """What a shell on the host makes of them is what was meant."""
    folder = tmp_path / "it's a $HOME folder"
    folder.mkdir()
    python = tmp_path / "my python"
    python.write_text(f"#!{sys.executable}\nimport json, os, sys\n{SHOW}")
    python.chmod(0o755)
    args = ["configs/a b.py", "--x", 'it\'s $HOME; `id` "q" \\ *', ""]
    commands = ssh.commands(
        [ssh.Host("me@a", 1), ssh.Host("b", 2)],
        None,
        "eth1",
        Timeouts(7, 9),
        args,
        ssh="ssh -o 'ProxyCommand=nc %h'",
        python=str(python),
        folder=str(folder),
        environ={"XLA_FLAGS": "--a --b='c d'", "PATH": "/x", "JAX_PLATFORMS": "cpu"},
    )
    assert [command[:4] for command in commands] == [
        ["ssh", "-o", "ProxyCommand=nc %h", host] for host in ("me@a", "b", "b")
    ]
    for number, (*_, remote) in enumerate(commands):
        shown = json.loads(subprocess.check_output(["sh", "-c", remote], text=True))
        assert shown["cwd"] == str(folder)
        assert shown["flags"] == "--a --b='c d'" and shown["platforms"] == "cpu"
        assert shown["args"][:3] == ["-u", "-m", "jaxcomp.launch"]
        flags, theirs = shown["args"][3:-5], shown["args"][-5:]
        assert theirs == ["--", *args]
        found = options.parser().parse_args(flags)
        assert found.coordinator == f"a:{ssh.PORT}" and found.num_processes == 3
        assert (found.process_id, found.local_id) == (number, max(0, number - 1))
        assert found.local_count == (1 if number == 0 else 2)
        assert found.interface == "eth1" and found.obey_stdin
        assert (found.start_timeout, found.heartbeat_timeout) == (7, 9)


SHOW = """print(json.dumps({"args": sys.argv[1:], "cwd": os.getcwd(),
"flags": os.environ["XLA_FLAGS"], "platforms": os.environ["JAX_PLATFORMS"]}))"""


def test_local_processes_use_the_loopback_interface_only():
    commands = local.commands([0, 1, 2], None, Timeouts(), ["c.py"])
    parsed = [options.parser().parse_args(command[4:-2]) for command in commands]
    assert {found.interface for found in parsed} == {"lo"}
    assert len({found.coordinator for found in parsed}) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+", parsed[0].coordinator)
    assert [found.process_id for found in parsed] == [0, 1, 2]
    assert [found.local_id for found in parsed] == [0, 1, 2]


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
    monkeypatch.delitem(sys.modules, "train.__main__", raising=False)  # runpy would warn of it
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
        ("--single -- ./nowhere", "'./nowhere' cannot be started: No such file"),
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
            children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
            pids = children.read_text().split()
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


SSH = """#!/bin/sh
# What ssh does, on this machine: a shell runs what follows the host.
host=$3; shift 3
printf '%s\\n' "$host" >> "$RECORD"
exec env -i PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" sh -c "$*"
"""


def test_hosts_of_a_file_train_over_ssh(tmp_path):
    stand_in = tmp_path / "ssh"
    stand_in.write_text(SSH)
    stand_in.chmod(0o755)
    hosts, record = tmp_path / "hosts", tmp_path / "record"
    hosts.write_text("127.0.0.1  # the first\nme@other\n")
    flags = ["--hosts", str(hosts), "--ssh", f"{stand_in} -o BatchMode=yes"]
    flags += ["--coordinator", f"127.0.0.1:{free_port(29500, 29600)}"]
    config = write_config(tmp_path)
    names = ["WANDB_MODE", "HF_TOKEN", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"]
    names += ["MINE", "MY_PASSWORD", "EMPTY"]
    config.write_text(
        f"import json, os, sys\nnames = {names + ['NOT']}\n"
        "found = {name: os.environ.get(name) for name in names}\n"
        "listed = open('/proc/self/cmdline').read()\n"
        f"with open({str(tmp_path)!r} + f'/found_{{os.getpid()}}', 'w') as file:\n"
        "    json.dump([found, listed, sys.argv], file)\n" + config.read_text()
    )
    theirs = ["line one\nand two", "it's $ecret", "/opt/my lib", "2,3", "a=b", "p w", ""]
    values = dict(zip(names, theirs, strict=True))
    flags += ["--env", "MINE=a=b", "--env", "MY_PASSWORD", "--env", "EMPTY="]
    here = {name: values[name] for name in names if name not in ("MINE", "EMPTY")}
    done = run(
        [sys.executable, "-m", "train.launch", *flags, "--", str(config)],
        env=environment(RECORD=str(record), NOT="passed", **here),
    )
    assert done.returncode == 0, done.stdout
    assert "step 2, validation loss" in done.stdout
    assert sorted(record.read_text().splitlines()) == ["127.0.0.1", "me@other"]
    found = [json.loads(path.read_text()) for path in tmp_path.glob("found_*")]
    reached = [each for each, listed, _ in found if "--obey-stdin" in listed]
    assert reached == [values | {"NOT": None}] * 2
    assert "ecret" not in str([listed for _, listed, _ in found])
    log = (tmp_path / "runs" / "tiny" / "logs" / "process_1.log").read_text()
    assert "process 1 of 2 (flags)" in log and "Traceback" not in log
