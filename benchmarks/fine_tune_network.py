"""Fine-tunes a small model over slow networks: loss on held-out text against seconds, by method.

    python -m benchmarks.fine_tune_text texts
    python -m train configs/llama_4m.py --data.tokenizer texts/tokenizer
    python -m train.export runs/llama_4m llama_4m
    python -m benchmarks.fine_tune_network llama_4m texts/man --trial
    sudo python -m benchmarks.fine_tune_network llama_4m texts/man

Hosts are processes in network namespaces, as in benchmarks/slow_network.py. With --trial they are
devices of one process, without a network. Trials choose each method's learning rate, on a seed that
is not reported, and measure LoRA's losses, which do not depend on the network. Rows are written to
results/fine_tune_network.json; benchmarks/fine_tune_figure.py plots them.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import commands, fine_tune, network, rows, slow_network
from jaxcomp.launch.exits import clean_exits

RESULTS = pathlib.Path(__file__).parent / "results" / "fine_tune_network.json"
HOSTS, SEQUENCES, STEPS = 4, 4, 240
RATES = ("100mbit", "500mbit")
EVALUATIONS = 12
REPORTED, TRIED = 0, 1
"""Seeds of the order of the data."""


class Method(NamedTuple):
    """A method's update, and the learning rates to try."""

    update: str
    grid: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    lora: bool = False


ADAM = "adam(learning_rate)"
METHODS = {
    "dense Adam": Method(f"chain(compressed_mean(identity(), axis_name), {ADAM})"),
    "4-bit mean": Method(f"chain(compressed_mean(quantize(4), axis_name), {ADAM})"),
    "CocktailSGD": Method(f"cocktail_sgd({ADAM}, axis_name)"),
    "0/1 Adam": Method(
        "zero_one_adam(learning_rate, axis_name, "
        "sync_at=schedules.halving(learning_rate, steps, after=warmup_steps), "
        "warmup_steps=warmup_steps, variance_compressor=quantize(8))"
    ),
    "DiLoCo, 4 bits, every 10th": Method(
        f"diloco({ADAM}, axis_name, every=10, code=quantize(4))", (5e-4, 1e-3, 2e-3, 4e-3)
    ),
}
# LoRA's matrices need higher rates.
LORA = {
    name: Method(update, (8e-3, 1.6e-2, 3.2e-2), lora=True) if "LoRA" in name else Method(update)
    for name, update in fine_tune.LORA.items()
}


