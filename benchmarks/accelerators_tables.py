"""The rows of benchmarks.accelerators as tables and as a picture.

Tables are of programs and predicted steps, of steps that ran, and of targets for a GPT of 124 M.
"""

import pathlib
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.accelerators_devices import RATES
from benchmarks.accelerators_step import WITH_MOMENTUM
from benchmarks.rows import markdown
from train.output.plots import COLORS

_COLUMNS = ("device", "model", "mesh", "method")
_PROGRAM = [
    *_COLUMNS,
    "moved, copies",
    "kernels",
    "temp, copies",
    "accessed, times dense",
    "loops of unknown length",
    "messages",
    "asynchronous",
    "in loops or branches",
    "products beside them",
    "peak, GB",
    "compiled in, CPU s",
]
_PREDICTED = [*_COLUMNS, "MB a host sends", *(f"{rate}, ms" for rate in RATES), "unlimited, ms"]
DRAWN = {
    "dense": "dense float32",
    "q8": "8 bits",
    "q4": "4 bits",
    "sign": "signs",
    "top_k": "top_k",
    "cocktail": "CocktailSGD",
}
DRAWN_FROM = 10**8
"""Methods with a curve, all of whose steps are alike, and the parameters of the smallest model."""


def above_dense(rows: list[dict]) -> list[tuple[dict, dict | None]]:
    """Each row that was compiled, with the dense one of its device, model and mesh, if any.

    That of momentum SGD, which keeps one copy where Adam keeps two, for methods in front of it.
    """
    whole = [row for row in rows if "moved_copies" in row]
    place = lambda row: (row["device"], row["model"], row["mesh"])
    dense = {(*place(row), row["method"]): row for row in whole}
    of = lambda row: "dense_sgd" if row["method"] in WITH_MOMENTUM else "dense"
    return [(row, dense.get((*place(row), of(row)))) for row in whole]


def table(rows: list[dict]) -> str:
    """The rows as Markdown tables: programs and predicted steps."""
    whole = sorted(above_dense(rows), key=lambda pair: _key(pair[0]))
    tables = [
        (_PROGRAM, [_program(*pair) for pair in whole] + _failures(rows)),
        (_PREDICTED, [_predicted(row) for row, _ in whole]),
    ]
    return "\n\n".join(markdown(head, lines) if lines else "" for head, lines in tables)


def _key(row: dict) -> list[str]:
    return [row[name] for name in _COLUMNS]


def _program(row: dict, dense: dict | None) -> list[str]:
    """The cells of a program: of what the dense step has too, the difference to it."""
    first = dense if row is not dense else None
    counts = row["messages"].values()
    return [
        *_key(row),
        _above(row["moved_copies"], first and first["moved_copies"], ".1f"),
        _above(row["kernels"], first and first["kernels"], ",d"),
        _above(_temp(row), first and _temp(first), ".1f"),
        _times(row["accessed_bytes"], first and first["accessed_bytes"]),
        f"{row['unknown_loops']}",
        f"{sum(kind['all'] for kind in counts)}",
        f"{sum(kind['async'] for kind in counts)}",
        f"{row['messages_inside']}",
        f"{row['products_beside']:.0%}",
        f"{row['memory']['peak_bytes'] / 1e9:.2f}",
        f"{row['compile_cpu_seconds']:.0f}" if "compile_cpu_seconds" in row else "",
    ]


def _predicted(row: dict) -> list[str]:
    """A host's bytes, and what the roofline says of a step."""
    seconds = [row["predicted"][rate] for rate in (*RATES, "unlimited")]
    return _key(row) + [f"{row['nic_bytes'] / 1e6:,.2f}", *(f"{1e3 * s:,.0f}" for s in seconds)]


def _above(value, dense, form: str) -> str:
    return format(value, form) if dense is None else f"{value - dense:+{form}}"


def _times(value, dense) -> str:
    return "" if not value or not dense else f"{value / dense:.2f}"


