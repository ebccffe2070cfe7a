"""The ready scripts under a real Open MPI; and SLURM, MPICH and sshd, where a machine has them.

On Debian: apt-get install slurmctld slurmd slurm-client munge openmpi-bin mpich openssh-server
"""

import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import pytest

from tests.helpers.launching import ROOT, environment, free_port, run, until

PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"  # where daemons are
HOST = socket.gethostname().partition(".")[0]
SCRIPTS = ROOT / "jaxcomp" / "launch"
# Process 1 ends as the word says, if there is one; the other one would go on.
PROGRAM = """
import os, sys, time
from jaxcomp import launch

def main():
    sys.stdout.write(f"one of {launch.connect()}\\n")
    with launch.stop_signals() as asked, launch.watch(seconds=60) as watch:
        for number in range(1000 if sys.argv[1:] else 3):
            watch.at(number, "a step")
            if watch.stop(number, asked()):
                raise launch.Drained(f"stopped at step {number}")
            if number == 2 and not launch.is_first():
                if sys.argv[1:] == ["mistake"]:
                    raise ValueError("no space is left; free some")
                if sys.argv[1:] == ["kill"]:
                    os.kill(os.getpid(), 9)
            time.sleep(0.05)

launch.finish(main)
"""


def needs(*programs):
    """Skips a test where a program is missing."""
    absent = ", ".join(name for name in programs if not shutil.which(name, path=PATH))
    return pytest.mark.skipif(bool(absent), reason=f"needs {absent}")


@pytest.fixture
def program(tmp_path):
    """The command of a program that connects."""
    (tmp_path / "script.py").write_text(PROGRAM)
    return ["--", "python", str(tmp_path / "script.py")]


