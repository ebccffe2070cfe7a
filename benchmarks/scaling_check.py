"""Compares the model of `benchmarks.scaling` with measured steps over a shaped network.

    sudo python -m benchmarks.scaling_check --json FILE [--hosts 2 4 8] [--rates 100mbit]

Hosts are processes in network namespaces; see benchmarks/network.py. Messages are read from the
update that is compiled for the number of devices, as in benchmarks.scaling. The gradient and the
update without messages, which share the machine's cores, are timed on all hosts at once. A round's
latency is that of an all-reduce of 4 kB. The model assumes rings that reach the rate of a link,
adds headers of TCP/IP, and overlaps nothing. `error` is the predicted over the measured time of a
step, minus 1; `efficiency` is the share of a step without waiting for the network.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import tempfile

from benchmarks import network, planner
from benchmarks import rows as rows_file
from benchmarks.slow_network_methods import LAMB, METHODS, MODELS
from benchmarks.slow_network_worker import config_of
from jaxcomp import planner as model
from jaxcomp.launch.exits import clean_exits
from train.placement import devices
from train.plan import planning

SIZES = (4096, 65536)  # bytes: the smallest one gives the latency


def predicted_seconds(
    messages: list[model.Message], found: planner.Measured, compute_seconds: float, hosts: int
) -> float:
    """A step in the model of `benchmarks.scaling`, plus the time of its update.

    Args:
      messages: Messages of the step, compiled for the number of devices.
      found: Has the latency and the rate.
      compute_seconds: Seconds of the gradient and the update.
      hosts: Number of hosts.
    """
    latency = found.link["all-reduce"]["seconds"][0] / (2 * (hosts - 1))
    rate = network.bits_per_second(found.rate) / planner.HEADERS
    return compute_seconds + model.network_seconds(
        messages, model.uniform_link(rate, latency, hosts)
    )


def rows_of(found: planner.Measured, options: argparse.Namespace, hosts: int) -> list[dict]:
    """The rows of one rate and number of hosts."""
    rows = []
    for name, run in found.runs.items():
        config = config_of(METHODS[name], MODELS[options.model], hosts, options.sequences)
        messages = planning.make_method(name, config, devices.make_mesh(hosts), name).messages
        compute = found.gradient + found.local[name]
        predicted = predicted_seconds(messages, found, compute, hosts)
        # Steps of methods that skip rounds differ by design.
        middle = statistics.fmean if run["skips_rounds"] else statistics.median
        measured = middle(run["seconds"])
        rows.append(
            {
                "method": name,
                "hosts": hosts,
                "rate": found.rate,
                "predicted_seconds": predicted,
                "measured_seconds": measured,
                "error": predicted / measured - 1,
                "predicted_efficiency": compute / predicted,
                "measured_efficiency": compute / measured,
                "compute_seconds": compute,
                "messages": [dataclasses.asdict(message) for message in messages],
                "link": found.link,
                "all_seconds": run["seconds"],
                "model": options.model,
                "sequences": options.sequences,
                **found.facts[name],
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    """The rows in Markdown, then the median error."""
    lines = ["| method | hosts | rate | predicted | measured | error | efficiency |"]
    lines.append("|---" * 7 + "|")
    for row in rows:
        times = f"{1e3 * row['predicted_seconds']:.0f} ms | {1e3 * row['measured_seconds']:.0f} ms"
        shares = f"{row['predicted_efficiency']:.0%}, measured {row['measured_efficiency']:.0%}"
        place = f"{row['method']} | {row['hosts']} | {row['rate']}"
        lines.append(f"| {place} | {times} | {row['error']:+.0%} | {shares} |")
    middle = statistics.median(abs(row["error"]) for row in rows)
    return "\n".join([*lines, f"\nmedian error {middle:.1%}"])


def main(args: list[str]) -> None:
    """Measures each number of hosts, saves after each rate, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["100mbit"], help="as 500mbit")
    parser.add_argument("--methods", nargs="+", default=[LAMB, "SLAMB"], choices=list(METHODS))
    parser.add_argument("--model", default="0.5M", choices=list(MODELS))
    parser.add_argument("--sequences", type=int, default=2, help="of one host and step")
    parser.add_argument("--steps", type=int, default=16, help="timed steps of a row")
    parser.add_argument("--warmup", type=int, default=8, help="steps before them")
    options = parser.parse_args(args)
    if (reason := network.unavailable()) is not None:
        raise ValueError(reason)
    devices.start(max(options.hosts))
    rows: list[dict] = []
    for hosts in options.hosts:
        with network.network(hosts) as net, tempfile.TemporaryDirectory() as folder:
            for found in planner.measurements(net, options, pathlib.Path(folder), SIZES):
                rows += rows_of(found, options, hosts)
                print(table(rows[-len(found.runs) :]), flush=True)
                if options.json:
                    rows_file.write(options.json, rows)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
