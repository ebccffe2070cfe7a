"""Programs that know little of the launcher: they start, connect, fail and start again."""

import re
import sys

from tests.helpers.launching import environment, run
from tests.journeys import facts

PLAIN = """
import sys
import jax
jax.distributed.initialize()  # as on any cluster that JAX detects
from jax.experimental import multihost_utils
import numpy as np
found = multihost_utils.process_allgather(np.int32(10 + jax.process_index()))
print("found", found.tolist(), sys.argv[1:])
"""

ENDS = """
import os, pathlib, sys, time
from jaxcomp import launch
count = launch.connect()
import jax
once = pathlib.Path("once")
if launch.from_first(once.exists):
    print(launch.Line("mine", 3, 3))
    print("went on with", count)
elif jax.process_index() == 1:
    once.touch()
    os.kill(os.getpid(), 9)
else:
    launch.from_first(lambda: time.sleep(60))
"""

FAILS = """
import jax, time
jax.distributed.initialize()
if jax.process_index() == 1:
    raise KeyError("of process 1")
time.sleep(60)
"""


def launched(folder, program, *flags, words=()):
    """What `--local 2` says of a script."""
    (folder / "script.py").write_text(program)
    command = [sys.executable, "-m", "jaxcomp.launch", "--local", "2", *flags, "--"]
    return run([*command, "python", "script.py", *words], cwd=folder, env=environment())


def test_a_program_of_jax_alone_connects_by_initialize_without_arguments(tmp_path):
    done = launched(tmp_path, PLAIN, words=["--rate", "a b"])
    assert done.returncode == 0, done.stdout
    assert "found [10, 11] ['--rate', 'a b']\n" in done.stdout
    other = (tmp_path / "logs" / "process_1.log").read_text()
    assert "found [10, 11]" in other and "no --secret-file" not in other


def test_the_loop_of_the_page_trains_on_two_processes(tmp_path):
    facts.nnx_loop(tmp_path)
    done = launched(tmp_path, (tmp_path / "nnx_loop.py").read_text())
    assert done.returncode == 0, done.stdout
    losses = re.findall(r"^nnx: step (?:50|100)/100, loss (\S+)$", done.stdout, re.M)
    assert len(losses) == 2 and float(losses[1]) < float(losses[0]) / 2


def test_a_program_that_loses_a_process_is_started_again(tmp_path):
    flags = "--restarts=1", "--min-replicas=1", "--heartbeat-timeout=5"
    done = launched(tmp_path, ENDS, *flags)
    assert done.returncode == 0, done.stdout
    assert "the run goes on with 1 of 2 processes\n" in done.stdout
    assert "mine: step 3/3\nwent on with 1\n" in done.stdout  # a line where there is no terminal


def test_an_error_of_a_program_ends_all_with_its_traceback(tmp_path):
    done = launched(tmp_path, FAILS, "--heartbeat-timeout=3", "--logs", str(tmp_path / "mine"))
    assert done.returncode == 1
    said = re.sub(r"\n    ", "\n", done.stdout)
    assert "error: process 1 failed first, with status 1" in said
    assert 'script.py", line 5, in <module>' in said
    assert "KeyError: 'of process 1'" in said
    assert (tmp_path / "mine" / "process_1.log").is_file()


def test_a_command_that_is_no_python_file_runs_below(tmp_path):
    command = [sys.executable, "-m", "jaxcomp.launch", "--local", "1", "--", "python", "-c"]
    words = "print('here'); import sys; sys.exit(4)"
    done = run([*command, words], cwd=tmp_path, env=environment())
    assert done.returncode == 4 and "\nhere\n" in done.stdout
