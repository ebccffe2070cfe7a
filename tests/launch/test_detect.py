"""Which process of a run this is, from what schedulers set."""

import pytest

from jaxcomp.launch import detect
from jaxcomp.launch.distributed import Cluster

SLURM = {
    "SLURM_JOB_ID": "5123456",
    "SLURM_STEP_NODELIST": "node[001-003,007],gpu5",
    "SLURM_NTASKS": "10",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
JOBSET = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "2",
    "JAX_NUM_PROCESSES": "4",
    "JAX_COORDINATOR_ADDRESS": "jaxcomp-host-0-0.jaxcomp:29411",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
FLAGS = {"coordinator": "a:1", "num_processes": 2, "process_id": 1}
SLURM_PORT = 61440 + 5123456 % 4096


@pytest.mark.parametrize(
    ("environ", "cluster"),
    [
        (SLURM, Cluster(f"node001:{SLURM_PORT}", 10, 3, "SLURM", 1, 2)),
        (
            OPEN_MPI,
            Cluster(f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 8, 5, "Open MPI", 1, 4),
        ),
        (JOBSET, Cluster("jaxcomp-host-0-0.jaxcomp:29411", 4, 2, "JobSet")),
        ({"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
    ],
    ids=["SLURM", "Open MPI", "JobSet", "login node", "pod of no job"],
)
def test_a_process_finds_its_place(environ, cluster):
    assert detect.detect(environ) == cluster


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-003,007],gpu5", "node001"),
        ("gpu5,node[001-003]", "gpu5"),
        ("node[7,001-003]", "node7"),
        ("node[12]", "node12"),
        ("rack[1-2]node[3-4],x", "rack1node3"),
        ("a-1-[08-11].cluster.org", "a-1-08.cluster.org"),
    ],
)
def test_process_0_is_on_the_first_host_of_a_node_list(nodelist, first):
    assert detect.first_host(nodelist) == first
    environ = SLURM | {"SLURM_STEP_NODELIST": nodelist}
    assert detect.detect(environ).coordinator == f"{first}:{SLURM_PORT}"


@pytest.mark.parametrize(
    ("uri", "host"),
    [
        ("4096.0;tcp://10.0.0.1:34911", "10.0.0.1"),
        ("4096.0;tcp6://[fe80::b9b,2620:10d::2]:43370", "[fe80::b9b]"),
        ("4096.0;usock;tcp://10.0.1.1,10.0.2.1:48323", "10.0.1.1"),
    ],
)
def test_process_0_of_open_mpi_is_where_mpirun_runs(uri, host):
    environ = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": uri}
    assert detect.detect(environ).coordinator == f"{host}:61441"


def test_open_mpi_goes_before_slurm_and_slurm_before_a_jobset():
    assert detect.detect(OPEN_MPI | SLURM | JOBSET).source == "Open MPI"
    assert detect.detect(SLURM | JOBSET).source == "SLURM"


def test_flags_win_one_by_one():
    assert detect.detect(SLURM, **FLAGS) == Cluster("a:1", 2, 1, "flags")
    only = detect.detect(SLURM, coordinator="a:1", process_id=None)
    assert only == detect.detect(SLURM)._replace(coordinator="a:1")
    assert detect.detect(SLURM, process_id=0).process_id == 0


@pytest.mark.parametrize(
    "scheduler", [SLURM, OPEN_MPI, JOBSET], ids=["SLURM", "Open MPI", "JobSet"]
)
def test_a_variable_that_is_missing_is_named_and_a_flag_replaces_it(scheduler):
    needed = scheduler.keys() - {"SLURM_STEP_NUM_NODES", "KUBERNETES_SERVICE_HOST"}
    needed -= {"JOB_COMPLETION_INDEX"}  # without it nothing shows a JobSet
    where = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri"}
    for name in needed:
        environ = {other: value for other, value in scheduler.items() if other != name}
        said = rf"half there: {name} not set.*--single"
        if name in where | {"JAX_COORDINATOR_ADDRESS"}:
            said = (
                rf"does not say where process 0 runs: {name} is not set\. Write --coordinator HOST"
            )
        with pytest.raises(ValueError, match=said):
            detect.detect(environ)
        assert detect.detect(environ, **FLAGS).source == "flags"
    with pytest.raises(ValueError, match=r"write --coordinator, --num-processes, .*which win"):
        detect.detect({"SLURM_JOB_ID": "1"})
    assert detect.detect({"SLURM_JOB_ID": "1"}, **FLAGS).process_id == 1


def test_open_mpi_5_needs_the_coordinators_flag_only():
    environ = OPEN_MPI.copy()
    del environ["OMPI_MCA_orte_hnp_uri"]
    with pytest.raises(ValueError, match="Open MPI does not say .*Write --coordinator HOST:29411"):
        detect.detect(environ)
    cluster = detect.detect(environ, coordinator="a:1")
    assert cluster == Cluster("a:1", 8, 5, "Open MPI", 1, 4)