SLURM = """
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=5
NodeName=DEFAULT CPUs=8 RealMemory=1000 Gres=gpu:1
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={host}2 NodeAddr=127.0.0.2 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment of a cluster of two nodes, each with /dev/null for a GPU."""
    folder = tmp_path_factory.mktemp("slurm")
    user = subprocess.check_output(["id", "-un"], text=True).strip()
    ports = [free_port(20_000 + 100 * number, 20_099 + 100 * number) for number in range(3)]
    facts = {"folder": folder, "user": user, "ports": ports, "host": HOST}
    (folder / "slurm.conf").write_text(SLURM.format(**facts))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # no cgroup is used
    for name in ("state", HOST, f"{HOST}2"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    more = {"SLURM_CONF": str(folder / "slurm.conf"), "SBATCH_TIMELIMIT": "5"}
    environ = environment(PATH=PATH, PYTHON=sys.executable, **more)
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    options = [f"--{option}={folder}/munge.{file}" for option, file in files.items()]
    seed = f"--seed-file={folder}/munge.seed"
    daemons = [
        ["munged", "--foreground", "--force", seed, *options],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", node] for node in (HOST, f"{HOST}2")),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environ}
    started = []
    try:
        for command in daemons:
            started.append(subprocess.Popen(command, **quiet))
            if command[0] == "munged":
                until((folder / "munge.socket").exists)
        ask = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        until(lambda: run(ask, env=environ).stdout.strip() == "2")
        yield environ
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(30)


def submitted(environ, folder: pathlib.Path, *arguments: str) -> tuple[dict[str, str], str]:
    """A job of slurm.sbatch, once it has ended or is in the queue again; its fields and log."""
    command = ["sbatch", "--parsable", str(SCRIPTS / "slurm.sbatch"), *arguments]
    job = run(command, env=environ, cwd=folder).stdout.strip()
    show = ["scontrol", "-o", "show", "job", job]

    def fields():
        return dict(re.findall(r"(\w+)=(\S+)", run(show, env=environ).stdout))

    def is_over():
        state, restarts = (fields()[name] for name in ("JobState", "Restarts"))
        return state in ("COMPLETED", "FAILED") or (state == "PENDING" and restarts != "0")

    until(is_over, 120)
    found = fields()
    run(["scancel", job], env=environ)
    return found, (folder / f"jaxcomp-{job}.log").read_text()


@needs("munged", "slurmctld", "slurmd", "sbatch")
@pytest.mark.parametrize(
    ("words", "end"),
    [
        ([], ["COMPLETED", "0:0", "0"]),
        (["mistake"], ["FAILED", "2:0", "0"]),
        (["kill"], ["PENDING", "0:0", "1"]),
    ],
)
def test_slurm_starts_and_requeues(slurm, tmp_path, program, words, end):
    job, log = submitted(slurm, tmp_path, *program, *words)
    assert [job[name] for name in ("JobState", "ExitCode", "Restarts")] == end, log
    for task in "01":
        assert f"{task}: process {task} of 2 (SLURM); coordinator {HOST}:6" in log
        assert f"{task}: one of 2\n" in log
    assert not list(tmp_path.glob(".jaxcomp*"))


MPIRUN = {  # and by what name its processes call it
    pathlib.Path(sys.executable).with_name("mpirun"): "Open MPI",  # 5, of the extra test
    "mpirun.openmpi": "Open MPI",  # 4
    "mpirun.mpich": "MPICH or Intel MPI",
}


@pytest.mark.parametrize(
    ("mpirun", "name"),
    [
        pytest.param(*pair, id=pathlib.Path(pair[0]).name, marks=needs(str(pair[0])))
        for pair in MPIRUN.items()
    ],
)
def test_mpirun_starts(program, mpirun, name):
    as_root = {f"{start}_ALLOW_RUN_AS_ROOT": "1" for start in ("OMPI", "PRTE")}
    as_root |= {f"{variable}_CONFIRM": "1" for variable in as_root}
    environ = environment(MPIRUN=f"{mpirun} -np 2", PYTHON=sys.executable, **as_root)
    script = ["bash", str(SCRIPTS / "mpirun.sh")]
    port = free_port(29500, 29600)
    done = run([*script, "--coordinator", f"127.0.0.1:{port}", *program], env=environ)
    assert done.returncode == 0, done.stdout
    for rank in "01":
        assert f"process {rank} of 2 ({name}); coordinator 127.0.0.1:{port}" in done.stdout
    assert done.stdout.count("one of 2\n") == 2
    done = run([*script, *program], env=environ)
    if mpirun == "mpirun.openmpi":  # it says where it runs
        assert done.returncode == 0, done.stdout
    else:
        assert done.returncode != 0
        assert f"{name} does not say where process 0 runs" in done.stdout


SSHD = """
ListenAddress 127.0.0.1
Port {port}
PidFile {folder}/pid
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
"""
SSH = (
    "ssh -F none -i {folder}/key -p {port} -o StrictHostKeyChecking=no "
    "-o UserKnownHostsFile={folder}/known"
)


@needs("sshd", "ssh", "ssh-keygen")
def test_a_real_sshd_starts(tmp_path, program):
    for name in ("host", "key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)])
    port, config = free_port(22_000, 22_100), tmp_path / "config"
    config.write_text(SSHD.format(folder=tmp_path, port=port))
    (tmp_path / "hosts").write_text("127.0.0.1\nlocalhost\n")
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's leaves its rights
    with subprocess.Popen([shutil.which("sshd", path=PATH), "-D", "-f", str(config)]) as server:
        try:
            until((tmp_path / "pid").exists)
            launch = [sys.executable, "-m", "jaxcomp.launch", "--hosts", "hosts"]
            launch += ["--ssh", SSH.format(folder=tmp_path, port=port)]
            launch += [
                "--coordinator",
                f"127.0.0.1:{free_port(29500, 29600)}",
                "--env",
                "PYTHONPATH",
            ]
            done = run([*launch, *program], cwd=tmp_path, env=environment())
        finally:
            server.terminate()
    assert done.returncode == 0, done.stdout
    logs = [path.read_text() for path in sorted((tmp_path / "logs").glob("process_*.log"))]
    assert ["one of 2\n" in log for log in logs] == [True, True]
