"""Lists of hosts, and variables of schedulers."""

from hypothesis import strategies as st

from jaxcomp.launch import detect, ssh
from tests.helpers.fuzzing import fuzz, refused, texts


@fuzz(texts("alice@h1 slots=2\nh2 # last\n[::1]\n"))
def test_hosts(text):
    hosts = refused(ssh.read_hosts, text.decode(errors="surrogateescape"))
    for host in hosts or []:
        assert 1 <= host.slots <= ssh.MOST_SLOTS and not host.target.startswith("-")


VARIABLES = {
    "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7",
    "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]",
}  # fmt: skip


WRITTEN = st.text("0123456789[]-,()xn\u0661", max_size=9)


@fuzz(st.dictionaries(st.sampled_from(sorted(VARIABLES)), WRITTEN))
def test_variables_of_schedulers(values):
    refused(detect.detect, VARIABLES | values)
