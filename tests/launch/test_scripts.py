"""The ready scripts, as far as a machine without the schedulers can tell."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from jaxcomp.launch import detect, options
from jaxcomp.launch.distributed import Cluster
from jaxcomp.launch.exits import Exit, may_restart
from tests.helpers.launching import ROOT, environment, free_port, run

SCRIPTS = ROOT / "jaxcomp" / "launch"
PROGRAM = """
import sys
from jaxcomp import launch
sys.stdout.write(f"one of {launch.connect()}\\n")  # at once: two ranks write into one pipe
"""

SRUN = """#!/bin/bash
# What srun does for two tasks on this host: its variables, a label, the largest status.
set -o pipefail
status=0 each=0
while [[ $1 == --* ]]; do echo "srun option $1"; shift; done
export SLURM_STEP_NODELIST=127.0.0.1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2
export SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2
for i in 0 1; do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" 2>&1 | sed -u "s/^/$i: /" & pids+=($!)
done
for pid in "${pids[@]}"; do wait $pid || each=$?; ((status = each > status ? each : status)); done
exit $status
"""

MPIRUN = """#!/bin/bash
# What mpirun of Open MPI 4 does for -np 2 on this host.
echo "mpirun options $*"
while [[ $1 == -* ]]; do [[ $1 == --bind-to || $1 == -np ]] && shift; shift; done
export OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2
export OMPI_MCA_orte_hnp_uri="$((JOB * 4096)).0;tcp://127.0.0.1,192.0.2.2:34911"
for i in 0 1; do
    OMPI_COMM_WORLD_RANK=$i OMPI_COMM_WORLD_LOCAL_RANK=$i "$@" & pids+=($!)
