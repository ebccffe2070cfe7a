"""Times training steps of every method over a slow network, and counts what it carries.

    sudo python -m benchmarks.slow_network [--quick] [--json FILE]

Each host is a process in its own network namespace; see benchmarks/network.py. One start of the
hosts serves all methods, and one compilation of a method serves all rates; the links are reshaped
in between. Bytes are those of the hosts' interfaces, next to those of jaxcomp's report on the
compiled program. With --devices 1 2 a host has one device, and then two, each a process; its
interface sends the same. With --torch-python, peers in PyTorch train the same model from the same
weights on the same rows; benchmarks.peers says how to make that Python.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import commands, network
from benchmarks import rows as rows_file
from benchmarks.peers import AUTHORS, PEERS
from benchmarks.slow_network_figure import draw, table
from benchmarks.worker import DENSE, METHODS, MODELS, UPDATES, config_of, period_of
from jaxcomp.compressors.policies import path_of
from jaxcomp.launch.exits import clean_exits
from train import examples
from train.config import Config
from train.placement import build

ALONE = "no exchange"
QUICK_METHODS = (ALONE, DENSE, "4 bits", "largest of 64, 4 bits")
RATES = (network.UNLIMITED, "1gbit", "500mbit", "100mbit")

# Hosts share the machine's cores: with one thread each they do not compete for them.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    # Large pages: otherwise the first touch of its buffers takes a step as long as Adam.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
}
# TCP/IP: 66 bytes of headers on 1,448 of payload, and 66 of acknowledgement for each two of them.
HEADERS = 1 + 66 / 1448 + 66 / 2896
TOLERANCE = 0.05
SECONDS = 600.0  # to wait for an answer; a machine may be busy


class Team(NamedTuple):
    """Hosts that are started together, and what they build."""

    program: list[str]  # a worker's command, up to its options
    specs: dict[str, dict]  # method -> arguments of the worker's `build`
    connected: bool  # whether the hosts train together
    devices: int = 1  # of a host, each a process


def teams(
    methods: list[str],
    torch_python: str | None,
    has_code: bool = False,
    devices: Sequence[int] = (1,),
) -> list[Team]:
    """The teams of hosts for some methods, in the order of the tables of methods.

    Args:
      methods: Their names.
      torch_python: The peers' Python; None for no peers.
      has_code: Whether the authors' code is available.
      devices: Devices per host, for each team that trains with JAX.
    """
    jax_host = [sys.executable, "-m", "benchmarks.worker"]
    torch_host = [torch_python or "", "-m", "benchmarks.peers.host"]
    updates = {
        name: {"update": method.update}
        | ({"qsdp": method.qsdp} if method.qsdp else {"overlap": name.endswith("overlapped")})
        for name, method in METHODS.items()
        if name in methods
    }
    alone = {ALONE: {"update": UPDATES[DENSE]}} if ALONE in methods else {}
    everyone = [Team(jax_host, alone, False)]
    for count in devices:
        # Behind one interface: together they send what one device would.
        several = {
            f"{name}, {count} devices": spec | {"fast": count} for name, spec in updates.items()
        }
        everyone.append(Team(jax_host, several if count > 1 else updates, True, count))
    # Each peer runs in its own processes, since some modify PyTorch.
    for peer in dict.fromkeys(peer.peer for peer in PEERS.values()):
        specs = {
            name: spec._asdict()
            for name, spec in PEERS.items()
            if name in methods and spec.peer == peer
        }
        if torch_python and (has_code or peer not in AUTHORS):
            everyone.append(Team(torch_host, specs, True))
    return [team for team in everyone if team.specs]


def programs(team: Team, hosts: tuple[network.Host, ...]) -> list[list[str]]:
    """The commands of a team, host after host."""
    count = len(hosts) * team.devices if team.connected else 1
    options = ["--coordinator", f"{hosts[0].address}:7000", "--num-processes", str(count)]
    options += ["--interface", network.INTERFACE]
    places = [host for host in hosts for _ in range(team.devices)]
    return [
        network.inside(
            host, [*team.program, *options, "--process-id", str(i if team.connected else 0)]
        )
        for i, host in enumerate(places)
    ]


def write_work(path: pathlib.Path, config: Config, steps: int) -> None:
    """Writes the common work of peers, weights and rows of a run, for programs without JAX.

    Args:
      path: An `.npz` file: the parameters by their paths, `train` i32[steps, batch, context + 1]
        and `validation` i32[eval_batches, batch, context + 1].
      config: The run.
      steps: Number of steps whose rows are written.
    """
    made, rows = examples.read(config), slice(0, config.data.batch)
    leaves = jax.tree_util.tree_leaves_with_path(build.random_params(config))
    arrays = {path_of(key): np.asarray(leaf) for key, leaf in leaves}
    arrays["train"] = np.stack([made.train(step, rows) for step in range(steps)])
    arrays["validation"] = np.stack(
        [made.validation(number, rows) for number in range(config.eval_batches)]
    )
    np.savez(path, **arrays)


def measure(workers, hosts, steps: int, warmup: int) -> dict:
    """Runs some steps on all hosts at once, and measures seconds and the bytes of their interfaces.

    Returns:
      Fields of the row: `steps`, `step_seconds`, `cpu_seconds`, `nic_bytes`, `retransmitted`
      packets, `report_bytes`, `skips_rounds` and `loss`; per step, averaged over hosts.
    """
    if warmup:
        commands.call(workers, "run", SECONDS, steps=warmup)
    before = [network.counters(host) for host in hosts]
    answers = commands.call(workers, "run", SECONDS, steps=steps)
    after = [network.counters(host) for host in hosts]
    counts = list(zip(before, after, strict=True))
    total = lambda name: sum(getattr(new, name) - getattr(old, name) for old, new in counts)
    per_step = lambda name: total(name) / (len(hosts) * steps)
    # Hosts wait for each other, so a step takes its average time.
    seconds = [
        statistics.fmean(each)
        for each in zip(*(answer["seconds"] for answer in answers), strict=True)
    ]
    reported = answers[0]["report_bytes"]
    quartiles = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "steps": steps,
        "step_seconds": {
            "median": quartiles[1],
            "mean": statistics.fmean(seconds),
            "quartiles": [quartiles[0], quartiles[2]],
            "all": seconds,
        },
        "cpu_seconds": statistics.fmean(answer["cpu_seconds"] for answer in answers) / steps,
        "nic_bytes": {"sent": per_step("sent"), "received": per_step("received")},
        "retransmitted": per_step("retransmitted"),
        "report_bytes": reported and reported * (len(workers) // len(hosts)),
        "skips_rounds": answers[0]["skips_rounds"],
        "loss": statistics.fmean(answer["loss"] for answer in answers),
    }


def compare(nic_bytes: float, report_bytes: float | None, collectives: int | None) -> dict:
    """Compares an interface's bytes with the report's, plus headers of TCP/IP.

    Returns:
      Fields of the row: `nic_over_report`, `agrees` and `disagreement`, a sentence if they do not
      agree; None if nothing is to be sent, or there is no report.
    """
    if not report_bytes:
        return {"nic_over_report": None, "agrees": None, "disagreement": None}
    more, disagreement = nic_bytes - HEADERS * report_bytes, None
    if nic_bytes < (1 - TOLERANCE) * report_bytes:
        less = 1 - nic_bytes / report_bytes
        disagreement = f"the interface sent {less:.0%} less than the report says"
    elif more > TOLERANCE * HEADERS * report_bytes:
        disagreement = (
            f"the interface sent {more:,.0f} bytes a step more than the report says and headers "
            f"take: {more / collectives:,.0f} for each of {collectives} collectives"
        )
    ratio = nic_bytes / report_bytes
    return {"nic_over_report": ratio, "agrees": not disagreement, "disagreement": disagreement}


def rows_of(
    team: Team,
    net: network.Network,
    rates: list[str],
    model: str,
    options: argparse.Namespace,
    folder: pathlib.Path,
) -> Iterator[dict]:
    """Starts a team's hosts and measures every method at every rate; those alone at the first."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    environment = ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": cache}
    network.shape(net, network.UNLIMITED)
    with commands.start(programs(team, net.hosts), environment, folder) as workers:
        if any("update" in spec for spec in team.specs.values()):
            read = {"model": MODELS[model], "sequences": options.sequences}
            commands.call(workers, "read", SECONDS, **read)
        for method, spec in team.specs.items():
            build = dict(spec, model=MODELS[model])
            if "update" in spec:
                build["sequences"] = options.sequences
                # The others find the first host's program in the cache.
                facts = commands.call(workers[:1], "build", SECONDS, **build)[0]
                commands.call(workers[1:], "build", SECONDS, **build)
            else:
                build |= {"work": str(work_of(model, options, folder)), "code": options.peer_code}
                facts = commands.call(workers, "build", SECONDS, **build)[0]
            for rate in rates if "no exchange" not in method else rates[:1]:
                network.shape(net, rate)
                steps = -(-options.steps // period_of(method)) * period_of(method)
                measured = measure(workers, net.hosts, steps, options.warmup)
                yield {
                    "method": method,
                    **spec,
                    "rate": rate,
                    "hosts": len(net.hosts),
                    "devices": team.devices,
                    "model": model,
                    "sequences": options.sequences,
                    **facts,
                    **measured,
                    **compare(
                        measured["nic_bytes"]["sent"],
                        measured["report_bytes"],
                        facts["collectives"],
                    ),
                    "threads": f"{team.devices} a host on {os.cpu_count()} cores",
                    "environment": ENVIRONMENT,
                }
            network.shape(net, network.UNLIMITED)


def work_of(model: str, options: argparse.Namespace, folder: pathlib.Path) -> pathlib.Path:
    """The file with the weights and rows of the JAX hosts, for the PyTorch hosts."""
    path = folder / "work.npz"
    if not path.exists():
        update = UPDATES[DENSE]
        config = config_of(update, MODELS[model], options.hosts, options.sequences)
        write_work(path, config, options.warmup + options.steps)
    return path


def torch_of(python: str) -> str | None:
    """The reason why this Python cannot run the PyTorch rows; None if it can."""
    try:
        found = subprocess.run(
            [python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"],
            capture_output=True,
            text=True,
        )
    except OSError as error:
        return str(error)
    return None if found.returncode == 0 else found.stderr.strip().splitlines()[-1]


def parse(args: list[str]) -> argparse.Namespace:
    """Reads the command line; --quick changes the defaults of other options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows; a PNG is next to it")
    parser.add_argument("--quick", action="store_true", help="2 hosts, 2 rates, 3 methods")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices", type=int, nargs="+", default=[1], help="of a host, like 1 2")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="500mbit, or unlimited")
    every = [ALONE, *METHODS, *PEERS]
    parser.add_argument("--methods", nargs="+", default=every, choices=every, metavar="NAME")
    parser.add_argument("--model", default="14M", choices=list(MODELS))
    parser.add_argument("--sequences", type=int, default=1, help="of one host and step")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a row")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--torch-python", help="Python of the peers; without it there are none")
    parser.add_argument("--peer-code", help="folder of the authors' code; without it, not theirs")
    if "--quick" in args:
        quick = {"hosts": 2, "rates": [network.UNLIMITED, "100mbit"], "steps": 4}
        parser.set_defaults(**quick, model="0.5M", methods=list(QUICK_METHODS))
    options = parser.parse_args(args)
    for rate in options.rates:
        network.bits_per_second(rate)
    if options.steps < 2:
        raise ValueError(f"--steps {options.steps} has no quartiles; write --steps 2.")
    return options


def main(args: list[str]) -> None:
    """Measures all rows, saves after each, and draws them."""
    options = parse(args)
    if (reason := network.unavailable()) is not None:
        if os.name == "posix" and os.geteuid():
            raise ValueError(reason)
        print(f"skipped: {reason}")
        return
    if options.torch_python and (reason := torch_of(options.torch_python)):
        raise ValueError(f"--torch-python {options.torch_python}: {reason}")
    if not options.torch_python and set(PEERS) & set(options.methods):
        print("no PyTorch rows: --torch-python PATH names a Python that has it", file=sys.stderr)
    rows: list[dict] = []
    with network.network(options.hosts) as net, tempfile.TemporaryDirectory() as folder:
        started = teams(
            options.methods, options.torch_python, bool(options.peer_code), options.devices
        )
        for team in started:
            for row in rows_of(
                team, net, options.rates, options.model, options, pathlib.Path(folder)
            ):
                rows.append(row)
                report(row, print)
                if options.json:
                    rows_file.write(options.json, rows)
    print(f"\n{table(rows)}")
    if options.json:
        draw(rows, options.json.with_suffix(".png"))


def report(row: dict, show: Callable[[str], None]) -> None:
    """Prints a row's result in one line."""
    sent, seconds = row["nic_bytes"]["sent"], row["step_seconds"]
    show(
        f"{row['method']}, {row['rate']}: {1e3 * seconds['median']:.0f} ms a step, "
        f"{sent:,.0f} bytes sent" + (f"; {row['disagreement']}" if row["disagreement"] else "")
    )


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
