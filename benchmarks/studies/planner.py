"""Compares the planner's predictions with measured steps over a shaped network.

    sudo python -m benchmarks.studies.planner --json FILE [--hosts 2 4] [--rates unlimited 100mbit]
    python -m benchmarks.studies.planner --recorded benchmarks/results/slow_network.json

Hosts are processes in network namespaces; see benchmarks/network.py. At every rate the hosts sweep
the link, and for every method time its update, the gradient, and then real steps, so that other
load on the machine affects all of them. `error` is the predicted over the measured time, minus 1;
`regret` is the loss of the recommended method against the best.

With --recorded nothing runs: rows of benchmarks.slow_network at limited rates are predicted from
those at the unlimited rate, the bytes of the report, and the rate.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import commands, network, worker
from benchmarks import rows as rows_file
from benchmarks.peers import PEERS
from benchmarks.slow_network import (
    ALONE,
    ENVIRONMENT,
    HEADERS,
    SECONDS,
    Team,
    programs,
)
from benchmarks.slow_network_figure import seconds
from benchmarks.worker import DENSE, METHODS, MODELS, UPDATES
from jaxcomp import planner
from jaxcomp.measure import link_probe
from train.config.run import AXIS_NAME
from train.placement import devices
from train.plan import planning

SHARDED = [name for name in METHODS if name not in UPDATES]
CHOSEN = (DENSE, "dense bfloat16", "8 bits", "4 bits", "1 bit", "0/1 Adam, every 4th")
PERIOD = 4  # steps after which those of a method that skips rounds repeat
RATES = (network.UNLIMITED, "500mbit", "100mbit", "25mbit")


def predict(
    link: dict, sends: dict[str, list[dict]], local: dict[str, float], gradient: float, hosts: int
) -> planner.Plan:
    """The plan from the hosts' measurements.

    Args:
      link: Costs of collectives, by their names.
      sends: Messages of each method.
      local: Seconds of each method's update without messages.
      gradient: Seconds of the gradient.
      hosts: How many there are.
    """

    def method(name):
        messages = tuple(planner.Message(**message) for message in sends[name])
        method = planner.Method(name, messages, changes="" if name == DENSE else "yes")
        codec = planning.codec(method, local[name] - local[DENSE], hosts)
        return dataclasses.replace(method, codec_seconds=codec)

    costs = {op: planner.Cost(*map(tuple, cost.values())) for op, cost in link.items()}
    return planner.plan([method(name) for name in sends], costs, gradient + local[DENSE])


class Measured(NamedTuple):
    """The hosts' measurements at one rate, in seconds, by method if they depend on it."""

    rate: str
    link: dict[str, dict]  # costs of collectives, by their names
    sends: dict[str, list[dict]]  # messages
    local: dict[str, float]  # the update without messages
    gradient: float
    runs: dict[str, dict]  # answers of the worker's `run`
    facts: dict[str, dict]  # answers of its `build`


def measurements(
    net: network.Network,
    options: argparse.Namespace,
    folder: pathlib.Path,
    sizes: Sequence[int] = link_probe.SIZES,
) -> Iterator[Measured]:
    """Starts the hosts of a network and measures every rate.

    Args:
      net: The hosts.
      options: As `parse` reads them.
      folder: For logs and compiled programs.
      sizes: Sizes of the messages by which the link is measured, in bytes.
    """
    team = Team([sys.executable, "-m", "benchmarks.studies.planner"], {}, connected=True)
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))
    cache = {"JAX_COMPILATION_CACHE_DIR": compiled}
    with commands.start(programs(team, net.hosts), ENVIRONMENT | cache, folder) as workers:
        read = {"model": MODELS[options.model], "sequences": options.sequences}
        commands.call(workers, "read", SECONDS, **read)
        sends, facts = {}, {}
        for name in options.methods:
            build = {"method": name, "update": UPDATES[name]}
            build |= {"model": MODELS[options.model], "sequences": options.sequences}
            facts[name] = commands.call(workers[:1], "build", SECONDS, **build)[0]
            commands.call(workers[1:], "build", SECONDS, **build)
            sends[name] = commands.call(workers, "prepare", SECONDS, **build)[0]
        for rate in options.rates:
            network.shape(net, rate)
            ask = lambda name, **more: commands.call(workers, name, SECONDS, **more)[0]
            link, gradients, local, runs = ask("link", sizes=list(sizes)), [], {}, {}
            for name in options.methods:
                local[name] = ask("local", method=name)
                gradients.append(ask("gradient"))
                ask("run", method=name, steps_of_run=options.warmup)
                runs[name] = ask("run", method=name, steps_of_run=options.steps)
            gradient = statistics.median(gradients)
            yield Measured(rate, link, sends, local, gradient, runs, facts)


