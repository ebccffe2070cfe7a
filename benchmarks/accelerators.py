"""Compiles steps for GPUs and TPUs without having them, and reports what their programs do.

    python -m benchmarks.accelerators --devices h100 v5e --models 124m --methods dense q4 \\
        --meshes 8 16x8 128x8

Needs Python 3.12 or newer and `pip install '.[train,accelerators]'`, no accelerator and no driver.
Meshes are hosts, or hosts times their devices. Rows that are already in the file are replaced. A
step that cannot be compiled becomes a row with an `error`. If this machine has such an accelerator,
the command also runs the steps on all of its devices, and adds the measured time to the roofline's
prediction; `--no-run` disables that, and `--no-compile` does only that. `--mocked 8 2x8` runs the
programs of these meshes on one GPU: kernels are real, messages go nowhere.
"""

import argparse
import collections
import concurrent.futures
import glob
import itertools
import math
import multiprocessing
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import accelerators_tables
from benchmarks import rows as rows_file
from benchmarks.accelerators_devices import (
    CONTEXT,
    DEVICES,
    SEQUENCES,
    gradient_flops,
    mesh_from,
    unavailable,
)
from benchmarks.accelerators_step import (
    KEY,
    METHODS,
    MODELS,
    Built,
    build_step,
    compile_step,
    facts,
    model_for,
    row,
)
from train.placement import build

PROFILED = 4  # steps
_LINES = ("Stream", "XLA Ops")  # of kernels on GPUs, of operations on TPUs
_SLOWEST = 8  # kernels


def profiled(step: Callable[[], object]) -> dict:
    """Profiles `PROFILED` calls of a function that waits for its results; see `summary`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                step()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        found = [jax.profiler.ProfileData.from_file(str(file)) for file in files]
        return summary(plane for data in found for plane in data.planes)


def summary(planes: Iterable) -> dict:
    """Sums the planes of a profile.

    Returns:
      `kernel_seconds` of one step on all devices together, and its `slowest_kernels`: names, how
      often they run, and seconds of these runs together. Zero and [] without an accelerator.
    """
    counts, seconds = collections.Counter(), collections.Counter()
    for plane in planes:
        for line in plane.lines if plane.name.startswith("/device:") else ():
            for event in line.events if line.name.startswith(_LINES) else ():
                counts[event.name] += 1
                seconds[event.name] += event.duration_ns / 1e9
    most = [[k, counts[k] / PROFILED, s / PROFILED] for k, s in seconds.most_common(_SLOWEST)]
    return {"kernel_seconds": seconds.total() / PROFILED, "slowest_kernels": most}


WARM_UP = 101
"""Steps before those that are timed: 1-bit Adam and 1-bit LAMB first take 100 dense ones."""
REPEATS, GROUPS = 10, 3
SINGLE = 33
"""Steps that are timed one by one: 16 is the longest interval between messages."""
DRIVERS = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


class AtHand(NamedTuple):
    """Accelerators of this machine: a key of `DEVICES`, and how many there are."""

    name: str
    count: int


def has_driver() -> bool:
    """Whether this machine has a GPU's or a TPU's driver; without one JAX only complains."""
    return any(glob.glob(files) for files in DRIVERS)


def at_hand() -> AtHand | None:
    """What kind of accelerator JAX finds here; None for none.

    Raises:
      ValueError: For one that is not described.
    """
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return None
    kinds = [name for name, device in DEVICES.items() if device.kind in devices[0].device_kind]
    if not kinds:
        raise ValueError(
            f"got {devices[0].device_kind}, need one of {', '.join(DEVICES)}; describe it in "
            "benchmarks/accelerators_devices.py, or write --no-run"
        )
    return AtHand(kinds[0], len(devices))


def measured(device: str, model: str, method: str, sizes: tuple[int, ...], mocked: bool) -> dict:
    """Runs a step on all devices, and says how long it takes.

    Args:
      device: What they are, a key of `DEVICES`.
      model: A key of `MODELS`.
      method: A key of `METHODS`.
      sizes: Of the mesh that the devices become.
      mocked: Whether all of them but one are made up, see `MOCKED`.

    Returns:
      `measured`: what `time_step` returns; what the roofline predicts for this very program and its
      few tokens over links that take no time; its kernels and copies moved; and the bytes that it
      held at most, with those that the compiler counts.
    """
    here, mesh = jax.local_devices()[0], mesh_from(jax.devices(), sizes)
    built = build_step(model_for(device, model), METHODS[method], mesh)
    step = compile_step(built)
    found = facts(step, step.as_text(), built, device, sizes)
    # The prediction of a row is for a large batch; this is for the one that runs.
    large = gradient_flops(built.config.model, built.numel, mesh.size)
    less = (1 - _share(built)) * large / DEVICES[device].flops
    told = time_step(built, step, mocked=mocked) | {
        "predicted_seconds": found["predicted"]["unlimited"] - less
    }
    told |= {name: found[name] for name in ("kernels", "moved_copies")}
    told |= {"compiler_peak_bytes": found["memory"]["peak_bytes"], "peak_bytes": _held(here)}
    told |= {"mocked": True} if mocked else {}
    return {"measured": told | {"hardware": here.device_kind, "jax": jax.__version__}}


def time_step(
    built: Built, step, warm_up: int = WARM_UP, single: int = SINGLE, mocked: bool = False
) -> dict:
    """Times steps from random parameters and tokens; of mocked messages the loss is meaningless.

    Returns:
      `seconds` of a step among `REPEATS` queued ones, the median of `GROUPS`; `slowest_seconds`, of
      `single` steps that each wait for the one before; and the kernels of the last steps, as
      `summary` returns them.
    """
    # Not by `device_put`, which compares the arrays of all processes.
    everywhere = NamedSharding(built.mesh, P())
    random = jax.jit(lambda: build.random_params(built.config), out_shardings=everywhere)
    params, state = built.init(random())
    rows = np.random.default_rng(0).integers(0, 256, built.batch.shape, np.int32)
    shape, sharding = built.batch.shape, built.batch.sharding
    batch = jax.make_array_from_callback(shape, sharding, lambda index: rows[index])

    def steps(count: int) -> float:
        nonlocal params, state
        began = time.perf_counter()
        for _ in range(count):
            params, state, metrics = step(params, state, batch)
        loss = np.asarray(metrics["loss"].addressable_data(0))  # waits
        if not (mocked or np.all(np.isfinite(loss))):
            raise RuntimeError(f"the loss became {loss}")
        return (time.perf_counter() - began) / count

    steps(warm_up)
    slowest = max(steps(1) for _ in range(single))
    queued = statistics.median(steps(REPEATS) for _ in range(GROUPS))
    kernels = profiled(lambda: steps(1))
    return {"seconds": queued, "slowest_seconds": slowest} | kernels


def _held(device: jax.Device) -> int | None:
    """The most bytes that were in use at a time; None where the device does not say."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def _share(built: Built) -> float:
    """Tokens of the batch that runs, as a share of those that the roofline assumes."""
    rows, length = built.batch.shape
    return rows * (length - 1) / (SEQUENCES * CONTEXT)


