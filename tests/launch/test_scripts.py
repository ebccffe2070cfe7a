"""The ready scripts, as far as a machine without the schedulers can tell."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from jaxcomp.launch import detect, options
from jaxcomp.launch.distributed import Cluster
from jaxcomp.launch.exits import Exit, may_restart
from tests.helpers.launching import ROOT, environment, free_port, run, write_config

SCRIPTS = ROOT / "jaxcomp" / "launch"
TRAIN = ["--", "python", "-m", "train"]

SRUN = """#!/bin/bash
# What srun does for two tasks on this host: its variables, a label, the worst status.
while [[ $1 == --* ]]; do echo "srun option $1"; shift; done
export SLURM_STEP_NODELIST=127.0.0.1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2 SLURM_NTASKS=2
export SLURM_STEP_ID=0 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2
for i in 0 1; do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" 2>&1 | sed -u "s/^/$i: /" & pids+=($!)
done
for pid in "${pids[@]}"; do wait $pid || status=$?; done
exit ${status:-0}
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


def job_number():
    """A number of a job whose port is free on this machine."""
    return free_port(61440, 65535) - 61440


@pytest.mark.parametrize("name", ["slurm.sbatch", "mpirun.sh"])
def test_scripts_are_valid_bash_that_stops_at_errors(name):
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
    assert "\nset -euo pipefail\n" in (SCRIPTS / name).read_text()


def test_the_slurm_script_trains_in_all_tasks(tmp_path, stand_in):
    environ = stand_in("srun", SRUN, SLURM_JOB_ID=str(4096 + job_number()), SLURM_CPUS_PER_TASK="3")
    config = write_config(tmp_path)
    submit = {"SLURM_SUBMIT_DIR": str(tmp_path)}
    done = run(
        ["bash", str(SCRIPTS / "slurm.sbatch"), "--start-timeout", "90", *TRAIN, config.name],
        env=environ | submit,
    )
    assert done.returncode == 0, done.stdout
    assert "srun option --kill-on-bad-exit=1" in done.stdout
    for task in "01":
        assert f"{task}: process {task} of 2 (SLURM); coordinator 127.0.0.1:6" in done.stdout
    assert len(re.findall("step 2, validation loss", done.stdout)) == 1
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
    stand_in("scontrol", '#!/bin/bash\necho "scontrol $*"\n')
    environ |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_RESTART_COUNT": str(restarts)}
    done = run(["bash", str(SCRIPTS / "slurm.sbatch")], env=environ)
    assert done.returncode == status
    requeued = "scontrol requeue 71\n" in done.stdout
    assert requeued == (may_restart(status) and restarts < 10)


def test_the_mpirun_script_trains_in_all_ranks(tmp_path, stand_in):
    environ = stand_in("mpirun", MPIRUN, JOB=str(job_number()), MPIRUN="mpirun -np 2")
    config = write_config(tmp_path)
    done = run(["bash", str(SCRIPTS / "mpirun.sh"), *TRAIN, str(config)], env=environ)
    assert done.returncode == 0, done.stdout
    assert "mpirun options -np 2 --bind-to none" in done.stdout
    assert done.stdout.count("this run has no --secret-file") == 1
    for rank in "01":
        assert f"process {rank} of 2 (Open MPI); coordinator 127.0.0.1:6" in done.stdout
    assert len(re.findall("step 2, validation loss", done.stdout)) == 1


def test_other_config_on_one_host_ends_all_with_what_differs(tmp_path, stand_in):
    """A wrong step number on rank 1, as of a file that was changed on one host."""
    changed = MPIRUN.replace('"$@" &', '"$@" $( ((i)) && echo --steps 3 ) &')
    assert changed != MPIRUN
    environ = stand_in("mpirun", changed, JOB=str(job_number()))
    config = write_config(tmp_path)
    done = run(["bash", str(SCRIPTS / "mpirun.sh"), *TRAIN, str(config)], env=environ)
    assert done.returncode == 2
    said = "error: the processes do not run the same. config steps: 2 on process 0, 3 on process 1."
    assert done.stdout.count(said) == 2, done.stdout
    assert not (tmp_path / "runs").exists()


