"""Eight CPU devices in one process, and JAX at its strictest."""

import gc
import os
import pathlib
import signal

import jax
import pytest

from jaxcomp.launch import programs
from jaxcomp.launch.signals import STOPS

# Under nohup, or in a script's background, some signals are ignored, and would be in all programs
# that tests start. A handler is nothing that a new program keeps.
for name in STOPS:
    number = getattr(signal, name, None)
    if number and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)

# XLA runs the collectives of all devices in one thread pool, of one thread a core: with more
# devices than cores they wait for each other for ever. XLA reads this when it makes its client.
os.environ.setdefault("NPROC", "32")

# Most of the time of tiny programs is the compiler's; most of that is LLVM's, and that of passes
# over each fusion, which JAX 0.12 cannot leave out. For programs that tests start, too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# In one part: other workers have the other cores.
flags = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

# A tenth of the time of tests is to note which lines of Python made each operation.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


# What JAX traces lives long. Python would look through all of it for each few thousand new objects,
# which takes a tenth of the time of tests.
gc.freeze()
gc.set_threshold(50_000, 20, 100)

collect_ignore_glob = ["golden/*"]  # what makes files there needs other packages, as torch

# Of more than one second in one run with --durations=0, all its parameters and what it sets up for
# others of its module together; these are here, too. QUICK ends a line, one for each room of the
# library and of train; `make test QUICK=1` runs that test as well.
TESTS = pathlib.Path(__file__).parent
SLOW = {line for line in (TESTS / "slow.txt").read_text().splitlines() if " QUICK" not in line}


def pytest_collection_modifyitems(items):
    """Marks the slow tests; their files come first, so that no worker waits for one at the end."""
    slow = {TESTS / line.partition("::")[0] for line in SLOW}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        name = getattr(item, "originalname", item.name)
        if item.path.is_relative_to(TESTS) and f"{item.path.relative_to(TESTS)}::{name}" in SLOW:
            item.add_marker("slow")


@pytest.fixture(autouse=True, scope="session")
def programs_of_one_session(tmp_path_factory):
    """Lets the programs that tests start share what they compile, more than half of a short run.

    Each worker has a folder of its own: JAX writes files that another process could read half.
    """
    for name, value in programs.kept(tmp_path_factory.mktemp("programs")).items():
        os.environ.setdefault(name, value)


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_module(request):
    """Lets go of a module's compiled programs at its end, those in its caches too.

    Each maps memory of its own, and a process has 65,530 maps: XLA's compiler ends the one that
    keeps the programs of all tests by a segmentation fault.
    """
    yield
    for value in list(vars(request.module).values()):
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()


@pytest.fixture
def optimized():
    """Compiles as users do: for tests of the last bit."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
