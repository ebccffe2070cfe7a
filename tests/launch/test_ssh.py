"""Processes on hosts of a file: what ssh is told to start there, and two that start."""

import json
import os
import subprocess
import sys

import pytest

from jaxcomp.launch import options, ssh, supervise
from jaxcomp.launch.distributed import Timeouts
from tests.helpers.launching import environment, free_port, run


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


SHOW = """print(json.dumps({"args": sys.argv[1:], "cwd": os.getcwd(),
"flags": os.environ["XLA_FLAGS"], "platforms": os.environ["JAX_PLATFORMS"]}))"""


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


SSH = """#!/bin/sh
# What ssh does, on this machine: a shell runs what follows the host.
host=$3; shift 3
printf '%s\\n' "$host" >> "$RECORD"
exec env -i PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" sh -c "$*"
"""


FOUND = """
import json, os
names = {names}
found = {{name: os.environ.get(name) for name in names}}
listed = open("/proc/self/cmdline").read()
with open(f"found_{{os.getpid()}}", "w") as file:
    json.dump([found, listed], file)
"""


# A run over ssh: test_a_host_that_comes_back_is_taken_in_as_if_that_had_been_the_schedule.
def test_hosts_of_a_file_start_over_ssh_with_the_variables_that_are_theirs(tmp_path):
    stand_in = tmp_path / "ssh"
    stand_in.write_text(SSH)
    stand_in.chmod(0o755)
    hosts, record = tmp_path / "hosts", tmp_path / "record"
    hosts.write_text("127.0.0.1  # the first\nme@other\n")
    flags = ["--hosts", str(hosts), "--ssh", f"{stand_in} -o BatchMode=yes"]
    flags += ["--coordinator", f"127.0.0.1:{free_port(29500, 29600)}"]
    names = ["WANDB_MODE", "HF_TOKEN", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"]
    names += ["MINE", "MY_PASSWORD", "EMPTY"]
    (tmp_path / "found.py").write_text(FOUND.format(names=names + ["NOT"]))
    theirs = ["line one\nand two", "it's $ecret", "/opt/my lib", "2,3", "a=b", "p w", ""]
    values = dict(zip(names, theirs, strict=True))
    flags += ["--env", "MINE=a=b", "--env", "MY_PASSWORD", "--env", "EMPTY="]
    here = {name: values[name] for name in names if name not in ("MINE", "EMPTY")}
    done = run(
        [sys.executable, "-m", "jaxcomp.launch", *flags, "--", "python", "found.py"],
        cwd=tmp_path,
        env=environment(RECORD=str(record), NOT="passed", **here),
    )
    assert done.returncode == 0, done.stdout
    assert sorted(record.read_text().splitlines()) == ["127.0.0.1", "me@other"]
    found = [json.loads(path.read_text()) for path in tmp_path.glob("found_*")]
    assert [each for each, _ in found] == [values | {"NOT": None}] * 2
    assert all("--obey-stdin" in listed and "ecret" not in listed for _, listed in found)