def measured_rows(net: network.Network, options, folder: pathlib.Path) -> Iterator[dict]:
    """Rows of every rate and method, for the hosts of a network."""
    count = len(net.hosts)
    for found in measurements(net, options, folder):
        plan = predict(found.link, found.sends, found.local, found.gradient, count)
        for row in plan.rows:
            name = row.method.name
            run = found.runs[name]
            yield {
                "hosts": count,
                "rate": found.rate,
                "method": name,
                "predicted_seconds": row.step_seconds,
                "measured_seconds": typical(run["seconds"], run["skips_rounds"]),
                "network_seconds": row.network_seconds,
                "codec_seconds": row.method.codec_seconds,
                "local_seconds": found.local[name],
                "gradient_seconds": found.gradient,
                "sent_bytes": row.sent_bytes,
                "recommended": row is plan.recommended,
                "reason": plan.reason,
                "link": found.link,
                "all_seconds": run["seconds"],
                "model": options.model,
                "sequences": options.sequences,
                "steps": options.steps,
                **found.facts[name],
            }


def recorded_rows(rows: list[dict]) -> Iterator[dict]:
    """Predicts rows of benchmarks.slow_network at limited rates from those at the unlimited rate.

    Only for methods with rows at all rates, and not for sharded ones, which plans do not support.
    """
    alone = next(seconds(row) for row in rows if row["method"] == ALONE)
    rows = [row for row in rows if row["method"] not in (ALONE, *SHARDED, *PEERS)]
    measured = {(row["method"], row["rate"]): seconds(row) for row in rows}
    rates = {row["rate"] for row in rows}
    rows = [row for row in rows if all((row["method"], rate) in measured for rate in rates)]
    unlimited = [row for row in rows if row["rate"] == network.UNLIMITED]
    methods = [
        planner.Method(
            row["method"],
            (planner.Message("all-reduce", HEADERS * row["report_bytes"]),),
            codec_seconds=seconds(row) - alone,
            changes="" if row["method"] == DENSE else "yes",
        )
        for row in unlimited
    ]
    for rate in dict.fromkeys(row["rate"] for row in rows if row["rate"] != network.UNLIMITED):
        hosts = rows[0]["hosts"]
        link = planner.uniform_link(network.bits_per_second(rate), 0.0, hosts)
        plan = planner.plan(methods, link, alone)
        for row in plan.rows:
            yield {
                "hosts": hosts,
                "rate": rate,
                "method": row.method.name,
                "predicted_seconds": row.step_seconds,
                "measured_seconds": measured[row.method.name, rate],
                "recommended": row is plan.recommended,
            }


def typical(times: list[float], skips_rounds: bool) -> float:
    """Seconds of a step: the median; if steps differ by design, the mean of each kind's median.

    One step that a busy machine delays would change a mean over all steps, but not medians.
    """
    period = PERIOD if skips_rounds else 1
    return statistics.fmean(statistics.median(times[phase::period]) for phase in range(period))


def error(row: dict) -> float:
    """The predicted over the measured time, minus 1."""
    return row["predicted_seconds"] / row["measured_seconds"] - 1


def regrets(rows: list[dict]) -> dict[tuple[int, str], float]:
    """By hosts and rate: the relative extra time of the recommended method over the best."""
    groups: dict[tuple[int, str], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["hosts"], row["rate"]), []).append(row)
    taken = lambda group: next(row["measured_seconds"] for row in group if row["recommended"])
    best = lambda group: min(row["measured_seconds"] for row in group)
    return {key: taken(group) / best(group) - 1 for key, group in groups.items()}