RESULTS = rows_file.RESULTS / "accelerators.json"

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


MOCKED = {"CUDA_VISIBLE_DEVICES": "0", "JAX_MOCK_GPU_TOPOLOGY": "1x{}x1"}
"""Environment of a process with one GPU, for which XLA makes up the other hosts' GPUs."""


def run_at_hand(
    models: Sequence[str], methods: Sequence[str], mocked: Sequence[str] = ()
) -> Iterator[dict]:
    """Yields rows of the measured steps on this machine's accelerators; none without any.

    On all devices; or on one, for meshes of which the others are `mocked`.
    """
    found = apart(at_hand, environment={}) if has_driver() else None
    meshes = [*mocked] or [str(found and found.count)]
    for mesh, model, method in itertools.product(meshes, models, methods) if found else ():
        key = dict(zip(KEY, (found.name, model, method, mesh), strict=True))
        sizes = tuple(map(int, mesh.split("x")))
        hosts = {k: v.format(math.prod(sizes)) for k, v in MOCKED.items()} if mocked else {}
        step = measured, found.name, model, method, sizes, bool(mocked)
        try:
            yield key | apart(*step, environment=hosts)
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
        return f"{where}: {accelerators_tables.measured_cell(row['measured'])}"
    return (
        f"{where}: {row['moved_copies']:.1f} copies moved, {row['kernels']} kernels, "
        f"{row['unknown_loops']} loops of unknown length, {row['messages_inside']} messages in "
        f"loops or branches, temp {row['memory']['temp_copies']:.1f} copies, compiled in "
        f"{row['compile_seconds']:.0f} s"
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; an error for devices without a compiler."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = lambda name, known, default: parser.add_argument(
        name, nargs="+", choices=known, default=default
    )
    add("--devices", list(DEVICES), ["h100"])
    add("--models", list(MODELS), ["124m"])
    add("--methods", list(METHODS), ["dense", "q4", "cocktail"])
    parser.add_argument("--meshes", nargs="+", default=["8"], help="such as 8, 16x8, 128x8")
    parser.add_argument("--mocked", nargs="+", default=[], help="meshes to run on one GPU")
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS, help="file for the rows")
    parser.add_argument("--figure", type=pathlib.Path, help="draw all rows of the file, as .svg")
    parser.add_argument("--no-run", action="store_true", help="compile alone")
    parser.add_argument("--no-compile", action="store_true", help="run alone, needs no compilers")
    found = parser.parse_args(argv)
    for name in [] if found.no_compile else found.devices:
        if (reason := unavailable(name)) is not None:
            parser.error(reason)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Makes the rows one by one and saves after each; then prints the file's table."""
    options = arguments(argv)
    rows = rows_file.read(options.json)
    for mesh in [] if options.no_compile else options.meshes:
        for device in options.devices:
            for model in options.models:
                for method in options.methods:
                    rows = _saved(options.json, rows, compiled(device, model, method, mesh))
    run = () if options.no_run else run_at_hand(options.models, options.methods, options.mocked)
    for new in run:
        rows = _saved(options.json, rows, new)
    print(accelerators_tables.table(rows), accelerators_tables.measured_table(rows), sep="\n\n")
    if options.figure:
        accelerators_tables.draw(rows, options.figure)


if __name__ == "__main__":
    main()