def _failures(rows: list[dict]) -> list[list[str]]:
    """Lines of the steps that could not be compiled, with the reason."""
    told = [(_key(row), " ".join(row["error"].split())) for row in rows if "error" in row]
    empty = [""] * (len(_PROGRAM) - len(_COLUMNS) - 1)
    return [[*key, f"not compiled: {error.replace('|', '/')}", *empty] for key, error in told]


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Draws the predicted step against a host's rate, a panel a device, model and mesh.

    Args:
      rows: Rows of `benchmarks.accelerators`; those with an error are left out, and so are small
        models, scanned ones beside unrolled ones, and meshes with the dense step alone or none.
      path: The picture; its suffix says the format.

    Raises:
      ValueError: If no row has a prediction.
    """
    panels: dict[tuple, list[dict]] = {}
    unrolled = {(row["device"], row["model"], row["mesh"]) for row in rows}
    for row, dense in above_dense(rows):
        twin = row["device"], row["model"].removesuffix("-scan"), row["mesh"]
        alone = twin[1] == row["model"] or twin not in unrolled
        drawn = row["method"] in DRAWN and row["parameters"] >= DRAWN_FROM
        if dense is not None and alone and drawn:
            panels.setdefault((row["device"], row["model"], row["mesh"]), []).append(row)
    panels = {place: own for place, own in panels.items() if len(own) > 1}
    if not panels:
        raise ValueError(
            f"got no row of {DRAWN_FROM:,} parameters with a prediction and its dense step, need "
            "one; write python -m benchmarks.accelerators --methods dense q4"
        )
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * lines))
    figure.set_layout_engine("constrained")
    for number, (place, own) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(lines, columns, number)
        axes.set_title(_title(*place))
        _panel(axes, own)
    figure.savefig(path, dpi=100)


def _title(device: str, model: str, mesh: str) -> str:
    hosts, _, each = mesh.partition("x")
    many = f"{hosts} hosts of {each} devices" if each else f"{hosts} hosts of one device"
    size = model.removesuffix("-scan").upper()
    chip = device if device.startswith("v") else device.upper()
    return f"{chip}, {size[:-1]} {size[-1]} parameters, {many}"


def _panel(axes, rows: list[dict]) -> None:
    """A curve for each method, named at its start, where curves are apart."""
    rates = list(RATES.values())
    first = {row["method"]: row["predicted"][next(iter(RATES))] for row in rows}
    places = _apart(first)
    for row in rows:
        method = row["method"]
        color = COLORS[[*DRAWN].index(method) % len(COLORS)]
        seconds = [row["predicted"][rate] for rate in RATES]
        style = "--" if method == "dense" else "-"
        axes.loglog(rates, seconds, style, color=color, marker=".")
        at = (rates[0] / 1.15, places[method])
        axes.text(*at, DRAWN[method], color=color, fontsize=8, ha="right", va="center")
    axes.set_xlim(rates[0] / 20, rates[-1] * 1.3)
    marked = {1e8: "100 Mbit/s", 1e9: "1 Gbit/s", 1e10: "10 Gbit/s", 1e11: "100 Gbit/s"}
    axes.set_xticks([*marked], marked.values(), fontsize=8)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [x for ten in (0.1, 1, 10, 100, 1000) for x in (ten, 3 * ten) if low <= x <= high]
    axes.set_yticks(ticks, [f"{x:g} s" for x in ticks])
    axes.set_xlabel("rate of a host's link")
    axes.set_ylabel("predicted step")
    axes.grid(alpha=0.25)


def _apart(values: dict[str, float], least: float = 1.35) -> dict[str, float]:
    """Places on a logarithmic axis near the values, each that many times the one below it."""
    places: dict[str, float] = {}
    below = 0.0
    for name in sorted(values, key=lambda name: values[name]):
        below = places[name] = max(values[name], least * below)
    return places


_MEASURED = [
    "device",
    "model",
    "mesh",
    "method",
    "step, ms",
    "predicted, ms",
    "above dense, ms",
    "predicted, ms",
    "slowest step, ms",
    "holds, GB",
    "by the compiler, GB",
]


def measured_table(rows: list[dict]) -> str:
    """A Markdown table of all measured rows; nothing without any."""
    run = [row for row in rows if "measured" in row]
    lines = [_measured_line(row, _measured_dense(row, run)) for row in run]
    return markdown(_MEASURED, lines) if run else ""


def measured_cell(found: dict) -> str:
    """What running a step has shown, in words."""
    if "error" in found:
        return f"not measured: {found['error']}"
    seconds, predicted = found["seconds"], found["predicted_seconds"]
    return f"measured {1e3 * seconds:.2f} ms, predicted {1e3 * predicted:.2f} ms"


def _measured_dense(row: dict, run: list[dict]) -> dict | None:
    """The dense step of the row's device, model and optimizer, if it was measured."""
    method = row["method"].partition(",")[0]  # a trial's name has more
    method = "dense_sgd" if method in WITH_MOMENTUM else "dense"
    where = {name: row[name] for name in ("device", "model", "mesh")} | {"method": method}
    same = (one["measured"] for one in run if where.items() <= one.items())
    return next((found for found in same if "error" not in found), None)


def _measured_line(row: dict, dense: dict | None) -> list[str]:
    found, key = row["measured"], _key(row)
    key[2] += ", mocked" if found.get("mocked") else ""
    if "error" in found:
        return [*key, measured_cell(found), *[""] * (len(_MEASURED) - 5)]
    names = "seconds", "predicted_seconds"
    own = [f"{1e3 * found[name]:.1f}" for name in names]
    is_dense = dense is None or dense is found
    above = ["" if is_dense else f"{1e3 * (found[n] - dense[n]):+.1f}" for n in names]
    held = [_gb(found[name]) for name in ("peak_bytes", "compiler_peak_bytes")]
    return [*key, *own, *above, f"{1e3 * found['slowest_seconds']:.1f}", *held]


def _gb(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.2f}"


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
_TARGETED = [
    "device",
    "model",
    "method",
    "moved, copies",
    "kernels",
    "temp, copies",
    "accessed",
    "at 500 Mbit/s",
]


def targets_table(rows: list[dict]) -> str:
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
            empty = [device, "", method, "not compiled", *[""] * (len(_TARGETED) - 4)]
            lines += found.get((device, method), [empty])
    return markdown(_TARGETED, lines)


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