def test_mpich_and_intel_mpi_need_the_coordinators_flag_only_outside_of_slurm():
    with pytest.raises(ValueError, match="MPICH or Intel MPI does not say where .*--coordinator"):
        detect.detect(MPICH)
    cluster = detect.detect(MPICH, coordinator="a:1")
    assert cluster == Cluster("a:1", 4, 3, "MPICH or Intel MPI", 1, 2)
    # mpirun in a SLURM job: SLURM's tasks are mpirun's helpers, one a node.
    found = detect.detect(SLURM | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"} | MPICH)
    assert found == Cluster(f"node001:{SLURM_PORT}", 4, 3, "MPICH or Intel MPI", 1, 2)
    # srun --mpi=pmi2 sets two of these, beside its own.
    both = SLURM | {"PMI_RANK": SLURM["SLURM_PROCID"], "PMI_SIZE": SLURM["SLURM_NTASKS"]}
    assert detect.detect(both) == detect.detect(SLURM)
    assert detect.detect(OPEN_MPI | MPICH).source == "Open MPI"


def test_what_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"SLURM_NTASKS='2\(x3\)' must be a number"):
        detect.detect(SLURM | {"SLURM_NTASKS": "2(x3)"})


def test_part_of_the_flags_without_a_scheduler_asks_for_the_others():
    with pytest.raises(ValueError, match="write --coordinator, --num-processes as well"):
        detect.detect({}, process_id=1, coordinator=None)


@pytest.mark.parametrize(
    ("local_id", "local_count", "environ", "devices"),
    [
        (1, 4, {}, [1]),
        (0, 1, {}, None),
        (0, 1, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
        # Numbers count those that are visible: 2 and 3 are JAX's 0 and 1.
        (1, 2, {"CUDA_VISIBLE_DEVICES": "2,3"}, [1]),
        (1, 2, {"ROCR_VISIBLE_DEVICES": "2,3"}, [1]),
        # The scheduler has hidden the others' already.
        (1, 2, {"CUDA_VISIBLE_DEVICES": "3"}, None),
        (1, 2, {"CUDA_VISIBLE_DEVICES": "GPU-6fb6d3db-aafb"}, None),
        (1, 2, {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, None),
        (1, 2, {"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_a_process_takes_one_device_unless_others_are_hidden(
    local_id, local_count, environ, devices
):
    cluster = Cluster("a:1", 8, 5, "SLURM", local_id, local_count)
    assert detect.local_devices(cluster, environ) == devices


def test_more_processes_than_visible_devices_is_an_error():
    cluster, visible = Cluster("a:1", 8, 5, "SLURM", 2, 4), {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(ValueError, match="process 2 of 4 on this host needs.*=0,1 shows 2"):
        detect.local_devices(cluster, visible)
    assert detect.local_devices(cluster, visible | {"JAX_PLATFORMS": "cpu"}) is None


@pytest.mark.parametrize("local_id", [0, 1])
@pytest.mark.parametrize("visible", ["3", "0, 3", "-1", ""])
def test_processes_of_a_launcher_all_have_its_visible_devices(local_id, visible):
    """One device is no scheduler's share, which only its process would see."""
    cluster, environ = Cluster("a:1", 2, 0, "flags", local_id, 2), {"CUDA_VISIBLE_DEVICES": visible}
    if visible == "3" and local_id == 1:
        with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=3 shows 1; start one process"):
            detect.local_devices(cluster, environ)
    else:
        expected = None if visible in ("-1", "") else [local_id]
        assert detect.local_devices(cluster, environ) == expected


def test_wanted_devices_count_those_that_are_visible():
    cluster, visible = Cluster("a:1", 2, 0, "flags", 1, 2), {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert detect.local_devices(cluster, visible, [2, 3]) == [2, 3]
    assert detect.local_devices(cluster, {}, [6, 7]) == [6, 7]
    with pytest.raises(ValueError, match="needs accelerator 6 of those.*numbers below 4"):
        detect.local_devices(cluster, visible, [4, 6])


def test_accelerators_are_shared_out_evenly():
    assert detect.shares([2, 3, 0, 1], 2) == [[2, 3], [0, 1]]
    for devices in ([0, 1, 2], [0]):
        with pytest.raises(ValueError, match="accelerators for 2 processes of a host; write 2"):
            detect.shares(devices, 2)


@pytest.mark.parametrize(
    ("source", "local_count", "allowed", "threads"),
    [
        ("flags", 1, 64, 64),
        ("flags", 4, 64, 16),
        ("flags", 4, 8, 2),  # of a launcher that may use 8
        ("flags", 4, 2, 1),
        ("SLURM", 4, 64, 16),  # not bound
        ("SLURM", 4, 16, 16),  # bound: these are its own
    ],
)
def test_processes_of_one_host_share_its_cores(source, local_count, allowed, threads):
    cluster = Cluster("a:1", 4, 0, source, 0, local_count)
    assert detect.threads(cluster, allowed, cores=64) == threads


def test_one_line_says_what_was_detected():
    line = detect.line(detect.detect(SLURM), "ib0", [1], {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert line == (
        f"process 3 of 10 (SLURM); coordinator node001:{SLURM_PORT}; interface ib0; "
        "accelerators: CUDA_VISIBLE_DEVICES=2,3, this process number 1"
    )