def table(rows: list[dict]) -> str:
    """The rows as Markdown, then the median error and the regrets."""
    lines = []
    for row in rows:
        times = [f"{1e3 * row[f'{when}_seconds']:.0f} ms" for when in ("predicted", "measured")]
        name = f"**{row['method']}**" if row["recommended"] else row["method"]
        lines.append([row["hosts"], row["rate"], name, *times, f"{error(row):+.0%}"])
    lost = regrets(rows)
    within = sum(regret <= 0.1 for regret in lost.values())
    head = ["hosts", "rate", "method", "predicted", "measured", "error"]
    return (
        f"{rows_file.markdown(head, lines)}\n\n"
        f"median error {statistics.median(abs(error(row)) for row in rows):.1%}; the "
        f"recommended method is within 10% of the best in {within} of {len(lost)} cases "
        f"({', '.join(f'{n} hosts, {rate}: {lost[n, rate]:.0%}' for n, rate in lost)})"
    )


def functions(replicas: int) -> dict:
    """What a JAX host of this program does on request, all hosts together, except `build`."""
    steps: dict[str, dict] = {}
    text: dict[str, Any] = {}
    timers: dict[str, Any] = {}

    def build(method: str, update: str, model: dict[str, int], sequences: int) -> dict:
        steps[method] = worker.functions(replicas, text)
        return steps[method]["build"](update=update, model=model, sequences=sequences)

    def prepare(method: str, update: str, model: dict[str, int], sequences: int) -> list[dict]:
        config = worker.config_of(update, model, replicas, sequences)
        mesh = devices.make_mesh(replicas)
        timers[method] = planning.update_timer(config, mesh)
        if "" not in timers:
            timers[""] = planning.gradient_timer(config, mesh)
        return steps[method]["sends"]()

    def link(sizes: list[int]) -> dict[str, dict]:
        found = link_probe.measure_link(devices.make_mesh(replicas), AXIS_NAME, sizes)
        return {op: dataclasses.asdict(cost) for op, cost in found.items()}

    return {
        "read": worker.functions(replicas, text)["read"],
        "build": build,
        "prepare": prepare,
        "link": link,
        "local": lambda method: timers[method](),
        "gradient": lambda: timers[""](),
        "run": lambda method, steps_of_run: steps[method]["run"](steps_of_run),
    }


def parse(args: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--recorded", type=pathlib.Path, help="rows of benchmarks.slow_network")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="as 500mbit, or unlimited")
    parser.add_argument("--methods", nargs="+", default=list(CHOSEN), choices=list(UPDATES))
    parser.add_argument("--model", default="0.5M", choices=list(MODELS))
    parser.add_argument("--sequences", type=int, default=2, help="of one host and step")
    parser.add_argument("--steps", type=int, default=24, help="timed steps of a row")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    options = parser.parse_args(args)
    if DENSE not in options.methods or min(options.hosts) < 2:
        raise ValueError(f"a plan compares with {DENSE!r}, over 2 hosts or more.")
    if options.steps % PERIOD or options.warmup % PERIOD:
        raise ValueError(f"steps of a row are a multiple of {PERIOD}; write --steps 24 --warmup 4.")
    for rate in options.rates:
        network.bits_per_second(rate)
    return options


def main(args: list[str]) -> None:
    """Measures all rows, saves after each, and prints them."""
    options = parse(args)
    if options.recorded:
        print(table(list(recorded_rows(json.loads(options.recorded.read_text())))))
        return
    if (reason := network.unavailable()) is not None:
        raise ValueError(reason)
    rows: list[dict] = []
    for count in options.hosts:
        with network.network(count) as net, tempfile.TemporaryDirectory() as folder:
            for row in measured_rows(net, options, pathlib.Path(folder)):
                rows.append(row)
                print(f"{count} hosts, {row['rate']}, {row['method']}: {error(row):+.0%}")
                if options.json:
                    rows_file.write(options.json, rows)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    worker.main_or_host(lambda: main(sys.argv[1:]), functions)