# Of the JobSet v1alpha2 and batch/v1 types: fields that a manifest may have, ! that it must.
CONTAINER = {
    "!name": str,
    "!image": str,
    "workingDir": str,
    "command": [str],
    "args": [str],
    "env": [{"!name": str, "value": str, "valueFrom": {"fieldRef": {"!fieldPath": str}}}],
    "ports": [{"!containerPort": int}],
    "securityContext": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "resources": {"requests": {"cpu": str, "memory": str}, "limits": {"nvidia.com/gpu": int}},
    "volumeMounts": [{"!name": str, "!mountPath": str, "readOnly": bool}],
}
POD = {
    "!containers": [CONTAINER],
    "!restartPolicy": str,
    "hostNetwork": bool,
    "automountServiceAccountToken": bool,
    "enableServiceLinks": bool,
    "terminationGracePeriodSeconds": int,
    "securityContext": {
        "runAsNonRoot": bool,
        "runAsUser": int,
        "runAsGroup": int,
        "fsGroup": int,
        "seccompProfile": {"!type": str},
    },
    "volumes": [
        {
            "!name": str,
            "persistentVolumeClaim": {"!claimName": str},
            "emptyDir": {"medium": str, "sizeLimit": str},
            "secret": {"!secretName": str},
        }
    ],
}
JOB = {
    "completionMode": str,
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "!rules": [
            {
                "!action": str,
                "onExitCodes": {"containerName": str, "!operator": str, "!values": [int]},
            }
        ]
    },
    "!template": {"!spec": POD},
}
JOBSET = {
    "!apiVersion": str,
    "!kind": str,
    "!metadata": {"!name": str},
    "!spec": {
        "network": {
            "enableDNSHostnames": bool,
            "subdomain": str,
            "publishNotReadyAddresses": bool,
        },
        "coordinator": {"!replicatedJob": str, "jobIndex": int, "podIndex": int},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [
                {"!action": str, "onJobFailureReasons": [str], "targetReplicatedJobs": [str]}
            ],
        },
        "!replicatedJobs": [{"!name": str, "replicas": int, "!template": {"!spec": JOB}}],
    },
}


def faults(value, schema, path=""):
    """What in a value is not as a schema says."""
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [
            fault
            for i, item in enumerate(value)
            for fault in faults(item, schema[0], f"{path}[{i}]")
        ]
    if isinstance(schema, type):
        good = type(value) is schema
        return [] if good else [f"{path} is {value!r}, not of type {schema.__name__}"]
    if not isinstance(value, dict):
        return [f"{path} is no mapping"]
    known = {name.lstrip("!"): inner for name, inner in schema.items()}
    found = [f"{path}.{name} is missing" for name in schema if name[0] == "!"]
    found = [fault for fault in found if fault.split()[0].rpartition("!")[2] not in value]
    for name, inner in value.items():
        if name not in known:
            found.append(f"{path}.{name} does not exist")
        else:
            found += faults(inner, known[name], f"{path}.{name}")
    return found


@pytest.fixture(scope="module")
def manifest():
    """The two documents of the manifest."""
    return list(yaml.safe_load_all((SCRIPTS / "jobset.yaml").read_text()))


def test_the_manifest_is_a_jobset(manifest):
    jobset, policy = manifest
    assert faults(jobset, JOBSET) == []
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert policy["apiVersion"] == "networking.k8s.io/v1" and policy["kind"] == "NetworkPolicy"


def test_the_schema_finds_faults(manifest):
    jobset = yaml.safe_load(yaml.safe_dump(manifest[0]))
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["completions"], job["parallel"] = "4", 4
    del job["template"]["spec"]["restartPolicy"]
    path = ".spec.replicatedJobs[0].template.spec"
    assert set(faults(jobset, JOBSET)) == {
        f"{path}.completions is '4', not of type int",
        f"{path}.parallel does not exist",
        f"{path}.template.spec.!restartPolicy is missing",
    }


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
    assert program == TRAIN and pathlib.Path(ROOT, config).is_file()
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
