"""Rows of `benchmarks.scale` as a table: each method beside its own dense baseline."""

import statistics

HEAD = "| method | rate | fewer bits | loss | dense, same inner optimizer | seeds |"


def table(rows: list[dict], task: str, steps: int) -> str:
    """One line for each method, in the order in which methods first appear.

    A baseline's loss is the mean over those of the method's seeds that it has, at the same step: a
    run that was cut short is compared where it stopped.

    Args:
      rows: Rows of one file.
      task: Whose rows.
      steps: Steps of these runs, a whole schedule.

    Returns:
      A Markdown table; "" without rows.
    """
    runs: dict[str, list[dict]] = {}
    for row in rows:
        if (row["task"], row["steps"]) == (task, steps):
            runs.setdefault(row["method"], []).append(row)
    lines = [_line(same, runs.get(same[0]["baseline"], [])) for same in runs.values()]
    return "\n".join([HEAD, "|---|---|---|---|---|---|", *lines]) if lines else ""


def _line(same: list[dict], baseline: list[dict]) -> str:
    first, at = same[0], min(row.get("stopped_at", row["steps"]) for row in same)
    bits = first.get("bits_per_parameter")  # not counted yet on a GPU
    losses = [row["val_loss"] for row in same]
    seeds = [row["seed"] for row in same]
    dense = [loss_at(row, at) for row in baseline if row["seed"] in seeds]
    beside = "" if first["method"] == first["baseline"] else f"{first['baseline']}: {_mean(dense)}"
    stopped = f" at step {at:,}" if at < first["steps"] else ""
    rate = f"{first['learning_rate']:g}"
    fewer = f"{32 / bits:.3g}" if bits else "not counted"
    cells = [first["method"], rate, fewer, _mean(losses) + stopped, beside, len(seeds)]
    return f"| {' | '.join(map(str, cells))} |"


def loss_at(row: dict, step: int) -> float | None:
    """The loss at a step, or at the last evaluation before it."""
    before = [loss for at, loss in row["curve"] if at <= step]
    return before[-1] if before else None


def _mean(losses: list[float | None]) -> str:
    if not losses:
        return "not measured"
    if None in losses:
        return "diverges"
    spread = f" ({min(losses):.2f} to {max(losses):.2f})" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.2f}{spread}"
