"""Compiles steps for GPUs and TPUs without having them, and reports what their programs do.

    python -m benchmarks.accelerators --devices h100 v5e --models 124m --methods dense q4 \\
        --meshes 8 16x8 128x8

Needs Python 3.12 or newer and `pip install '.[train,accelerators]'`, no accelerator and no driver.
Meshes are hosts, or hosts times their devices. Rows that are already in the file are replaced. A
step that cannot be compiled becomes a row with an `error`. If this machine has such an accelerator,
the command also runs the steps on all of its devices, and adds the measured time to the roofline's
prediction; `--no-run` disables that, and `--no-compile` does only that.
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

from benchmarks import accelerators_figure, accelerators_measured
from benchmarks import rows as rows_file
from benchmarks.accelerators_devices import DEVICES, unavailable
from benchmarks.accelerators_row import KEY, row
from benchmarks.accelerators_run import at_hand, has_driver, measured
from benchmarks.accelerators_step import METHODS, MODELS

RESULTS = pathlib.Path(__file__).parent / "results" / "accelerators.json"

COMPILING = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment of the compiling processes: no driver, none of the tests' variables, and no lock.

The library for TPUs lets one process of a machine load it, which spares a TPU and not a compiler.
"""
_TOLD = 300  # characters of an error that a row keeps


def apart(function: Callable, *arguments, environment: dict[str, str]) -> object:
    """Calls a function in a process of its own, since a failing compiler may end its process.

    Raises:
      RuntimeError: With the reason, if the function raises or its process ends.
    """
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(function, *arguments).result()
    except concurrent.futures.BrokenExecutor as error:
        raise RuntimeError("its process ended; what it said is on standard error") from error
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {str(error)[:_TOLD]}") from error
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def compiled(device: str, model: str, method: str, mesh: str) -> dict:
    """The row of one step, or one with the error that its compiler raised."""
    sizes = tuple(map(int, mesh.split("x")))
    try:
        return apart(row, device, model, method, sizes, environment=COMPILING)
    except RuntimeError as error:
        key = dict(zip(KEY, (device, model, method, mesh), strict=True))
        return key | {"error": str(error)}


def run_at_hand(models: Sequence[str], methods: Sequence[str]) -> Iterator[dict]:
    """Yields rows of the measured steps on this machine's accelerators; none without any."""
    found = apart(at_hand, environment={}) if has_driver() else None
    for model, method in itertools.product(models, methods) if found else ():
        key = dict(zip(KEY, (found.name, model, method, str(found.count)), strict=True))
        try:
            yield key | apart(measured, found.name, model, method, environment={})
        except RuntimeError as error:
            yield key | {"measured": {"error": str(error)}}


def merged(old: list[dict], new: dict) -> list[dict]:
    """The rows with a new one; measured values stay next to the compiled ones."""
    key = [new[name] for name in KEY]
    same = [one for one in old if [one[name] for name in KEY] == key]
    others = [one for one in old if one not in same]
    kept = {k: v for one in same for k, v in one.items() if "measured" in new or k == "measured"}
    return [*others, kept | new]


def _saved(path: pathlib.Path, rows: list[dict], new: dict) -> list[dict]:
    """The rows with a new one, which is printed; the file has them all."""
    print(_line(new), flush=True)
    rows = merged(rows, new)
    rows_file.write(path, rows)
    return rows


def _line(row: dict) -> str:
    where = ", ".join(row[name] for name in KEY)
    if "error" in row:
        return f"{where}: {row['error']}"
    if "measured" in row:
        return f"{where}: {accelerators_measured.cell(row['measured'])}"
    return (
        f"{where}: {row['moved_copies']:.1f} copies moved, {row['kernels']} kernels, "
        f"{row['unknown_loops']} loops of unknown length, {row['messages_inside']} messages in "
        f"loops or branches, temp {row['memory']['temp_copies']:.1f} copies, compiled in "
        f"{row['compile_seconds']:.0f} s"
    )


def arguments() -> argparse.Namespace:
    """Reads the command line; an error for devices without a compiler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = lambda name, known, default: parser.add_argument(
        name, nargs="+", choices=known, default=default
    )
    add("--devices", list(DEVICES), ["h100"])
    add("--models", list(MODELS), ["124m"])
    add("--methods", list(METHODS), ["dense", "q4", "cocktail"])
    parser.add_argument("--meshes", nargs="+", default=["8"], help="such as 8, 16x8, 128x8")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="file for the rows")
    parser.add_argument("--figure", type=pathlib.Path, help="draw all rows of the file, as .svg")
    parser.add_argument("--no-run", action="store_true", help="compile alone")
    parser.add_argument("--no-compile", action="store_true", help="run alone, needs no compilers")
    found = parser.parse_args()
    for name in [] if found.no_compile else found.devices:
        if (reason := unavailable(name)) is not None:
            parser.error(reason)
    return found


def main() -> None:
    """Makes the rows one by one and saves after each; then prints the file's table."""
    options = arguments()
    rows = json.loads(options.json.read_text()) if options.json.exists() else []
    for mesh in [] if options.no_compile else options.meshes:
        for device in options.devices:
            for model in options.models:
                for method in options.methods:
                    rows = _saved(options.json, rows, compiled(device, model, method, mesh))
    for new in [] if options.no_run else run_at_hand(options.models, options.methods):
        rows = _saved(options.json, rows, new)
    print(accelerators_figure.table(rows))
    if options.figure:
        accelerators_figure.draw(rows, options.figure)


if __name__ == "__main__":
    main()
