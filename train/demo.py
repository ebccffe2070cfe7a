"""`make demo`: trains one model three times; compares loss, bytes, and time on a link you name."""

import argparse
import dataclasses
import pathlib
import re
import shutil
import statistics
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from configs import nano_dense
from jaxcomp import planner
from jaxcomp._printing import aligned
from jaxcomp.launch.exits import clean_exits
from train.config import Config
from train.models.decoder import DecoderConfig
from train.output import metrics, plots
from train.placement import devices

# `optimizer.update` and the learning rate; the baseline is first.
METHODS = {
    "dense Adam": ("chain(compressed_mean(identity(), axis_name), adam(learning_rate))", 6e-3),
    "4-bit mean": (
        "chain(compressed_mean(quantize(4, block=32), axis_name), adam(learning_rate))",
        6e-3,
    ),
    "CocktailSGD": (
        "cocktail_sgd(adam(learning_rate), axis_name, delayed=False, "
        "compressor=cocktail(random=0.5, top=0.5))",
        6e-3,
    ),
}
LATENCY = 1e-3  # seconds from one replica to another, on the predicted link


class Outcome(NamedTuple):
    """The results of one run."""

    rows: list[dict[str, Any]]  # of its metrics.jsonl
    loss: float  # nats per byte, in the last validation
    sent: float  # mean bytes that one replica sends per step
    here: float  # mean seconds per step on this machine
    on_link: float  # predicted seconds per step on the link


def base() -> Config:
    """The dense run: nano's text and schedule, half its layers, a quarter of its tokens a step."""
    nano = nano_dense.get_config()
    model = DecoderConfig(layers=2, width=128, heads=4, context=64)
    data = dataclasses.replace(nano.data, batch=16)
    return dataclasses.replace(nano, model=model, data=data, eval_batches=32)


def config_of(method: str, steps: int) -> Config:
    """A method's run; warm-up and evaluations in proportion to the steps."""
    dense, (update, rate) = base(), METHODS[method]
    optimizer = dataclasses.replace(
        dense.optimizer, update=update, learning_rate=rate, warmup_steps=steps // 10
    )
    return dataclasses.replace(
        dense,
        name=f"demo/{method.replace(' ', '_')}",
        steps=steps,
        optimizer=optimizer,
        eval_every=max(1, steps // 10),
        checkpoint_every=steps,
        log_every=max(1, steps // 20),
    )


def bits_a_second(text: str) -> float:
    """Reads a rate such as `100mbit`.

    Raises:
      ValueError: For another format.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", text.lower())
    if not found or not float(found[1]):
        raise ValueError(f"--link is {text!r}; write a rate, like make demo LINK=100mbit or 1gbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def outcome(config: Config, rate: float) -> Outcome:
    """Trains a run, and predicts its steps on a link.

    Args:
      config: The run; an earlier run with its name is deleted.
      rate: Rate of each replica's link in bit/s, in each direction.

    Returns:
      Its outcome. A step on the link takes the time here plus the planner's prediction for
      messages.
    """
    from train.loop import run
    from train.plan import planning

    folder = pathlib.Path(config.runs_dir, config.name)
    shutil.rmtree(folder, ignore_errors=True)
    run(config)
    rows = metrics.read(folder / "metrics.jsonl")
    losses = [row["val_loss"] for row in rows if "val_loss" in row]
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
    here = statistics.median(seconds)
    method = planning.make_method(config.name, config, devices.make_mesh(config.replicas), "")
    link = planner.uniform_link(rate, LATENCY, config.replicas)
    network = planner.network_seconds(method.messages, link)
    sent = rows[-1]["sent_bytes"] / config.steps
    return Outcome(rows, losses[-1], sent, here, here + network)


def table(outcomes: dict[str, Outcome], steps: int, link: str) -> str:
    """The outcomes as a table for a terminal, the baseline first."""
    dense = next(iter(outcomes.values()))
    head = "method", "val loss", "bytes of dense", "step here", f"step on {link}", "whole run"
    lines = [head]
    for name, run in outcomes.items():
        share, minutes = run.sent / dense.sent, steps * run.on_link / 60
        here, there = f"{1e3 * run.here:.0f} ms", f"{1e3 * run.on_link:.0f} ms"
        lines.append((name, f"{run.loss:.3f}", f"{share:.1%}", here, there, f"{minutes:.1f} min"))
    return "\n".join(aligned(lines, numbers=range(1, 6)))


def finding(outcomes: dict[str, Outcome], link: str) -> str:
    """How much faster the fastest run is on the link, and its loss."""
    (first, dense), *_ = outcomes.items()
    name, best = min(outcomes.items(), key=lambda item: item[1].on_link)
    if name == first:
        return f"On {link} {first} is the fastest: do not compress."
    times = dense.on_link / best.on_link
    return (
        f"On {link} {name}: {times:.1f} times as fast as {first}, "
        f"loss {best.loss:.2f} ({dense.loss:.2f})"
    )


def draw(outcomes: dict[str, Outcome], link: str, path: pathlib.Path) -> None:
    """Plots validation losses against predicted minutes on the link, and against bytes."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    all_sent = []
    for (name, run), color in zip(outcomes.items(), plots.COLORS, strict=False):
        steps, sent, losses = plots.curve(name, run.rows)
        steps, sent, losses = (values[sent > 0] for values in (steps, sent, losses))
        all_sent.append(sent)
        for axes, x in ((by_time, steps * run.on_link / 60), (by_bytes, sent)):
            axes.plot(x, losses, color=color, label=name, marker="o", markevery=[-1], linewidth=2)
    by_time.set(xlabel=f"minutes on {link}, predicted", ylabel="validation loss (nats per byte)")
    by_bytes.set_xlabel("bytes sent by one replica (logarithmic)")
    plots.label_log(by_bytes, "x", np.concatenate(all_sent), EngFormatter("B"))
    figure.suptitle(finding(outcomes, link))
    for axes in (by_time, by_bytes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        plots.label_ends(axes)
    figure.savefig(path, dpi=120)


def demo(steps: int, link: str, rate: float) -> str:
    """Trains all runs, replacing an earlier demo; returns the table and the path of the plot."""
    configs = {method: config_of(method, steps) for method in METHODS}
    first = next(iter(configs.values()))
    devices.start(first.replicas)
    outcomes = {method: outcome(config, rate) for method, config in configs.items()}
    picture = pathlib.Path(first.runs_dir, first.name).with_name("comparison.png")
    draw(outcomes, link, picture)
    return (
        f"\n{table(outcomes, steps, link)}\n\n{finding(outcomes, link)}.\n"
        f"Steps here are {first.replicas} replicas on this machine. For {link} the planner\n"
        f"adds its prediction of the messages; latency is {1e3 * LATENCY:g} ms.\n\n"
        f"{picture}"
    )


def main() -> None:
    """Reads the arguments, runs the demo and prints its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of each run")
    parser.add_argument("--link", default="100mbit", help="rate of a replica's link, like 1gbit")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; write at least 1, like make demo STEPS=20")
    try:
        rate = bits_a_second(args.link)
    except ValueError as error:
        parser.error(str(error))
    with clean_exits():
        print(demo(args.steps, args.link, rate))


if __name__ == "__main__":
    main()
