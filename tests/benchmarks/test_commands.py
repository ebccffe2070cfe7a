"""Functions of other processes, called through their pipes."""

import pathlib
import sys

import pytest

from benchmarks import commands

ROOT = str(pathlib.Path(__file__).parents[2])
SERVANT = """
import os, sys, time
from benchmarks import commands

def fail():
    print("what went wrong", file=sys.stderr)
    raise ValueError("here is why")

commands.serve(
    add=lambda a, b: a + b,
    pid=os.getpid,
    fail=fail,
    out=print,
    sleep=lambda length: time.sleep(length),
)
"""


def servants(count, folder):
    """`count` processes that serve, in this folder's repository."""
    environment = {"PYTHONPATH": ROOT}
    return commands.start([[sys.executable, "-c", SERVANT]] * count, environment, folder)


def test_all_workers_answer_in_order(tmp_path):
    with servants(2, tmp_path) as workers:
        assert commands.call(workers, "add", 30, a=1, b=2) == [3, 3]
        assert commands.call(workers, "pid", 30) == [worker.process.pid for worker in workers]


def test_what_a_worker_prints_is_no_answer(tmp_path):
    with servants(1, tmp_path) as workers:
        assert commands.call(workers, "out", 30, sep="") == [None]
        assert commands.call(workers, "add", 30, a=1, b=2) == [3]


def test_a_failure_shows_the_end_of_the_log(tmp_path):
    with servants(2, tmp_path) as workers:
        with pytest.raises(RuntimeError, match="(?s)ended in 'fail'.*what went.*here is why"):
            commands.call(workers, "fail", 30)


def test_an_answer_that_does_not_come_is_an_error(tmp_path):
    with servants(1, tmp_path) as workers:
        commands.call(workers, "pid", 30)
        with pytest.raises(RuntimeError, match=r"did not answer 'sleep' in 0\.2 s"):
            commands.call(workers, "sleep", 0.2, length=60)


def test_workers_end_with_their_caller(tmp_path):
    with servants(1, tmp_path) as workers:
        commands.call(workers, "pid", 30)
        workers[0].process.stdin.close()
        assert workers[0].process.wait(30) == 0
        workers[0].process.stdin = None
    with servants(2, tmp_path) as workers:
        commands.call(workers, "pid", 30)
    assert all(worker.process.poll() is not None for worker in workers)