done
for pid in "${pids[@]}"; do wait $pid || status=$?; done
exit ${status:-0}
"""


# Imports nothing, then ends by a status in task 1, and by SIGTERM's in task 0.
STATUSES = """#!/bin/bash
[[ $1 != -c ]] || exit 0
exit $((SLURM_PROCID == 1 ? {} : 143))
"""
SCONTROL = '#!/bin/bash\necho "scontrol $*"\n'


@pytest.fixture
def stand_in(tmp_path):
    """Puts a program on the PATH of the environment that it returns."""

    def put(name, text, **more):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        return environment(PATH=path, PYTHON=sys.executable, **more)

    return put


@pytest.fixture
def command(tmp_path):
    """Of a program that connects."""
    (tmp_path / "script.py").write_text(PROGRAM)
    return ["--", "python", str(tmp_path / "script.py")]


def job_number():
    """A number of a job whose port is free on this machine."""
    return free_port(61440, 65535) - 61440


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpirun.sh"])
def test_scripts_are_valid_bash_that_stops_at_errors(name):
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
    assert "\nset -euo pipefail\n" in (SCRIPTS / name).read_text()


def test_the_slurm_script_connects_all_tasks(tmp_path, stand_in, command):
    environ = stand_in("srun", SRUN, SLURM_JOB_ID=str(4096 + job_number()), SLURM_CPUS_PER_TASK="3")
    script = ["bash", str(SCRIPTS / "slurm.sbatch"), "--start-timeout", "90"]
    done = run([*script, *command], env=environ | {"SLURM_SUBMIT_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stdout
    assert "srun option --kill-on-bad-exit=1" in done.stdout
    for task in "01":
        assert f"{task}: process {task} of 2 (SLURM); coordinator 127.0.0.1:6" in done.stdout
        assert f"{task}: one of 2\n" in done.stdout
    assert "Traceback" not in done.stdout and "no --secret-file" not in done.stdout
    assert not list(tmp_path.glob(".jaxcomp*"))


def test_the_slurm_script_asks_for_what_its_comments_say():
    text = (SCRIPTS / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert options.keys() == {
        *("job-name", "output", "time", "nodes", "cpus-per-task", "ntasks-per-node"),
        *("gres", "signal", "open-mode"),
    }
    assert "\n#SBATCH --requeue\n" in text
    assert options["signal"] == "TERM@120"  # without B: to the tasks, not to this script
    assert "export SRUN_CPUS_PER_TASK=" in text


@pytest.mark.parametrize("status", [*Exit, 7])
@pytest.mark.parametrize("restarts", [0, 10])
def test_the_slurm_script_requeues_what_a_machine_may_restart(tmp_path, stand_in, status, restarts):
    environ = stand_in("srun", f"#!/bin/bash\nexit {int(status)}\n", SLURM_JOB_ID="71")
    stand_in("scontrol", SCONTROL)
    environ |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": str(restarts)}
    environ["PYTHON"] = "true"  # imports nothing
    done = run(["bash", str(SCRIPTS / "slurm.sbatch")], env=environ)
    assert done.returncode == status
    requeued = "scontrol requeue 71\n" in done.stdout
    assert requeued == (may_restart(status) and restarts < 10)


@pytest.mark.parametrize("status", [2, 130])
def test_a_mistake_of_one_task_is_the_slurm_scripts_status(tmp_path, stand_in, status):
    """srun tells of the other task alone, whose status is larger; a machine might restart it."""
    environ = stand_in("srun", SRUN, SLURM_JOB_ID="71")
    stand_in("scontrol", SCONTROL)
    environ |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PYTHON": "python_of_the_run"}
    stand_in("python_of_the_run", STATUSES.format(status))
    done = run(["bash", str(SCRIPTS / "slurm.sbatch")], env=environ)
    assert done.returncode == status, done.stdout
    assert "requeue" not in done.stdout
    assert not list(tmp_path.glob(".jaxcomp*"))


def test_the_slurm_script_needs_an_interpreter_with_jaxcomp(tmp_path, stand_in):
    environ = stand_in("srun", "#!/bin/bash\necho started\n", SLURM_JOB_ID="71")
    environ |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PYTHON": "false"}
    done = run(["bash", str(SCRIPTS / "slurm.sbatch")], env=environ)
    assert done.returncode == 2
    assert "false cannot import jaxcomp: activate" in done.stdout
    assert "started" not in done.stdout


def test_the_mpirun_script_names_the_whole_path_of_the_interpreter(stand_in):
    environ = stand_in("mpirun", '#!/bin/bash\necho "mpirun $*"\n')
    environ["PYTHON"] = "python3"
    done = run(["bash", str(SCRIPTS / "mpirun.sh")], env=environ)
    assert f"--bind-to none {shutil.which('python3')} -u" in done.stdout


def test_the_mpirun_script_connects_all_ranks(stand_in, command):
    environ = stand_in("mpirun", MPIRUN, JOB=str(job_number()), MPIRUN="mpirun -np 2")
    done = run(["bash", str(SCRIPTS / "mpirun.sh"), *command], env=environ)
    assert done.returncode == 0, done.stdout
    assert "mpirun options -np 2 --bind-to none" in done.stdout
    assert done.stdout.count("this run has no --secret-file") == 1
    for rank in "01":
        assert f"process {rank} of 2 (Open MPI); coordinator 127.0.0.1:6" in done.stdout
    assert done.stdout.count("one of 2\n") == 2


# Of the JobSet v1alpha2, batch/v1 and networking/v1 types: the fields that the manifest uses.
FIELDS = """
apiVersion kind metadata spec name
network enableDNSHostnames publishNotReadyAddresses coordinator replicatedJob jobIndex podIndex
failurePolicy maxRestarts rules action onJobFailureReasons replicatedJobs replicas template
completionMode completions parallelism backoffLimit podFailurePolicy onExitCodes containerName
operator values containers restartPolicy hostNetwork automountServiceAccountToken enableServiceLinks
terminationGracePeriodSeconds securityContext runAsNonRoot runAsUser runAsGroup fsGroup
seccompProfile type allowPrivilegeEscalation capabilities drop
image workingDir command args env value valueFrom fieldRef fieldPath ports containerPort
resources requests limits cpu memory nvidia.com/gpu
volumes volumeMounts mountPath readOnly persistentVolumeClaim claimName emptyDir medium
secret secretName podSelector matchLabels policyTypes ingress from
"""


def fields(value):
    """The names of all fields in a document, but for labels."""
    if isinstance(value, list):
        return set().union(*map(fields, value))
    if not isinstance(value, dict):
        return set()
    inner = (fields(item) for name, item in value.items() if name != "matchLabels")
    return set(value).union(*inner)


@pytest.fixture(scope="module")
def manifest():
    """The two documents of the manifest."""
    return list(yaml.safe_load_all((SCRIPTS / "jobset.yaml").read_text()))


def test_the_manifest_is_a_jobset(manifest):
    jobset, policy = manifest
    assert fields(manifest) <= set(FIELDS.split())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert policy["apiVersion"] == "networking.k8s.io/v1" and policy["kind"] == "NetworkPolicy"


def test_pods_of_the_jobset_find_each_other(manifest):
    jobset = manifest[0]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    coordinator = jobset["spec"]["coordinator"]
    assert coordinator == {"replicatedJob": replicated["name"], "jobIndex": 0, "podIndex": 0}
    # As JobSet writes it into the annotation, and as the kubelet fills in variables.
    name = jobset["metadata"]["name"]
    known = {"jobset.sigs.k8s.io/coordinator": f"{name}-{replicated['name']}-0-0.{name}"}
    environ = {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    for variable in container["env"]:
        if "valueFrom" in variable:
            field = variable["valueFrom"]["fieldRef"]["fieldPath"]
            value = known[re.fullmatch(r"metadata\.annotations\['(.*)'\]", field)[1]]
        else:
            value = re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], variable["value"])
        environ[variable["name"]] = value
    (port,) = (port["containerPort"] for port in container["ports"])
    assert detect.detect(environ) == Cluster(
        f"jaxcomp-host-0-0.jaxcomp:{port}", job["completions"], 3, "JobSet"
    )
    assert job["completions"] == job["parallelism"] == int(environ["JAX_NUM_PROCESSES"])
    assert job["completionMode"] == "Indexed" and replicated["replicas"] == 1
    split = container["args"].index("--")
    assert container["command"] == ["python", "-u", "-m", "jaxcomp.launch"]
    found = options.parser().parse_args(container["args"][:split])
    assert (found.start_timeout, found.heartbeat_timeout) == (600, 60)
    (secret,) = [mount for mount in container["volumeMounts"] if mount["name"] == "secret"]
    assert found.secret_file == f"{secret['mountPath']}/secret" and secret["readOnly"]
    *program, config, folder = container["args"][split:]
    assert program == ["--", "python", "-m", "train"] and pathlib.Path(ROOT, config).is_file()
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted["runs"] in folder
    assert mounted.keys() == {volume["name"] for volume in job["template"]["spec"]["volumes"]}


def test_pods_of_the_jobset_have_no_more_rights_than_they_need(manifest):
    jobset, policy = manifest
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["hostNetwork"] is pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    ours = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"]}}
    assert policy["spec"] == {
        "podSelector": ours,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": ours}]}],
    }


def test_a_wrong_command_is_not_tried_again(manifest):
    spec = manifest[0]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["operator"] == "In"
    # 0 cannot stand there: Kubernetes counts it as done.
    final = [end for end in Exit if not may_restart(end)]
    assert [0, *rule["onExitCodes"]["values"]] == sorted(final)
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    (restart,) = spec["failurePolicy"]["rules"]
    assert restart == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert spec["failurePolicy"]["maxRestarts"] > 0 and job["backoffLimit"] == 0
