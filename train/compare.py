"""`python -m train.compare RUN ...`: finished runs side by side, as a table and a plot."""

import pathlib
import statistics
import sys
from typing import Any

from jaxcomp._printing import aligned
from jaxcomp.launch.exits import clean_exits
from train import checks
from train.output import metrics, plots


def compare(folders: dict[str, pathlib.Path], picture: pathlib.Path) -> str:
    """Plots the runs' curves and makes a table of them.

    Args:
      folders: Label to run directory (`runs/NAME`); the baseline first.
      picture: Where the PNG goes.

    Returns:
      The table: method, last validation loss (nats per byte), bytes that one replica sends per
      step, their share of a ring all-reduce in float16 and in float32, steps per second.

    Raises:
      ValueError: If a folder has no evaluated run.
    """
    runs, lines = {}, []
    for label, folder in folders.items():
        rows = metrics.read(folder / "metrics.jsonl")
        if not any("val_loss" in row for row in rows):
            raise ValueError(f"{folder} holds no evaluated run; train it first.")
        runs[label] = rows
        lines.append(_line(label, rows, *_facts(folder / "config.json")))
    plots.loss_figure(runs, picture)
    head = ("method", "val loss", "bytes/step", "of fp16", "of fp32", "steps/s")
    return "\n".join(aligned([head, *lines], numbers=range(1, len(head))))


def _facts(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    """A run's record of its bytes, and how many of its replicas have fast links."""
    record = checks.json_object(file, plan=dict[str, Any], config=dict[str, Any])
    plan, fast = record["plan"], record["config"].get("fast")
    checks.require_keys(plan, str(file), sent_bytes_per_step=float, parameters=int, replicas=int)
    if not checks.has_type(fast, int) or not 1 <= fast <= plan["replicas"]:
        raise ValueError(f"{file}: fast={fast!r:.80} of replicas={plan['replicas']} fits no run.")
    return plan, fast


def _line(label, rows, plan, fast) -> tuple[str, ...]:
    loss = [row["val_loss"] for row in rows if "val_loss" in row][-1]
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row]
    sent, slow = plan["sent_bytes_per_step"], plan["replicas"] // fast
    # Across the slow axis only, as for all runs with a fast axis.
    dense = 2 * 4 * plan["parameters"] / fast * (slow - 1) / slow
    ratio = lambda bytes: f"{100 * sent / bytes:.1f}%" if sent and bytes else "-"
    return (
        label,
        "not finite" if loss is None else f"{loss:.4f}",
        f"{sent:,.0f}",
        ratio(dense / 2),
        ratio(dense),
        f"{1 / statistics.median(seconds):.2f}" if any(seconds) else "-",
    )


def main(args: list[str]) -> None:
    """Prints the table of the given run directories and the path of the plot."""
    if not args or args[0].startswith("-"):
        print("usage: python -m train.compare runs/BASELINE runs/NAME ...")
        sys.exit(0 if args else 2)
    folders = {arg: pathlib.Path(arg) for arg in args}
    picture = pathlib.Path(args[0]).parent / "comparison.png"
    with clean_exits():
        print(compare(folders, picture))
        print(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
