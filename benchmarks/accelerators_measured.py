"""What steps that ran on an accelerator have shown, next to what was predicted for them."""

from benchmarks.accelerators_step import WITH_MOMENTUM

_HEAD = [
    "device",
    "model",
    "method",
    "step, ms",
    "predicted, ms",
    "above dense, ms",
    "predicted, ms",
    "slowest step, ms",
    "holds, GB",
    "by the compiler, GB",
]


def table(rows: list[dict]) -> str:
    """A Markdown table of all measured rows; nothing without any."""
    run = [row for row in rows if "measured" in row]
    lines = [_HEAD, ["---"] * len(_HEAD), *(_line(row, _dense(row, run)) for row in run)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if run else ""


def cell(found: dict) -> str:
    """What running a step has shown, in words."""
    if "error" in found:
        return f"not measured: {found['error']}"
    seconds, predicted = found["seconds"], found["predicted_seconds"]
    return f"measured {1e3 * seconds:.2f} ms, predicted {1e3 * predicted:.2f} ms"


def _dense(row: dict, run: list[dict]) -> dict | None:
    """The dense step of the row's device, model and optimizer, if it was measured."""
    method = row["method"].partition(",")[0]  # a trial's name has more
    method = "dense_sgd" if method in WITH_MOMENTUM else "dense"
    where = {name: row[name] for name in ("device", "model", "mesh")} | {"method": method}
    same = (one["measured"] for one in run if where.items() <= one.items())
    return next((found for found in same if "error" not in found), None)


def _line(row: dict, dense: dict | None) -> list[str]:
    found, key = row["measured"], [row[name] for name in ("device", "model", "method")]
    if "error" in found:
        return [*key, cell(found), *[""] * (len(_HEAD) - 4)]
    names = "seconds", "predicted_seconds"
    own = [f"{1e3 * found[name]:.1f}" for name in names]
    is_dense = dense is None or dense is found
    above = ["" if is_dense else f"{1e3 * (found[n] - dense[n]):+.1f}" for n in names]
    held = [_gb(found[name]) for name in ("peak_bytes", "compiler_peak_bytes")]
    return [*key, *own, *above, f"{1e3 * found['slowest_seconds']:.1f}", *held]


def _gb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f}"
