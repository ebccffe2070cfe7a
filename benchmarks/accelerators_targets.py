"""Targets for the compiled programs of a GPT of 124 M parameters, and what was reached."""

from typing import Any, NamedTuple

from benchmarks.accelerators_figure import above_dense

MODELS, MESH = ("124m", "124m-scan"), "8"
RATE, SLOWER, FEWER_BYTES = "500mbit", 1.1, 30
"""For methods that send 30 times less than dense: most time over their step without a network."""
ACCESSED, TEMP = 2.0, 3.0
"""For all methods on TPUs: bytes accessed over the dense step's, and copies held above it."""


class Target(NamedTuple):
    """Limits for the most expensive step of a method above the dense step, on H100."""

    moved: float  # copies of the parameters
    kernels: int
    temp: float  # copies


_DENSE_CODE, _MOMENTS = Target(8, 150, 2), Target(14, 250, 3)
TARGETS = {
    **dict.fromkeys(("q8", "q4", "sign"), _DENSE_CODE),
    "top_k": Target(14, 250, 2.5),
    "cocktail": Target(12, 250, 2.5),
    **dict.fromkeys(("zero_one_adam", "one_bit_adam", "slamb"), _MOMENTS),
}
_HEAD = [
    "device",
    "model",
    "method",
    "moved, copies",
    "kernels",
    "temp, copies",
    "accessed",
    "at 500 Mbit/s",
]


def table(rows: list[dict]) -> str:
    """A line per program; each cell is the value "of" the target, in bold if the target is missed.

    Methods that were not compiled for any form of the model have a line that says so.
    """
    found: dict[tuple[str, str], list[list[str]]] = {}
    for row, dense in above_dense(rows):
        cells = {"h100": _on_h100, "v5e": _on_v5e}.get(row["device"])
        if cells and dense and row["method"] in TARGETS and _is_of_target(row):
            key = row["device"], row["method"]
            line = [row["device"], row["model"], row["method"], *cells(row, dense)]
            found.setdefault(key, []).append(line)
    lines = []
    for device in ("h100", "v5e"):
        for method in TARGETS:
            empty = [device, "", method, "not compiled", *[""] * (len(_HEAD) - 4)]
            lines += found.get((device, method), [empty])
    written = [_HEAD, ["---"] * len(_HEAD), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in written)


def _is_of_target(row: dict) -> bool:
    return row["model"] in MODELS and row["mesh"] == MESH


def _on_h100(row: dict, dense: dict) -> list[str]:
    target = TARGETS[row["method"]]
    above = lambda of: of(row) - of(dense)
    return [
        _cell(above(lambda r: r["moved_copies"]), target.moved, "+.1f"),
        _cell(above(lambda r: r["kernels"]), target.kernels, "+,d"),
        _cell(above(_temp), target.temp, "+.1f"),
        "",
        _over_slow_links(row, dense),
    ]


def _on_v5e(row: dict, dense: dict) -> list[str]:
    accessed = row["accessed_bytes"] / dense["accessed_bytes"]
    temp = _cell(_temp(row) - _temp(dense), TEMP, "+.1f")
    return ["", "", temp, _cell(accessed, ACCESSED, ".2f"), ""]


def _over_slow_links(row: dict, dense: dict) -> str:
    if dense["nic_bytes"] < FEWER_BYTES * row["nic_bytes"]:
        return ""
    return _cell(row["predicted"][RATE] / row["predicted"]["unlimited"], SLOWER, ".2f")


def _temp(row: dict) -> float:
    return row["memory"]["temp_copies"]


def _cell(reached: Any, most: Any, form: str) -> str:
    text = f"{reached:{form}} of {most:{form}}"
    return text if reached <= most else f"**{text}**"
