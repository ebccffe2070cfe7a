"""One table of our methods and others' on the same work: bytes, times and losses.

Times and bytes are rows of benchmarks.slow_network, losses of benchmarks.peers_loss.
"""

from typing import NamedTuple

from benchmarks.slow_network_figure import by_method, seconds

RATES = {
    # name in rows: name in the table
    "unlimited": "unlimited",
    "1gbit": "1 Gbit/s",
    "500mbit": "500 Mbit/s",
    "100mbit": "100 Mbit/s",
}
PAIRS = (
    # theirs, ours
    ("PyTorch DDP float32", "dense float32"),
    ("PyTorch DDP bfloat16", "dense bfloat16"),
    ("PyTorch PowerSGD 1", "PowerSGD 1, Adam"),
    ("PyTorch PowerSGD 1", "PowerSGD 1, both sides, Adam"),
    ("PyTorch PowerSGD 4", "PowerSGD 4, Adam"),
    ("PyTorch PowerSGD 4", "PowerSGD 4, both sides, Adam"),
    ("DeepSpeed 1-bit Adam", "1-bit Adam"),
    ("DeepSpeed 1-bit Adam, one tensor", "1-bit Adam"),
    ("DeepSpeed 0/1 Adam, every 4th", "0/1 Adam, every 4th"),
    ("CocktailSGD's code", "CocktailSGD"),
    ("DeMo's code", "DeMo"),
    ("Dion's code", "Dion"),
    ("SLAMB's code", "SLAMB"),
)
# Ours for the same task, without a counterpart.
OTHERS = (
    "sharded Adam, 4 bits",
    "CocktailSGD, signs of an eighth",
    "DiLoCo, 4 bits, every 32nd",
    "SparseLoCo, every 16th",
)
TIE, LOSS_TIE = 0.05, 0.01  # relative, of times and bytes, and of losses


class Found(NamedTuple):
    """The measurements of one method."""

    sent: float  # bytes per step
    times: dict[str, float]  # seconds per step by rate
    loss: float | None


def found(times: list[dict], losses: list[dict]) -> dict[str, Found]:
    """The methods with measured times; losses are the lowest over the rates, at equal steps."""
    lowest: dict[str, float] = {}
    for row in losses:
        name, loss = row["method"], row["val_loss"]
        if loss is not None and loss == loss:
            lowest[name] = min(loss, lowest.get(name, loss))
    return {
        name: Found(
            # At the last rate: dense steps at the start are timed at the first.
            list(at.values())[-1]["nic_bytes"]["sent"],
            {rate: seconds(row) for rate, row in at.items()},
            lowest.get(name),
        )
        for name, at in by_method(times).items()
    }


def worse(ours: Found, theirs: Found) -> list[str]:
    """What is worse in ours than in theirs, beyond a tie: bytes, times by rate, loss."""
    where = ["bytes"] if ours.sent > (1 + TIE) * theirs.sent else []
    slower = [
        name
        for rate, name in RATES.items()
        if rate in ours.times
        and rate in theirs.times
        and ours.times[rate] > (1 + TIE) * theirs.times[rate]
    ]
    if slower:
        where.append("time: " + ("every rate" if len(slower) == len(RATES) else ", ".join(slower)))
    if None not in (ours.loss, theirs.loss) and ours.loss > (1 + LOSS_TIE) * theirs.loss:
        where.append("loss")
    return where


def table(times: list[dict], losses: list[dict]) -> str:
    """The rows as Markdown: theirs, then ours and what is worse in it."""
    methods = found(times, losses)
    lines = [
        f"| method | kB a step | {' | '.join(RATES.values())} | loss | ours is worse in |",
        "|---" * (4 + len(RATES)) + "|",
    ]
    for theirs, ours in PAIRS:
        if theirs in methods:
            lines.append(_line(theirs, methods[theirs], ""))
            if ours in methods:
                text = "; ".join(worse(methods[ours], methods[theirs])) or "nothing"
                lines.append(_line(f"ours: {ours}", methods[ours], text))
    lines += [_line(f"ours: {name}", methods[name], "") for name in OTHERS if name in methods]
    return "\n".join(lines)


def _line(name: str, row: Found, text: str) -> str:
    cells = [f"{1e3 * row.times[rate]:,.0f}" if rate in row.times else "" for rate in RATES]
    loss = "" if row.loss is None else f"{row.loss:.3f}"
    return f"| {name} | {row.sent / 1e3:,.0f} | {' | '.join(cells)} | {loss} | {text} |"
