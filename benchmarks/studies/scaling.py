"""Bytes and memory of large-batch methods on up to 1,024 abstract devices, and a model of scaling.

    python -m benchmarks.studies.scaling [--json FILE]
    sudo python -m benchmarks.studies.scaling check --json FILE [--hosts 2 4 8] [--rates 100mbit]

Bytes and memory of one replica are read from the update that XLA compiles for this many devices;
nothing is allocated. Step times come from a model. It assumes that each replica keeps its share of
the batch, so that the gradient takes the same time at any number; that a ring or all-to-all reaches
the rate of a replica's link, and each of its rounds waits for one latency; and that nothing
overlaps. It leaves out the update's own time.

`check` compares the model with measured steps over a shaped network. Hosts are processes in network
namespaces; see benchmarks/network.py. The gradient and the update without messages, which share the
machine's cores, are timed on all hosts at once, and added to the model's time; so are headers of
TCP/IP. A round's latency is that of an all-reduce of 4 kB. `error` is the predicted over the
measured time of a step, minus 1; `efficiency` is the share of a step without waiting.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence

import jax

from benchmarks import methods, network
from benchmarks import rows as rows_file
from benchmarks.studies import planner as measuring
from benchmarks.worker import LAMB, MODELS, UPDATES, config_of
from configs.shapes import bert_large_slamb
from jaxcomp import planner
from jaxcomp.launch.exits import clean_exits
from train.config import Config
from train.placement import devices
from train.plan import planning

METHODS = {
    "LAMB": methods.METHODS["LAMB"].update,
    "LAMB, bfloat16": "chain(compressed_mean(cast('bfloat16'), axis_name), lamb(learning_rate))",
    "1-bit LAMB": methods.METHODS["1-bit LAMB, 1167 dense steps"].update,  # a sixth of the steps
    "SLAMB": methods.METHODS["SLAMB, every 100"].update,
    "SLAMB, 8 bits": (
        "slamb(learning_rate, axis_name, sync_every=100, "
        "compressor=compose(random_k(0.1), quantize(8)))"
    ),
}


def measured(config: Config, name: str, replicas: int) -> dict:
    """One row: bytes and memory of a method's compiled update on this many devices."""
    mesh = devices.make_mesh(replicas)
    run = planning.with_update(config, METHODS[name])
    method = planning.make_method(name, run, mesh, name)
    return {
        "method": name,
        "config": config.name,
        "replicas": replicas,
        "parameters": planning.num_elements(config),
        "messages": [dataclasses.asdict(message) for message in method.messages],
        "memory_bytes": method.memory_bytes,
        "software": f"jax {jax.__version__}",
    }


def efficiency(row: dict, rate: float, latency: float, compute_seconds: float) -> float:
    """The share of a step without waiting for the network, in the model."""
    link = planner.uniform_link(rate, latency, row["replicas"])
    messages = [planner.Message(**message) for message in row["messages"]]
    return compute_seconds / (compute_seconds + planner.network_seconds(messages, link))


def table(
    rows: list[dict],
    rates: Sequence[float] = (10e9, 25e9, 100e9),
    latency: float = 10e-6,
    compute_seconds: float = 0.137,
) -> str:
    """The rows in Markdown: bytes, memory, and the model's efficiency at each rate.

    Args:
      rows: Rows of `measured`.
      rates: bit/s of a replica's link.
      latency: Seconds of a round.
      compute_seconds: Seconds of a replica's gradient; by default what 64 sequences of 128 take at
        6 FLOP a parameter of BERT-Large and token, and 120 TFLOP/s.
    """
    lines = [
        ["method", "replicas", "bytes/step", "MiB held"] + [f"{r / 1e9:g} Gbit/s" for r in rates]
    ]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        sent = sum(message["times"] * message["sent_bytes"] for message in row["messages"])
        held = row["memory_bytes"] / 2**20
        shares = [f"{efficiency(row, rate, latency, compute_seconds):.0%}" for rate in rates]
        lines.append(
            [row["method"], f"{row['replicas']:,}", f"{sent:,.0f}", f"{held:,.0f}"] + shares
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def compiled(args: Sequence[str]) -> None:
    """Compiles the missing rows, saves after each, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, default=rows_file.RESULTS / "scaling.json")
    parser.add_argument("--replicas", nargs="+", type=int, default=[8, 64, 512, 1024])
    options = parser.parse_args(args)
    devices.start(max(options.replicas))
    config = bert_large_slamb.get_config()
    rows = rows_file.read(options.json)
    known = {(row["method"], row["replicas"]) for row in rows}
    for replicas in options.replicas:
        for name in METHODS:
            if (name, replicas) not in known:
                rows.append(measured(config, name, replicas))
                print(f"{name}, {replicas} replicas", flush=True)
                rows_file.write(options.json, rows)
    order = {name: place for place, name in enumerate(METHODS)}
    rows.sort(key=lambda row: (order[row["method"]], row["replicas"]))
    print(table(rows))


SIZES = (4096, 65536)  # bytes: the smallest one gives the latency


def predicted_seconds(
    messages: list[planner.Message], found: measuring.Measured, compute_seconds: float, hosts: int
) -> float:
    """A step in the model, plus the time of its update.

    Args:
      messages: Messages of the step, compiled for the number of devices.
      found: Has the latency and the rate.
      compute_seconds: Seconds of the gradient and the update.
      hosts: Number of hosts.
    """
    latency = found.link["all-reduce"]["seconds"][0] / (2 * (hosts - 1))
    rate = network.bits_per_second(found.rate) / measuring.HEADERS
    return compute_seconds + planner.network_seconds(
        messages, planner.uniform_link(rate, latency, hosts)
    )


def rows_of(found: measuring.Measured, options: argparse.Namespace, hosts: int) -> list[dict]:
    """The rows of one rate and number of hosts."""
    rows = []
    for name, run in found.runs.items():
        config = config_of(UPDATES[name], MODELS[options.model], hosts, options.sequences)
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


def check_table(rows: list[dict]) -> str:
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


def check(args: list[str]) -> None:
    """Measures each number of hosts, saves after each rate, and prints the table."""
    parser = argparse.ArgumentParser(prog="scaling check", description=check.__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="file for the rows")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", nargs="+", default=["100mbit"], help="as 500mbit")
    parser.add_argument("--methods", nargs="+", default=[LAMB, "SLAMB"], choices=list(UPDATES))
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
            for found in measuring.measurements(net, options, pathlib.Path(folder), SIZES):
                rows += rows_of(found, options, hosts)
                print(check_table(rows[-len(found.runs) :]), flush=True)
                if options.json:
                    rows_file.write(options.json, rows)
    print(f"\n{check_table(rows)}")


def main(args: Sequence[str]) -> None:
    """Compiles, or with the word `check` measures."""
    if args[:1] == ["check"]:
        check(args[1:])
    else:
        compiled(args)


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