def fine_tuned(call: Callable[..., list], steps: int) -> dict:
    """One run: `curve`, of [step, seconds of training so far, bytes sent so far, loss].

    Args:
      call: Calls a function of all hosts, by name, and returns their answers.
      steps: Number of steps; the loss is measured `EVALUATIONS` times, outside the seconds.
    """
    call("begin")
    losses, seconds, sent = [call("evaluate")[0]], [], []
    for _ in range(EVALUATIONS):
        answers = call("train", steps=steps // EVALUATIONS)
        # Hosts wait for each other, so a step takes its average time.
        each = zip(*(answer["seconds"] for answer in answers), strict=True)
        seconds += [statistics.fmean(step) for step in each]
        sent += answers[0]["sent_bytes"]
        losses.append(call("evaluate")[0])
    usual = usual_seconds(seconds, sent)
    at = [number * (steps // EVALUATIONS) for number in range(len(losses))]
    curve = [[n, sum(usual[:n]), sum(sent[:n]), loss] for n, loss in zip(at, losses, strict=True)]
    return {"curve": curve, "val_loss": losses[-1], "step_seconds": seconds, "step_bytes": sent}


def usual_seconds(seconds: list[float], sent: list[float]) -> list[float]:
    """For each step the median time of steps with the same bytes, since other jobs delay some."""
    alike: dict[float, list[float]] = {}
    for time, size in zip(seconds, sent, strict=True):
        alike.setdefault(size, []).append(time)
    usual = {size: statistics.median(times) for size, times in alike.items()}
    return [usual[size] for size in sent]


def trials(methods: dict[str, Method], options: argparse.Namespace, kept: list) -> Iterator[dict]:
    """Rows without a network: each rate on one seed, then, for LoRA, the best on another."""
    from benchmarks.fine_tune_worker import functions
    from train.placement import devices

    devices.start(HOSTS, 1)
    worker = functions(HOSTS)
    call = lambda name, **arguments: [worker[name](**arguments)]
    for name, method in methods.items():
        done = [row for row in kept if row["method"] == name and row["rate"] == "none"]
        seeds = (TRIED, REPORTED) if name in LORA else (TRIED,)
        for seed, rate in itertools.product(seeds, method.grid):
            if seed == REPORTED and rate != best(done, name):
                continue
            if any((row["seed"], row["learning_rate"]) == (seed, rate) for row in done):
                continue
            spec = spec_of(method, rate, seed, options)
            facts = call("build", **spec)[0]
            row = {"method": name, "rate": "none", **told(spec), **facts}
            done.append(row | fine_tuned(call, options.steps) | rows.machine())
            yield done[-1]


def best(kept: list[dict], method: str) -> float:
    """The learning rate of a method with the lowest loss in the trials.

    Raises:
      ValueError: If none was tried.
    """
    tried = [row for row in kept if (row["method"], row["seed"]) == (method, TRIED)]
    if not tried:
        raise ValueError(f"no rate of {method!r} was tried; run with --trial first.")
    # A run that diverged to NaN comes last.
    loss = lambda row: row["val_loss"] if row["val_loss"] == row["val_loss"] else float("inf")
    return min(tried, key=loss)["learning_rate"]


def spec_of(method: Method, rate: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a worker's `build`."""
    return {
        "update": method.update,
        "lora": method.lora,
        "learning_rate": rate,
        "seed": seed,
        "steps": options.steps,
        "sequences": SEQUENCES,
        "model": str(options.model),
        "text": str(options.text),
        "cache": str(options.cache),
    }


def told(spec: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a row keeps, with the names of folders but not their paths."""
    names = {key: pathlib.Path(spec[key]).name for key in ("model", "text")}
    return {key: value for key, value in spec.items() if key != "cache"} | names


def over_network(
    methods: dict[str, Method], options: argparse.Namespace, kept: list
) -> Iterator[dict]:
    """Rows of runs on hosts in namespaces; a method is compiled once for all rates."""
    team = slow_network.Team([sys.executable, "-m", "benchmarks.fine_tune_worker"], {}, True)
    with network.network(HOSTS) as net, tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        environment = slow_network.ENVIRONMENT | {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")
        }
        with commands.start(slow_network.programs(team, net.hosts), environment, folder) as workers:
            call = lambda name, **arguments: commands.call(
                workers, name, slow_network.SECONDS, **arguments
            )
            for name, method in methods.items():
                network.shape(net, network.UNLIMITED)
                spec = spec_of(method, best(kept, name), REPORTED, options)
                facts = call("build", **spec)[0]
                for rate in options.rates:
                    network.shape(net, rate)
                    before = [network.counters(host) for host in net.hosts]
                    made = fine_tuned(call, options.steps)
                    after = [network.counters(host) for host in net.hosts]
                    sent = sum(new.sent - old.sent for new, old in zip(after, before, strict=True))
                    row = {"method": name, "rate": rate, **told(spec), **facts, **made}
                    threads = f"one a host on {os.cpu_count()} cores"
                    yield row | {"nic_bytes": sent / HOSTS, "threads": threads} | rows.machine()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=pathlib.Path, help="Hugging Face folder")
    parser.add_argument("text", type=pathlib.Path, help="file or folder")
    parser.add_argument("--trial", action="store_true", help="without a network, to choose rates")
    parser.add_argument("--lora", action="store_true", help="with --trial: LoRA's methods")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *LORA], metavar="NAME")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="as 500mbit")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("runs/fine_tune_text"))
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Adds rows to the file, one after the other; those of the same runs are replaced."""
    options = parse()
    table = LORA if options.lora else METHODS
    methods = {name: table[name] for name in options.methods or table}
    if not options.trial and (reason := network.unavailable()) is not None:
        raise ValueError(reason)
    kept = json.loads(options.json.read_text()) if options.json.exists() else []
    run = lambda row: [row[name] for name in ("method", "rate", "seed", "learning_rate")]
    for row in (trials if options.trial else over_network)(methods, options, kept):
        kept = [other for other in kept if run(other) != run(row)] + [row]
        rows.write(options.json, kept)
        took, really = row["curve"][-1][1], sum(row["step_seconds"])
        print(f"{run(row)}: {row['val_loss']:.4f} after {took:.1f} s ({really:.1f})", flush=True)


if __name__ == "__main__":
    with clean_exits():
        main()
