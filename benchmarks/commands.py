"""Calls functions of another process through its pipes, with one JSON line each way.

Imports only the standard library, so that programs of any Python can `serve`.
"""

import argparse
import contextlib
import json
import os
import pathlib
import queue
import selectors
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Worker(NamedTuple):
    """A process that serves; its output goes to its log."""

    process: subprocess.Popen
    log: pathlib.Path


def place(description: str) -> argparse.Namespace:
    """Reads a host's place in the run from its command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--coordinator", required=True, help="host:port of process 0")
    parser.add_argument("--num-processes", type=int, required=True)
    parser.add_argument("--process-id", type=int, required=True)
    parser.add_argument("--interface", required=True)
    return parser.parse_args()


def serve(**functions: Callable[..., Any]) -> None:
    """Answers calls from standard input, one at a time, until it is closed.

    Output of the functions, or of libraries, goes to standard error. When the input ends, because
    the caller has ended, this process ends at once.

    Args:
      **functions: The functions by name; their results go through JSON.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    calls: queue.Queue[str] = queue.Queue()

    def read():
        for line in sys.stdin:
            calls.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            name, arguments = json.loads(calls.get())
            print(json.dumps(functions[name](**arguments)), file=answers, flush=True)
    except BaseException:
        # Not through libraries that would wait for other processes.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@contextlib.contextmanager
def start(
    programs: Sequence[Sequence[str]], environment: Mapping[str, str], folder: pathlib.Path
) -> Iterator[list[Worker]]:
    """Starts programs that `serve`, and ends them on exit.

    Args:
      programs: One command line each.
      environment: Variables beside those of this process.
      folder: Where their logs go.

    Yields:
      The workers, in the order of `programs`.
    """
    workers: list[Worker] = []
    try:
        for number, program in enumerate(programs):
            log = folder / f"{number}.log"
            with log.open("w") as stderr:
                process = subprocess.Popen(
                    program,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    env=os.environ | environment,
                    text=True,
                    # Ctrl-C at the terminal is for the caller to handle.
                    start_new_session=True,
                )
            workers.append(Worker(process, log))
        yield workers
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            # The input of a worker that has ended may hold an unread call.
            with contextlib.suppress(BrokenPipeError), worker.process:
                pass


def call(workers: Sequence[Worker], name: str, seconds: float, **arguments: Any) -> list[Any]:
    """Calls a function of all workers at the same time.

    Args:
      workers: The workers to call.
      name: Name of the function.
      seconds: Time limit for all answers.
      **arguments: Its arguments, the same for all.

    Returns:
      The answers, in the order of the workers.

    Raises:
      RuntimeError: If a worker ends, or does not answer in time; with the end of its log.
    """
    line = json.dumps([name, arguments]) + "\n"
    for worker in workers:
        with contextlib.suppress(BrokenPipeError):  # A worker that has ended is found below.
            worker.process.stdin.write(line)
            worker.process.stdin.flush()
    answers: dict[int, Any] = {}
    until = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for number, worker in enumerate(workers):
            waiting.register(worker.process.stdout, selectors.EVENT_READ, number)
        while len(answers) < len(workers):
            ready = waiting.select(max(0.0, until - time.monotonic()))
            for key, _ in ready:
                answer = key.fileobj.readline()
                if not answer:
                    raise RuntimeError(_failure(workers, key.data, f"ended in {name!r}"))
                answers[key.data] = json.loads(answer)
                waiting.unregister(key.fileobj)
            if not ready:
                late = min(set(range(len(workers))) - set(answers))
                raise RuntimeError(
                    _failure(workers, late, f"did not answer {name!r} in {seconds:g} s")
                )
    return [answers[number] for number in range(len(workers))]


def _failure(workers, number, what) -> str:
    lines = workers[number].log.read_text().splitlines()
    return "\n".join([f"worker {number} {what}; the end of its log:", *lines[-15:]])
