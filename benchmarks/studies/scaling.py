"""Bytes and memory of large-batch methods on up to 1,024 abstract devices, and a model of scaling.

    python -m benchmarks.studies.scaling [--json FILE]
    sudo python -m benchmarks.studies.scaling check --json FILE [--hosts 2 4 8] [--rates 100mbit]
    python -m benchmarks.studies.scaling published [--json FILE]

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

`published` compares the planner with figures of papers, from each paper's own set-up. Where a paper
says how long its gradient or its dense message takes, that time replaces the formula's. The table
of hosts, `hosts_table`, needs no run: it is the planner on rows of benchmarks.accelerators.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import jax

from benchmarks import methods, network
from benchmarks import rows as rows_file
from benchmarks.accelerators_devices import DEVICES, gradient_flops
from benchmarks.accelerators_step import MODELS as LARGE
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
    lines = []
    for row in rows:
        sent = sum(message["times"] * message["sent_bytes"] for message in row["messages"])
        held = row["memory_bytes"] / 2**20
        shares = [f"{efficiency(row, rate, latency, compute_seconds):.0%}" for rate in rates]
        cells = f"{row['replicas']:,}", f"{sent:,.0f}", f"{held:,.0f}"
        lines.append([row["method"], *cells, *shares])
    columns = [f"{rate / 1e9:g} Gbit/s" for rate in rates]
    return rows_file.markdown(["method", "replicas", "bytes/step", "MiB held", *columns], lines)


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
    lines = []
    for row in rows:
        times = [f"{1e3 * row[f'{when}_seconds']:.0f} ms" for when in ("predicted", "measured")]
        shares = f"{row['predicted_efficiency']:.0%}, measured {row['measured_efficiency']:.0%}"
        place = row["method"], row["hosts"], row["rate"]
        lines.append([*place, *times, f"{row['error']:+.0%}", shares])
    head = ["method", "hosts", "rate", "predicted", "measured", "error", "efficiency"]
    middle = statistics.median(abs(row["error"]) for row in rows)
    return f"{rows_file.markdown(head, lines)}\n\nmedian error {middle:.1%}"


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


LATENCY = 10e-6
"""Seconds of a round, where nothing else is known."""
UTILIZATION = 0.4
"""The share of a GPU's peak that its gradient reaches, where nothing else is known."""

HOSTS, HOST_RATES = (8, 64, 512, 1024), (1e9, 10e9, 100e9)
COMPILED_HOSTS, HOST_DEVICES = 16, 8
ON_HOSTS = {"dense": 1, "q4": 1, "cocktail": 1, "local_steps": 16}
"""Rows of benchmarks.accelerators, and the steps from one message to the next."""


def on_hosts(row: dict, hosts: int, codec_seconds: float) -> planner.Method:
    """A program of 16 hosts of eight devices as a method of the planner, for more or fewer hosts.

    A ring, an all-to-all and an all-gather all send (R-1)/R of something. A host's devices send at
    the same time, each its share, so that a message is all they send together.

    Args:
      row: Of `benchmarks.accelerators`; which messages overlap is read from its program.
      hosts: R.
      codec_seconds: Seconds of coding per step, averaged over a run.
    """
    counts = {op: found["all"] for op, found in row["messages"].items()}
    sent = row["nic_bytes"] * (1 - 1 / hosts) / (1 - 1 / COMPILED_HOSTS) / sum(counts.values())
    times = {op: count / ON_HOSTS[row["method"]] for op, count in counts.items()}
    return planner.Method(
        row["method"],
        tuple(planner.Message(op, sent, times[op]) for op in counts),
        codec_seconds=codec_seconds + row["sent_bytes"]["fast"] / DEVICES["h100"].link,
        changes="" if row["method"] == "dense" else "yes",
        overlaps=row["products_beside"],
    )


def codecs(rows: list[dict]) -> dict[str, float]:
    """Seconds per parameter that a step of each method takes above the dense one, on an H100.

    They were measured on an H200, which differs by its memory's bandwidth.
    """
    steps = {
        row["method"]: row["measured"]["seconds"]
        for row in rows
        if "measured" in row and (row["device"], row["model"]) == ("h200", "124m-scan")
    }
    known = (row for row in rows if row["model"] == "124m-scan" and "parameters" in row)
    slower = DEVICES["h200"].bandwidth / DEVICES["h100"].bandwidth
    each = slower / next(known)["parameters"]
    return {method: each * (seconds - steps["dense"]) for method, seconds in steps.items()}


