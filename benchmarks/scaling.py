"""Bytes and memory of large-batch methods on up to 1,024 abstract devices, and a model of scaling.

    python -m benchmarks.scaling [--json FILE]

Bytes and memory of one replica are read from the update that XLA compiles for this many devices;
nothing is allocated. Step times come from a model. It assumes that each replica keeps its share of
the batch, so that the gradient takes the same time at any number; that a ring or all-to-all reaches
the rate of a replica's link, and each of its rounds waits for one latency; and that nothing
overlaps. It leaves out the update's own time.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax

from benchmarks import rows as rows_file
from configs.shapes import bert_large_slamb
from jaxcomp import planner
from train.config import Config
from train.placement import devices
from train.plan import planning

METHODS = {
    "LAMB": "chain(compressed_mean(identity(), axis_name), lamb(learning_rate))",
    "LAMB, bfloat16": "chain(compressed_mean(cast('bfloat16'), axis_name), lamb(learning_rate))",
    # A sixth of the steps dense, as in benchmarks/methods.py.
    "1-bit LAMB": "one_bit_lamb(learning_rate, axis_name, freeze_step=1167)",
    "SLAMB": "slamb(learning_rate, axis_name, density=0.1, sync_every=100)",
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


def main() -> None:
    """Compiles the missing rows, saves after each, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    results = pathlib.Path(__file__).parent / "results"
    parser.add_argument("--json", type=pathlib.Path, default=results / "scaling.json")
    parser.add_argument("--replicas", nargs="+", type=int, default=[8, 64, 512, 1024])
    args = parser.parse_args()
    devices.start(max(args.replicas))
    config = bert_large_slamb.get_config()
    rows = json.loads(args.json.read_text()) if args.json.exists() else []
    known = {(row["method"], row["replicas"]) for row in rows}
    for replicas in args.replicas:
        for name in METHODS:
            if (name, replicas) not in known:
                rows.append(measured(config, name, replicas))
                print(f"{name}, {replicas} replicas", flush=True)
                rows_file.write(args.json, rows)
    order = {name: place for place, name in enumerate(METHODS)}
    rows.sort(key=lambda row: (order[row["method"]], row["replicas"]))
    print(table(rows))


if __name__ == "__main__":
    main()
