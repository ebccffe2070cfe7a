"""Times the update of every method against dense Adam's or dense LAMB's: no gradient, no network.

    python -m benchmarks.update --json FILE [--model 14M] [--repeats 9]

An update is a step without its gradient: coding, decoding, the optimizer and the new parameters,
of one replica alone. For methods that skip rounds each kind of step has a row. A row's update, that
of the dense method and the gradient of one sequence take turns, so that a busy machine slows all
alike; `ratio` and `step_ratio` are medians over the turns. What owners encode again for all, one
replica alone encodes in full: a two-shot mean goes 6 times over a bucket, among four 4.5 times.
"""

import argparse
import pathlib
import statistics
from collections.abc import Callable

from jax.sharding import Mesh

from benchmarks import rows as rows_file
from benchmarks.slow_network_methods import DENSE, LAMB, METHODS, MODELS
from benchmarks.slow_network_worker import config_of
from jaxcomp.measure import step_probe
from train.config import Config
from train.config.run import AXIS_NAME
from train.placement import build, counts, devices, replicated
from train.plan import planning

# An overlapped step has the same update as the method without overlap.
TIMED = [name for name in METHODS if not name.endswith("overlapped")]


def dense_of(method: str) -> str:
    """The method whose update a method's is compared with."""
    return LAMB if "LAMB" in method else DENSE


def kinds(config: Config) -> dict[str, int | None]:
    """What the steps of a method send, and how many steps come before one that does.

    Returns:
      By the names of the parts, "nothing" of a step that sends none; {"all": None} for a method
      whose steps are all alike.
    """
    tx, few = replicated.counted(config)
    sent = counts.parts_of_steps(tx, config.steps, few)
    if not sent:
        return {"all": None}
    sent.pop("all")
    firsts: dict[str, int | None] = {}
    for step, flags in enumerate(zip(*(flags.tolist() for flags in sent.values()), strict=True)):
        parts = [part for part, flag in zip(sent, flags, strict=True) if flag]
        firsts.setdefault(" and ".join(parts) or "nothing", step)
    return firsts


def timer_of(config: Config, mesh: Mesh) -> Callable[[int | None], float]:
    """Compiles an update; `count -> seconds` of one, after as many steps."""
    tx, params = replicated.resolve(config).tx, build.param_shapes(config)
    program = step_probe.update_program(tx, params, mesh, AXIS_NAME)
    timer = step_probe.update_timer(program, params, mesh, AXIS_NAME)
    return lambda count: timer(1, count)


def row(method: str, sends: str, turns: list[tuple[float, float, float]]) -> dict:
    """One row of seconds that were measured in turns.

    Args:
      method: Its name.
      sends: What the step sends.
      turns: For each turn the dense method's update, this one, and the gradient.
    """
    dense, update, gradient = zip(*turns, strict=True)
    quotients = [u / d for d, u, _ in turns]
    return {
        "method": method,
        "sends": sends,
        "dense": dense_of(method),
        "ratio": statistics.median(quotients),
        "ratio_range": [min(quotients), max(quotients)],
        "step_ratio": statistics.median((u + g) / (d + g) for d, u, g in turns),
        "share_of_step": statistics.median(u / (u + g) for _, u, g in turns),
        "dense_seconds": statistics.median(dense),
        "update_seconds": statistics.median(update),
        "gradient_seconds": statistics.median(gradient),
    }


def table(rows: list[dict]) -> str:
    """The rows in Markdown."""
    lines = ["| method | sends | against | update | step | of a step |", "|---" * 6 + "|"]
    for row in rows:
        lines.append(
            f"| {row['method']} | {row['sends']} | {row['dense']} | {row['ratio']:.2f} "
            f"| {row['step_ratio']:.2f} | {row['share_of_step']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measures one method after the other, each with its dense one; saves after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="file to write the rows to")
    parser.add_argument("--methods", nargs="+", default=TIMED, choices=TIMED, metavar="NAME")
    parser.add_argument("--model", default="14M", choices=list(MODELS))
    parser.add_argument("--sequences", type=int, default=1, help="of the gradient")
    parser.add_argument("--repeats", type=int, default=9, help="turns")
    args = parser.parse_args()
    devices.start(1)
    mesh = step_probe.alone(devices.make_mesh(1), AXIS_NAME)
    config = lambda name: config_of(METHODS[name], MODELS[args.model], 1, args.sequences)
    gradient = planning.gradient_timer(config(DENSE), devices.make_mesh(1))
    dense = {name: timer_of(config(name), mesh) for name in {dense_of(m) for m in args.methods}}
    facts = rows_file.machine() | {"model": args.model, "sequences": args.sequences}
    rows = []
    for name in args.methods:
        against = dense[dense_of(name)]
        timed = timer_of(config(name), mesh) if name not in dense else against
        for sends, count in kinds(config(name)).items():
            turns = [(against(None), timed(count), gradient(1)) for _ in range(args.repeats)]
            rows.append(row(name, sends, turns) | facts)
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if args.json:
                rows_file.write(args.json, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