def hosts_table(rows: list[dict]) -> str:
    """Predicted steps on hosts of eight H100, and the share of a step that computes.

    Args:
      rows: Of `benchmarks.accelerators`.
    """
    codec = codecs(rows)
    found = {(r["model"], r["method"]): r for r in rows if r["mesh"] == "16x8" and "nic_bytes" in r}
    head = ["model", "method", "hosts", *(f"{rate / 1e9:g} Gbit/s" for rate in HOST_RATES)]
    lines = []
    for model in ("1.3b", "20b"):
        compute = _compute_seconds(model, found[model, "dense"]["parameters"])
        for name in ON_HOSTS:
            row = found[model, name]
            for hosts in HOSTS:
                # Each device of a host codes its share.
                method = on_hosts(row, hosts, codec[name] * row["parameters"] / HOST_DEVICES)
                cells = [_cell(method, rate, hosts, compute) for rate in HOST_RATES]
                lines.append([model, name, f"{hosts:,}", *cells])
    return rows_file.markdown(head, lines)


def _compute_seconds(model: str, numel: int) -> float:
    """Seconds of a gradient of 16 sequences of 1,024 tokens per device, as on 16 hosts."""
    flops = gradient_flops(LARGE[model], numel, COMPILED_HOSTS * HOST_DEVICES)
    return flops / (UTILIZATION * DEVICES["h100"].flops)


def _cell(method: planner.Method, rate: float, hosts: int, compute: float) -> str:
    seconds = _step(method, rate, hosts, compute)
    return f"{seconds:,.2f} s, {compute / seconds:.0%}"


def _step(method: planner.Method, rate: float, replicas: int, compute: float) -> float:
    """Seconds of a step; one alone has no recommendation, so that it counts as exact."""
    link = planner.uniform_link(rate, LATENCY, replicas)
    alone = dataclasses.replace(method, changes="")
    return planner.plan([alone], link, compute).rows[0].step_seconds


class Published(NamedTuple):
    """A figure of a paper beside the planner's."""

    method: str
    figure: str  # what it is, with its unit
    published: float
    predicted: float | None  # None: the paper's set-up is not known
    assumed: str  # what the paper does not say, or we do not know of it


def published() -> list[dict]:
    """All figures, as rows with the error of the prediction."""
    found = [*_one_bit(), *_zero(), *_cocktail(), *_slamb(), *_streaming()]
    error = lambda one: None if one.predicted is None else one.predicted / one.published - 1
    return [one._asdict() | {"error": error(one)} for one in found]


_BERT = 333_697_024  # parameters of BERT-Large
_ETHERNET = 4.1e9  # bit/s that the paper measured of its 40 Gbit/s
# GPUs and milliseconds of an all-reduce, in 16 bits: Table 1 of 1-bit Adam.
_RINGS = {"Ethernet": {8: 1897, 16: 2133, 32: 2173, 64: 2275}, "InfiniBand": {16: 184, 64: 336}}
_OF_BERT = 0.0357 + 0.0608 + 0.0756  # forward, backward, update, of the same table


def _ring(sent_bytes: float, replicas: int) -> tuple[planner.Message, ...]:
    return (planner.Message("all-reduce", 2 * (1 - 1 / replicas) * sent_bytes),)


def _one_bit() -> list[Published]:
    """1-bit Adam and 0/1 Adam on BERT-Large, with the measured gradient and dense message."""
    assumed = {"Ethernet": "a flat ring, 4.1 Gbit/s measured", "InfiniBand": "100 Gbit/s reached"}
    rates = {"Ethernet": _ETHERNET, "InfiniBand": 100e9}
    rows = []
    for kind, times in _RINGS.items():
        for gpus, milliseconds in times.items():
            link = planner.uniform_link(rates[kind], LATENCY, gpus)
            seconds = planner.network_seconds(_ring(2 * _BERT, gpus), link)
            what = f"all-reduce of BERT-Large, {gpus} GPUs, {kind}, ms"
            rows.append(Published("Adam", what, milliseconds, 1e3 * seconds, assumed[kind]))
    # Messages of b bits take b/16 of the measured time.
    step = lambda bits: _OF_BERT + bits / 16 * _RINGS["Ethernet"][64] / 1e3
    once = "a host sends each byte once; coding is free"
    stage, against = "compressed steps, 64 GPUs, times as fast", "1-bit Adam, times as fast as"
    rows.append(Published("1-bit Adam", stage, 6.6, step(16) / step(1), once))
    rows.append(Published("0/1 Adam", against, 2.0, step(3.26) / step(0.503), once))
    return rows


