"""Fine-tunes a small model over slow networks: loss on held-out text against seconds, by method.

    python -m benchmarks.studies.fine_tune texts texts
    python -m train configs/llama_4m.py --data.tokenizer texts/tokenizer
    python -m train.export runs/llama_4m llama_4m
    python -m benchmarks.studies.fine_tune_network llama_4m texts/man --trial
    sudo python -m benchmarks.studies.fine_tune_network llama_4m texts/man

Hosts are processes in network namespaces, as in benchmarks/slow_network.py. With --trial they are
devices of one process, without a network. Trials choose each method's learning rate, on a seed that
is not reported, and measure LoRA's losses, which do not depend on the network. Rows are written to
results/fine_tune_network.json; `--figure` prints and plots them.
"""

import argparse
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure

import jaxcomp
from benchmarks import commands, methods, network, rows, slow_network, worker
from benchmarks.slow_network_figure import written
from benchmarks.studies import fine_tune
from train import resume
from train.config import Config, Data, Optimizer
from train.config.run import AXIS_NAME
from train.huggingface.pretrained import Pretrained
from train.models import lora as loras
from train.output.plots import COLORS, label_ends
from train.placement import devices
from train.task import make_task

RESULTS = rows.RESULTS / "fine_tune_network.json"
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


METHODS = {
    "dense Adam": Method(methods.METHODS["dense Adam"].update),
    "4-bit mean": Method(methods.METHODS["4-bit Adam"].update),
    "CocktailSGD": Method(methods.METHODS["CocktailSGD"].update),
    "0/1 Adam": Method(methods.METHODS["0/1 Adam, warm-up, variances of 8 bits"].update),
    "DiLoCo, 4 bits, every 10th": Method(
        f"diloco({methods.ADAM}, axis_name, every=10, code=quantize(4))", (5e-4, 1e-3, 2e-3, 4e-3)
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
    for took, size in zip(seconds, sent, strict=True):
        alike.setdefault(size, []).append(took)
    usual = {size: statistics.median(times) for size, times in alike.items()}
    return [usual[size] for size in sent]


def trials(chosen: dict[str, Method], options: argparse.Namespace, kept: list) -> Iterator[dict]:
    """Rows without a network: each rate on one seed, then, for LoRA, the best on another."""
    devices.start(HOSTS, 1)
    alone = functions(HOSTS)
    call = lambda name, **arguments: [alone[name](**arguments)]
    for name, method in chosen.items():
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
    chosen: dict[str, Method], options: argparse.Namespace, kept: list
) -> Iterator[dict]:
    """Rows of runs on hosts in namespaces; a method is compiled once for all rates."""
    team = slow_network.Team(
        [sys.executable, "-m", "benchmarks.studies.fine_tune_network"], {}, True
    )
    with network.network(HOSTS) as net, tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        environment = slow_network.ENVIRONMENT | {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")
        }
        with commands.start(slow_network.programs(team, net.hosts), environment, folder) as workers:
            call = lambda name, **arguments: commands.call(
                workers, name, slow_network.SECONDS, **arguments
            )
            for name, method in chosen.items():
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


RANK = 8
"""The rank of LoRA's matrices, if these are trained."""


def config_of(
    update: str,
    learning_rate: float,
    *,
    model: str,
    text: str,
    cache: str,
    steps: int,
    seed: int,
    replicas: int,
    sequences: int,
    context: int = 128,
    lora: bool = False,
) -> Config:
    """The run that is timed.

    Args:
      update: The optimizer, as `optimizer.update` of a config.
      learning_rate: Its peak, after a tenth of the steps.
      model: The Hugging Face folder that it begins with.
      text: The text that it learns.
      cache: Folder for the text's tokens.
      steps: Of the whole run.
      seed: Of the order of the data.
      replicas: Hosts.
      sequences: Of one host and step.
      context: Tokens of a sequence.
      lora: Whether LoRA's matrices are trained, and nothing else.
    """
    return Config(
        name="fine_tune_network",
        steps=steps,
        seed=seed,
        replicas=replicas,
        eval_batches=8,
        start_from=model,
        trainable=loras.TRAINED if lora else None,
        optimizer=Optimizer(
            update=update,
            learning_rate=learning_rate,
            warmup_steps=steps // 10,
            schedule="linear",
            final_fraction=0.0,
        ),
        model=Pretrained(context, "float32", scan=False, remat=False, lora=RANK if lora else 0),
        data=Data(path=text, cache=cache, batch=replicas * sequences),
    )


def functions(replicas: int) -> dict[str, Callable[..., Any]]:
    """What the benchmark calls: `build` a run, `begin` it, `train` some steps, `evaluate`."""
    built: dict[str, Any] = {}

    def build(**run: Any) -> dict:
        built.clear()
        built["task"] = task = make_task(config_of(replicas=replicas, **run))
        parts = jaxcomp.report.sent_bytes_by_part(task.programs, task.mesh, AXIS_NAME)
        built["parts"] = parts
        return {"trained": _trained(task), "sent_bytes_per_step": task.sent_bytes}

    def begin() -> None:
        nothing = pathlib.Path(tempfile.gettempdir(), "no", "checkpoints")
        built["params"], built["state"], _ = resume.begin(built["task"], nothing)
        built["step"] = 0

    def train(steps: int) -> dict:
        """The seconds of each step, without making its batch, and the bytes it sent."""
        task, seconds, sent = built["task"], [], []
        for _ in range(steps):
            before = worker.rounds(built["state"])
            batch = jax.block_until_ready(task.batch(built["step"]))
            start = time.perf_counter()
            result = task.step(built["params"], built["state"], batch)
            built["params"], built["state"], _ = jax.block_until_ready(result)
            seconds.append(time.perf_counter() - start)
            built["step"] += 1
            after = worker.rounds(built["state"])
            sent.append(worker.report_bytes(built["parts"], 1, before, after))
        return {"seconds": seconds, "sent_bytes": sent}

    def evaluate() -> float:
        """The loss on held-out text, as of a run; after the last step of what is deployed."""
        task, given = built["task"], (built["params"], built["state"])
        if built["step"] == task.config.steps:
            given = task.deployed(*given)[:1]
        return task.evaluate(*given)["loss"]

    return {"build": build, "begin": begin, "train": train, "evaluate": evaluate}


def _trained(task) -> int:
    leaves = jax.tree.leaves(loras.only(task.natural) if task.config.trainable else task.natural)
    return sum(leaf.size for leaf in leaves)


DENSE = "dense Adam"
NEAR = 0.01
"""Nats above dense Adam's last loss at which methods are compared."""


def at_rates(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """The rows over networks by rate and method, in the order in which they come."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["rate"] != "none":
            found.setdefault(row["rate"], {})[row["method"]] = row
    return found


def seconds_to(row: dict, loss: float) -> float | None:
    """Seconds of training until a curve reaches a loss, interpolated linearly."""
    points = [(seconds, value) for _, seconds, _, value in row["curve"]]
    for (before, high), (after, low) in zip(points, points[1:], strict=False):
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def table(made: list[dict]) -> str:
    """Markdown: each method's learning rate, bytes, loss, and seconds at each network rate."""
    found, lines = at_rates(made), []
    head = ["method", "learning rate", "bytes a step", "loss"]
    for rate in found:
        head += [f"{written(rate)}: step", f"to dense Adam's loss + {NEAR}"]
    for method, first in next(iter(found.values())).items():
        steps = first["curve"][-1][0]
        cells = [method, f"{first['learning_rate']:g}", f"{first['curve'][-1][2] / steps:,.0f}"]
        cells.append(f"{first['val_loss']:.3f}")
        for at in found.values():
            reached = seconds_to(at[method], at[DENSE]["val_loss"] + NEAR)
            cells.append(f"{at[method]['curve'][-1][1] / steps:.2f} s")
            cells.append("never" if reached is None else f"{reached:.0f} s")
        lines.append(cells)
    return rows.markdown(head, lines)


def table_of_lora(made: list[dict]) -> str:
    """Markdown: the losses with all weights and with LoRA."""
    lines = []
    for row in made:
        if row["method"] in LORA and row["seed"] == REPORTED:
            sent = row["curve"][-1][2] / row["curve"][-1][0]
            cells = f"{row['trained']:,}", f"{sent:,.0f}", f"{row['learning_rate']:g}"
            lines.append([row["method"], *cells, f"{row['val_loss']:.3f}"])
    return rows.markdown(["trained", "parameters", "bytes a step", "learning rate", "loss"], lines)


def finding(rows: list[dict]) -> str:
    """The title: the first method near dense Adam's loss at the slowest rate, with its speedup."""
    at = next(iter(at_rates(rows).values()))
    rate, loss = written(at[DENSE]["rate"]), at[DENSE]["val_loss"] + NEAR
    reached = {name: seconds_to(row, loss) for name, row in at.items()}
    dense = reached.pop(DENSE)
    sooner = {name: seconds for name, seconds in reached.items() if seconds}
    if not sooner:
        return f"At {rate} nothing comes within {NEAR} of the loss of {DENSE}"
    best = min(sooner, key=sooner.__getitem__)
    times = dense / sooner[best]
    return f"At {rate} {best} comes within {NEAR} of {DENSE}'s loss {times:.2g} times sooner"


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Loss against seconds of training, a panel for each rate."""
    found = at_rates(rows)
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (rate, at) in zip(panels, found.items(), strict=True):
        for (method, row), color in zip(at.items(), COLORS, strict=False):
            _, seconds, _, losses = zip(*row["curve"], strict=True)
            axes.plot(seconds, losses, color=color, label=method, marker=".", linewidth=1.8)
        axes.set_title(written(rate), fontsize=11)
        axes.set_xlabel("seconds of training")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss of held-out text (nats per token)")
    figure.suptitle(finding(rows))
    for axes in panels:
        label_ends(axes)
    figure.savefig(path, dpi=120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=pathlib.Path, help="Hugging Face folder")
    parser.add_argument("text", nargs="?", type=pathlib.Path, help="file or folder")
    parser.add_argument("--figure", action="store_true", help="only tables and plot of the rows")
    parser.add_argument("--trial", action="store_true", help="without a network, to choose rates")
    parser.add_argument("--lora", action="store_true", help="with --trial: LoRA's methods")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *LORA], metavar="NAME")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="as 500mbit")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path("runs/fine_tune_text"))
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    if not options.figure and options.text is None:
        parser.error("name a model and a text, or write --figure")
    return options


def main() -> None:
    """Adds rows to the file, one after the other; those of the same runs are replaced."""
    options = parse()
    known = LORA if options.lora else METHODS
    chosen = {name: known[name] for name in options.methods or known}
    if options.figure:
        made = rows.read(options.json)
        print(table(made), table_of_lora(made), sep="\n\n")
        return draw(made, options.json.with_suffix(".png"))
    if not options.trial and (reason := network.unavailable()) is not None:
        raise ValueError(reason)
    kept = rows.read(options.json)
    run = lambda row: [row[name] for name in ("method", "rate", "seed", "learning_rate")]
    for row in (trials if options.trial else over_network)(chosen, options, kept):
        kept = [other for other in kept if run(other) != run(row)] + [row]
        rows.write(options.json, kept)
        took, really = row["curve"][-1][1], sum(row["step_seconds"])
        print(f"{run(row)}: {row['val_loss']:.4f} after {took:.1f} s ({really:.1f})", flush=True)


if __name__ == "__main__":
    worker.main_or_host(main, functions)
