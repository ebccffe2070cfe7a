"""Lists the suites of benchmarks, or runs one.

    python -m benchmarks
    python -m benchmarks codes --quick

The options are those of the suite's program; `python -m benchmarks codes --help` shows them.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxcomp.launch.exits import clean_exits


class Suite(NamedTuple):
    """A suite: its program, what it answers, and what it takes."""

    program: str  # a module with `main(argv)`
    answers: str
    needs: str
    takes: str
    also: str = ""  # further programs


SUITES = {
    "loss": Suite(
        "benchmarks.scale",
        "loss against bits, for models of 0.1 to 124 M parameters",
        "`pip install '.[train,huggingface]'`; a GPU from 34m on",
        "--size pico: mostly 6 minutes a run on a CPU; 34m and 124m want a GPU",
        "benchmarks.convergence, tuned tasks of nano and fine-tuning; benchmarks.figures",
    ),
    "links": Suite(
        "benchmarks.slow_network",
        "seconds and bytes of steps over links of 100 Mbit/s to 1 Gbit/s",
        "Linux, root and iproute2",
        "48 minutes of steps on 2 cores, and compilations before; --quick: 4 methods",
    ),
    "codes": Suite(
        "benchmarks.codes",
        "time and memory of codes and of whole updates",
        "a CPU",
        "--quick: a minute on one core; all: not timed",
    ),
    "accelerators": Suite(
        "benchmarks.accelerators",
        "programs for GPUs and TPUs: kernels, memory, messages, predicted steps",
        "Python 3.12, `pip install '.[train,accelerators]'`; no accelerator",
        "10 to 60 seconds a step, 4 minutes at most, but for 20b",
    ),
    "peers": Suite(
        "benchmarks.peers_loss",
        "losses beside PyTorch, DeepSpeed and the authors' code on the same work",
        "a Python with PyTorch, see benchmarks/peers/__init__.py; without it, ours alone",
        "400 steps a row, at 2 rates; --steps 20 to try it",
    ),
}


def listing() -> str:
    """The suites, what they need and how long they take, and where the rest is."""
    lines = ["python -m benchmarks SUITE [options], one of", ""]
    for name, suite in SUITES.items():
        lines += [f"{name:14s}{suite.answers}", f"{'':14s}needs {suite.needs}"]
        lines += [f"{'':14s}takes {suite.takes}"]
        lines += [f"{'':14s}also {suite.also}"] * bool(suite.also) + [""]
    lines.append("Studies of one question each are in benchmarks/studies/__init__.py.")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Runs the named suite with the other words, or lists all.

    Raises:
      ValueError: For a suite that there is not.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(listing())
    elif argv[0] in SUITES:
        importlib.import_module(SUITES[argv[0]].program).main(argv[1:])
    else:
        raise ValueError(f"got suite {argv[0]!r}, need one of {', '.join(SUITES)}\n\n{listing()}")


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