def _zero() -> list[Published]:
    """QSDP and ZeRO++, whose messages overlap with the gradient of other layers."""

    def step(sent, gpus, rate, compute):
        return _step(planner.Method("it", _ring(sent / 2, gpus), overlaps=1.0), rate, gpus, compute)

    # Four batches a step gather 1.3 B weights twice and reduce gradients once, in 16 bits.
    sent = 4 * 3 * 2 * 1.3e9
    compute = 6 * 1.3e9 * 512 * 2048 / (32 * UTILIZATION * 125e12)
    seconds = [step(sent * bits / 16, 32, 10e9, compute) for bits in (16, 8.06)]
    assumed = "32 V100, 10 Gbit/s a host, 16 bits dense, 40% of the peak"
    rows = [Published("QSDP", "times as fast as FSDP", 2.2, seconds[0] / seconds[1], assumed)]
    # 18 B on 384 V100: the step over four links replaces the gradient's time.
    flops = 6 * 18e9 * 1024
    dense, few = (step(sent, 384, 100e9, flops / 35e12) for sent in (3 * 36e9, 0.75 * 36e9))
    assumed = "gradient as long as ZeRO++'s step over 400 Gbit/s"
    speeds = {"ZeRO-3": (14.0, dense), "ZeRO++": (31.0, few)}
    for name, (told, found) in speeds.items():
        what = "18 B, 1,024 tokens a GPU, 100 Gbit/s, TFLOP/s"
        rows.append(Published(name, what, told, flops / found / 1e12, assumed))
    return rows


def _cocktail() -> list[Published]:
    """Fine-tuning of 1.3 B over 500 Mbit/s, against a data centre."""
    messages = _ring(1.3e9 * 2 / 117, 4)
    compute = 6 * 1.3e9 * 16 * 2048 / (2 * UTILIZATION * 312e12)
    late = planner.Method("it", messages, overlaps=1.0)
    slower = _step(late, 500e6, 4, compute) / compute
    assumed = "1.3 B, 16 sequences on two A100, 40% of the peak"
    return [Published("CocktailSGD", "slower at 500 Mbit/s, times", 1.2, slower, assumed)]


def _slamb() -> list[Published]:
    assumed = "its network and batch are not known to us"
    return [Published("SLAMB", "BERT-XL on 1,024 A100, share computing", 0.9, None, assumed)]


# Bits, fragments, executions a step, steps that overlap, and Gbit/s of Table 4.
_BACKWARD = 2 / 3 * 23 / 24  # of a step: two thirds of it, but for the last of 24 layers
_TABLE_4 = {
    "data parallel": (16, 1, 1.0, _BACKWARD, 222.3),
    "DiLoCo": (16, 1, 1 / 100, _BACKWARD, 23.3),
    "Streaming DiLoCo": (16, 8, 8 / 100, _BACKWARD, 16.0),
    "Streaming DiLoCo, a step late": (16, 8, 8 / 100, _BACKWARD + 1, 9.1),
    "Streaming DiLoCo, a step late, 4 bits": (4, 8, 8 / 100, _BACKWARD + 1, 2.0),
}


def _streaming() -> list[Published]:
    """The least rates at which two replicas of 1 B, with steps of 0.1 s, compute for 95%."""
    rows = []
    for name, (bits, fragments, times, overlaps, told) in _TABLE_4.items():
        message = planner.Message("all-reduce", bits / 8 * 1e9 / fragments, times)
        method = planner.Method(name, (message,), overlaps=overlaps)
        least, most = 1e6, 1e15
        while most / least > 1.001:
            middle = (least * most) ** 0.5
            enough = 0.1 / _step(method, middle, 2, 0.1) >= 0.95
            least, most = (least, middle) if enough else (middle, most)
        what, assumed = "95% computing, Gbit/s", "1e9 parameters, backward two thirds of a step"
        rows.append(Published(name, what, told, most / 1e9, assumed))
    return rows


def published_table(rows: list[dict]) -> str:
    """The rows in Markdown."""
    lines = []
    for row in rows:
        found = "not checked", ""
        if row["predicted"] is not None:
            found = _figure(row["predicted"]), f"{row['error']:+.0%}"
        told = row["method"], row["figure"], _figure(row["published"])
        lines.append([*told, *found, row["assumed"]])
    head = ["method", "figure", "published", "predicted", "error", "assumed"]
    return rows_file.markdown(head, lines)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_published(args: Sequence[str]) -> None:
    """Writes the rows, and prints them."""
    parser = argparse.ArgumentParser(prog="scaling published", description=published.__doc__)
    path = rows_file.RESULTS / "scaling_published.json"
    parser.add_argument("--json", type=pathlib.Path, default=path, help="file for the rows")
    rows_file.write(parser.parse_args(args).json, rows := published())
    print(published_table(rows))


def main(args: Sequence[str]) -> None:
    """Compiles; with the word `check` measures, with `published` compares with papers."""
    words = {"check": check, "published": write_published}
    if args and args[0] in words:
        words[args[0]](args[1:])
    else:
        compiled(args)


if __name__ == "__main__":
    with clean_exits():
        main(sys.argv[1:])
