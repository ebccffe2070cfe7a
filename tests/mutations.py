"""Does the suite see a mistake? Makes those of `mutations.txt` one by one, and runs their tests.

    make mutations                            all of them, a few hundred tests
    python tests/mutations.py --check         only whether the table still fits the code
    python tests/mutations.py --only 3,17     or a part of a file's name, or of a description

A mistake is a block of lines in the table: the file and what is broken, the text as it is (`-`,
once in the file), the text in its place (`+`), and the tests that should see it (`?`), after which
come the others of their files. It is made in a copy of the checkout. It is caught if a test fails,
or if the process of the tests crashes; what takes too long or cannot be imported is not.
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
TABLE = pathlib.Path(__file__).with_suffix(".txt")
FOLDERS = "jaxcomp train tests configs benchmarks notebooks examples docs"
COPIED = (*FOLDERS.split(), "pyproject.toml", "README.md", "Makefile")


class Mutant(NamedTuple):
    """A change of one line."""

    number: int
    file: str
    what: str  # is broken
    old: str  # a part of a line
    new: str
    tests: list[str]  # files, folders, or tests as `file::name`


class Result(NamedTuple):
    """What the tests say of it."""

    mutant: Mutant
    verdict: str
    seconds: float


def read(table: str) -> list[Mutant]:
    """The mutants of a table, numbered from 1."""
    blocks = re.findall(r"^(\S+): (.+)\n- (.+)\n\+ (.+)\n\? (.+)$", table, re.MULTILINE)
    return [
        Mutant(number, file, what, old, new, tests.split())
        for number, (file, what, old, new, tests) in enumerate(blocks, start=1)
    ]


def misfits(mutant: Mutant) -> list[str]:
    """Why a mutant cannot be made or tested in this checkout."""
    path = ROOT / mutant.file
    times = path.read_text().count(mutant.old) if path.is_file() else 0
    wrong = [] if times == 1 else [f"{mutant.file} holds {times} times: {mutant.old}"]
    return wrong + [f"there is no {path}" for path in files(mutant) if not (ROOT / path).exists()]


def files(mutant: Mutant) -> list[str]:
    """Where its tests are."""
    return list(dict.fromkeys(test.partition("::")[0] for test in mutant.tests))


def is_there(test: str) -> bool:
    """Whether a test still has its name."""
    path, _, name = test.partition("::")
    file = ROOT / path
    return not name or (file.is_file() and f"def {name}(" in file.read_text())


def tried(mutant: Mutant, copies: queue.Queue, limit: float) -> Result:
    """Makes the change in a copy that is free, runs the tests there and takes the change back."""
    copy = copies.get()
    path, began = copy / mutant.file, time.monotonic()
    text = path.read_text()
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        verdict = _verdict(copy, list(filter(is_there, mutant.tests)) or files(mutant), limit)
        if verdict == "SURVIVED" and mutant.tests != files(mutant):
            verdict = _verdict(copy, files(mutant), limit)
    finally:
        path.write_text(text)
        copies.put(copy)
    return Result(mutant, verdict, time.monotonic() - began)


def _verdict(copy: pathlib.Path, tests: list[str], limit: float) -> str:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=_environment(copy),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"TOOK MORE THAN {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        said = output.read()
    if status == 0:
        return "SURVIVED"
    if -status in (signal.SIGSEGV, signal.SIGABRT):  # of an array that is read after its donation
        return f"caught by {signal.Signals(-status).name}, which ended the tests"
    failed = re.findall(r"^(?:FAILED|ERROR) (.+)", said, re.MULTILINE)
    if status == 1 and failed:
        return f"caught by {failed[0]}"
    return f"DID NOT RUN: {' '.join(said.split()[-30:])}"


def _environment(copy: pathlib.Path) -> dict[str, str]:
    """Programs that a change leaves as they are are compiled once a copy, for all its mutants."""
    return os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # a file's age in whole seconds would not tell the change
        "JAX_COMPILATION_CACHE_DIR": str(copy / "programs"),
        "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "1",  # `jaxcomp.report` reads it
        "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX": f"{copy}/",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _copied(folder: pathlib.Path) -> pathlib.Path:
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "_build")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def _chosen(mutants: list[Mutant], only: str | None) -> list[Mutant]:
    if only is None:
        return mutants
    if re.fullmatch(r"[\d,]+", only):
        return [mutant for mutant in mutants if str(mutant.number) in only.split(",")]
    return [mutant for mutant in mutants if only in mutant.file or only in mutant.what]


def _line(result: Result) -> str:
    mutant, verdict, seconds = result
    return f"{mutant.number:3} {mutant.file}: {mutant.what} | {verdict} | {seconds:.0f} s"


def main() -> int:
    """Returns 0 if all are caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only whether the table fits the code")
    parser.add_argument("--only", help="numbers, as 3,17; or a part of a file's name, or of what")
    parser.add_argument("--jobs", type=int, default=2, help="copies in use at once")
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of one")
    args = parser.parse_args()
    mutants = _chosen(read(TABLE.read_text()), args.only)
    wrong = [f"{mutant.number}: {why}" for mutant in mutants for why in misfits(mutant)]
    for test in (test for mutant in mutants for test in mutant.tests if not is_there(test)):
        print(f"there is no {test} any more; the other tests of its file are run")
    if wrong or args.check or not mutants:
        print("\n".join(wrong) or f"{len(mutants)} mutants fit the code")
        return bool(wrong or not mutants)
    with tempfile.TemporaryDirectory() as folder:
        copies = queue.Queue()
        for number in range(args.jobs):
            (copy := pathlib.Path(folder, str(number))).mkdir()
            copies.put(_copied(copy))
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            waiting = [pool.submit(tried, mutant, copies, args.limit) for mutant in mutants]
            results = []
            for done in concurrent.futures.as_completed(waiting):
                results.append(done.result())
                print(_line(results[-1]), flush=True)
    missed = [result for result in results if not result.verdict.startswith("caught")]
    print("\n".join(map(_line, sorted(results))))
    print(f"{len(results) - len(missed)} of {len(results)} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
