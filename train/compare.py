"""`python -m train.compare RUN ...`: finished runs side by side, as a table and a plot."""

import argparse
import math
import pathlib
import statistics
import sys
from typing import Any

from jaxcomp._printing import aligned
from jaxcomp.launch.exits import clean_exits, show
from train import checks
from train.output import metrics, plots

_HEAD = ("method", "val loss", "bytes/step", "of fp16", "of fp32", "steps/s")


def compare(folders: dict[str, pathlib.Path], link_rate: float | None = None) -> str:
    """Makes a table of runs.

    Args:
      folders: Label to run directory (`runs/NAME`); the baseline first.
      link_rate: Rate in bit/s of a replica's link, for a step there, if nothing hides the messages.

    Returns:
      The table: method, last validation loss (nats per byte), bytes that one replica sends per
      step, their share of a ring all-reduce in float16 and in float32, steps per second here; and
      with a rate how long a step takes there, below it which of several runs is the fastest. Last
      notes if runs have losses of other data, or of other steps.

    Raises:
      ValueError: If a folder has no evaluated run.
    """
    lines, there, read, ends = [], {}, {}, {}
    for label, folder in folders.items():
        rows = metrics.read(folder / "metrics.jsonl")
        evaluated = [row for row in rows if "val_loss" in row]
        if not evaluated:
            raise ValueError(f"{folder} holds no evaluated run; train it first.")
        ends[label] = evaluated[-1]["step"]
        plan, fast, read[label] = _facts(folder / "config.json")
        plan = _with_mean_bytes(plan, rows[-1])
        seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
        here = statistics.median(seconds) if seconds else math.nan
        there[label] = here + 8 * plan["sent_bytes_per_step"] / (link_rate or math.inf)
        step = "-" if math.isnan(here) else f"{1e3 * there[label]:,.0f} ms"
        lines.append((*_line(label, evaluated[-1]["val_loss"], plan, fast, here), step))
    head, finding = _HEAD, []
    if link_rate is not None:
        link = f"{link_rate / 1e6:,.4g} Mbit/s"
        head = (*_HEAD, f"step at {link}")
        finding = ["", _finding(there, link)] if len(folders) > 1 else []
    shown = [head, *(line[: len(head)] for line in lines)]
    table = aligned(shown, numbers=range(1, len(head)))
    return "\n".join([*table, *finding, *_other_data(read), *_other_steps(ends)])


def _other_data(read: dict[str, Any]) -> list[str]:
    first, *others = read
    others = [label for label in others if read[label] != read[first]]
    why = f"{', '.join(others)} read other data or tokens than {first}"
    return ["", f"note: {why}, so that losses do not compare."] if others else []


def _other_steps(ends: dict[str, int]) -> list[str]:
    if len(set(ends.values())) == 1:
        return []
    each = ", ".join(f"{label} after step {step:,}" for label, step in ends.items())
    return ["", f"note: losses are of different steps: {each}."]


def _finding(seconds: dict[str, float], link: str) -> str:
    """How much faster than the baseline the fastest run is on a link."""
    first, timed = next(iter(seconds)), {k: v for k, v in seconds.items() if not math.isnan(v)}
    if first not in timed:
        return f"{first} has made no step yet: no run is faster or slower than it."
    best = min(timed, key=lambda label: timed[label])
    if best == first:
        return f"At {link} {first} is the fastest: do not compress."
    return f"At {link} {best} is {seconds[first] / seconds[best]:.1f} times as fast as {first}."


def _facts(file: pathlib.Path) -> tuple[dict[str, Any], int, Any]:
    """A run's record of its bytes, how many of its replicas have fast links, and what it read."""
    record = checks.json_object(file, plan=dict[str, Any], config=dict[str, Any])
    plan, fast = record["plan"], record["config"].get("fast")
    checks.require_keys(plan, str(file), sent_bytes_per_step=float, trained=int, replicas=int)
    if not checks.has_type(fast, int) or not 1 <= fast <= plan["replicas"]:
        raise ValueError(f"{file}: fast={fast!r:.80} of replicas={plan['replicas']} fits no run.")
    data = record.get("data")
    sha256 = data.get("sha256") if isinstance(data, dict) else None
    return plan, fast, (sha256, record["config"].get("objective"))


def _with_mean_bytes(plan: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The record with the means of all steps, if some had other replicas than it says."""
    steps, dense, now = row["step"], row.get("dense_bytes"), plan.get("dense_bytes_per_step")
    if not steps or None in (dense, now) or math.isclose(dense, steps * now):
        return plan
    return plan | {"sent_bytes_per_step": row["sent_bytes"] / steps, "dense_mean": dense / steps}


def _line(label, loss, plan, fast, seconds) -> tuple[str, ...]:
    sent, slow = plan["sent_bytes_per_step"], plan["replicas"] // fast
    # Across the slow axis only, as for all runs with a fast axis.
    dense = plan.get("dense_mean", 2 * 4 * plan["trained"] / fast * (slow - 1) / slow)
    ratio = lambda bytes: f"{100 * sent / bytes:.1f}%" if sent and bytes else "-"
    return (
        label,
        "not finite" if loss is None else f"{loss:.4f}",
        f"{sent:,.0f}",
        ratio(dense / 2),
        ratio(dense),
        f"{1 / seconds:.2f}" if seconds > 0 else "-",
    )


def main(args: list[str]) -> None:
    """Prints the table of the given run directories and the path of the plot."""
    parser = argparse.ArgumentParser(prog="python -m train.compare", description=__doc__)
    parser.add_argument("run", nargs="+", help="as runs/nano_dense; the baseline first")
    parser.add_argument("--link-rate", type=float, help="of a replica's link in bit/s, as 100e6")
    options = parser.parse_args(args)
    if options.link_rate is not None and not 0 < options.link_rate < math.inf:
        parser.error(f"--link-rate is {options.link_rate}; write a positive number, like 100e6")
    folders = {run: pathlib.Path(run) for run in options.run}
    picture = pathlib.Path(options.run[0]).parent / "comparison.png"
    with clean_exits():
        show(compare(folders, options.link_rate))
        # After the table, which needs no folder that can be written.
        rows = {run: metrics.read(folder / "metrics.jsonl") for run, folder in folders.items()}
        plots.loss_figure(rows, picture)
        show(str(picture))


if __name__ == "__main__":
    main(sys.argv[1:])
