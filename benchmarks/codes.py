"""What codes cost: their own time, that of whole updates, and memory; no network.

    python -m benchmarks.codes [codec] [update] [memory] [moved] [--quick] [--folder FOLDER]

`codec` times each code against a copy of the same array. A row's seconds are those of `encode`,
from the bucket to the payload, plus those of `decode`, from the payload to a new array; each is the
median of the repeats. Rows and copies alternate, so that a busy machine slows all of them. `target`
is the greatest accepted ratio, `met` whether it holds. The last rows compare with `lax.top_k`.

`update` times the update of every method against dense Adam's or dense LAMB's. An update is a step
without its gradient: coding, decoding, the optimizer and the new parameters, of one replica alone.
For methods that skip rounds each kind of step has a row. A row's update, that of the dense method
and the gradient of one sequence take turns; `ratio` and `step_ratio` are medians over the turns.
What owners encode again for all, one replica alone encodes in full: a two-shot mean goes 6 times
over a bucket, among four 4.5 times.

`memory` reads from compiled steps how much memory methods need above dense Adam, on 2**27
parameters. XLA says what a step holds at most: arguments, results that are not donated arguments,
and temporaries. Nothing runs. `gradients` is the difference to the dense step of as many replicas,
in copies of a float32 gradient.

`moved` compiles `encode` and `decode` of a bucket, each alone, for an H100, and compares the bytes
that their kernels read and write with the least that they must; see `least_bytes`. Nothing runs. It
needs what benchmarks.accelerators needs.
"""

import argparse
import functools
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks import rows as rows_file
from benchmarks.accelerators import COMPILING, apart
from benchmarks.accelerators_devices import mesh_of, unavailable
from benchmarks.accelerators_program import Cost, Program
from benchmarks.accelerators_step import memory
from benchmarks.rows import interleaved, markdown
from benchmarks.worker import DENSE, LAMB, MODELS, UPDATES, config_of
from jaxcomp.compressors.base import Compressor, Key
from jaxcomp.compressors.compose import cocktail, compose
from jaxcomp.compressors.learned import learned_levels
from jaxcomp.compressors.packing import fold
from jaxcomp.compressors.quantize import cast, quantize
from jaxcomp.compressors.rotated import rotated
from jaxcomp.compressors.sign import sign
from jaxcomp.compressors.sparse import group_top_1, random_k, top_k
from jaxcomp.measure import step_probe
from train.config import Config
from train.config.run import AXIS_NAME
from train.placement import build, counts, devices, replicated
from train.plan import planning

TARGET = 8.0
CODES = [
    # compressor, greatest ratio to a copy
    (cast("bfloat16"), None),
    (sign(), TARGET),
    (sign(block=128), None),
    (quantize(1), None),
    (quantize(3), None),
    (quantize(4), TARGET),
    (quantize(4, rounding="stochastic"), TARGET),
    (quantize(4, rounding="shift"), None),
    (quantize(4, range="minmax"), None),
    (quantize(8), None),
    (learned_levels(4), None),
    (rotated(quantize(4)), None),
    (rotated(learned_levels(4)), None),
    (random_k(0.1), TARGET),
    (random_k(0.1, pattern="random"), None),
    (group_top_1(8), TARGET),
    (group_top_1(64), None),
    (compose(group_top_1(8), quantize(4)), None),
    (compose(random_k(0.1), group_top_1(8), quantize(4)), None),
]


def keys() -> tuple[Key, Key]:
    """The shared and the private key of all calls."""
    shared = Key(jnp.int32(3), jnp.uint32(7))
    return shared, fold(shared, 1)


def codec_calls(compressor, x) -> dict:
    """The two compiled halves of a compressor, as calls without arguments."""
    encode, decode = jax.jit(compressor.encode), jax.jit(compressor.decode)
    shared, private = keys()
    payload = encode(x, shared, private)
    return {"encode": lambda: encode(x, shared, private), "decode": lambda: decode(payload, shared)}


def codec_row(compressor, target, x, repeats) -> dict:
    """One compressor against the copy of the bucket."""
    copy = jax.jit(jnp.copy)
    calls = {"copy": lambda: copy(x), **codec_calls(compressor, x)}
    median = interleaved(calls, repeats)
    seconds = median["encode"] + median["decode"]
    return {
        "code": compressor.name,
        "seconds": seconds,
        "encode_seconds": median["encode"],
        "decode_seconds": median["decode"],
        "copy_seconds": median["copy"],
        "ratio": seconds / median["copy"],
        "target": target,
        "met": None if target is None else seconds <= target * median["copy"],
    }


def against_row(name, compressor, other, target, x, repeats) -> dict:
    """One compressor against another, halves summed; `ratio` is its share of the other's time."""
    pair = {"this": compressor, "other": other}
    calls = {
        f"{role} {half}": call
        for role, each in pair.items()
        for half, call in codec_calls(each, x).items()
    }
    median = interleaved(calls, repeats)
    seconds = median["this encode"] + median["this decode"]
    other_seconds = median["other encode"] + median["other decode"]
    return {
        "code": name,
        "seconds": seconds,
        "other_seconds": other_seconds,
        "ratio": seconds / other_seconds,
        "target": target,
        "met": seconds <= target * other_seconds,
    }


def select_rows(x, repeats) -> list[dict]:
    """Codes that choose an eighth of the entries, against `lax.top_k`; without packing."""
    targets, (shared, _) = {group_top_1(8): 1 / 50, top_k(1 / 8): None}, keys()
    whole = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), x.size // 8))
    calls = {"whole": lambda: whole(x)}
    for code in targets:
        choose = jax.jit(lambda x, code=code: code.selection.select(x, shared))
        calls[code.name] = lambda choose=choose: choose(x)
    median = interleaved(calls, repeats)
    return [
        {
            "code": f"{code.name}.select / lax.top_k at density 1/8",
            "seconds": median[code.name],
            "other_seconds": median["whole"],
            "ratio": median[code.name] / median["whole"],
            "target": target,
            "met": None if target is None else median[code.name] <= target * median["whole"],
        }
        for code, target in targets.items()
    ]


# An overlapped step has the same update as the method without overlap.
QUICK = [DENSE, "4 bits", "CocktailSGD"]
TIMED = [name for name in UPDATES if not name.endswith("overlapped")]


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


def update_row(method: str, sends: str, turns: list[tuple[float, float, float]]) -> dict:
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
    lines = []
    for row in rows:
        ratios = f"{row['ratio']:.2f}", f"{row['step_ratio']:.2f}", f"{row['share_of_step']:.0%}"
        lines.append([row["method"], row["sends"], row["dense"], *ratios])
    return markdown(["method", "sends", "against", "update", "step", "of a step"], lines)


NUMEL = 2**27  # more than one bucket: small models need less


class Held(NamedTuple):
    """A transformation, and how many gradients above the dense step it may take."""

    name: str
    tx: optax.GradientTransformation
    replicas: int
    target: float | None  # None: what its state needs is more, and only told


def mean(code, replicas, target, exchange=jaxcomp.two_shot) -> Held:
    """The row of a compressor in front of Adam."""
    averaged = jaxcomp.compressed_mean(exchange(code), "replica")
    name = f"{code.name} {exchange!r}"
    return Held(name, optax.chain(averaged, optax.adam(1e-3)), replicas, target)


# Residuals are 1 + 1/R gradients, and as much again until the update is known to be finite: 2.5 for
# four replicas, 3 for two, plus messages; `gathered` has no owners. top_k looks its values up entry
# by entry, once for all readers: XLA keeps a dense result.
HELD = [
    mean(jaxcomp.quantize(4), 4, 3),
    mean(jaxcomp.quantize(4, rounding="stochastic"), 4, 3),
    mean(jaxcomp.sign(), 4, 3),
    mean(jaxcomp.group_top_1(8), 4, 3),
    mean(jaxcomp.group_top_1(64), 4, 3),
    mean(jaxcomp.compose(jaxcomp.group_top_1(8), jaxcomp.quantize(4)), 4, 3),
    mean(jaxcomp.top_k(0.1), 4, 4),
    mean(jaxcomp.quantize(4), 2, 3, jaxcomp.gathered),
    mean(jaxcomp.group_top_1(8), 2, 3, jaxcomp.gathered),
    mean(jaxcomp.quantize(4), 2, 3.25),
    Held("cocktail_sgd", jaxcomp.cocktail_sgd(optax.adam(1e-3), "replica"), 4, None),
    Held("one_bit_adam", jaxcomp.one_bit_adam(1e-3, "replica", freeze_step=9), 4, None),
    Held("sharded_optimizer", jaxcomp.sharded_optimizer(optax.adam(1e-3), "replica"), 4, None),
    Held("zero_one_adam", jaxcomp.zero_one_adam(1e-3, "replica"), 4, None),
    *(
        Held(
            f"one_bit_adam, residual in {bits} bits",
            jaxcomp.compact(jaxcomp.one_bit_adam(1e-3, "replica", freeze_step=9), bits),
            4,
            None,
        )
        for bits in (8, 16)
    ),
]


def peak_bytes(tx: optax.GradientTransformation, num_replicas: int, numel: int) -> int:
    """Memory of a device in a compiled step, what is donated counted once."""
    mesh = devices.make_mesh(num_replicas)
    abstract = lambda x, spec: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
    )
    half = np.broadcast_to(np.float32(0), (numel // 1024, 512))
    params = {name: abstract(half, P()) for name in ("a", "b")}
    batch = abstract(np.broadcast_to(np.float32(0), (8, numel // 1024)), P("replica"))
    loss_fn = lambda p, x: jnp.mean((x @ p["a"] @ p["b"].T) ** 2)
    specs = jaxcomp.state_specs(jaxcomp.per_replica(tx, "replica"), params, mesh, "replica")
    step = jaxcomp.train_step(loss_fn, tx, mesh, "replica")
    state = jax.tree.map(abstract, jax.eval_shape(step.init, params), specs)
    return memory(step.step.lower(params, state, batch).compile())["peak_bytes"]


@functools.cache
def dense_peak_bytes(num_replicas: int, numel: int) -> int:
    """The same of dense Adam."""
    return peak_bytes(mean(jaxcomp.identity(), num_replicas, 0).tx, num_replicas, numel)


def gradients_above_dense(row: Held, numel: int = NUMEL) -> float:
    """The difference of the two, in copies of a gradient."""
    dense = dense_peak_bytes(row.replicas, numel)
    return (peak_bytes(row.tx, row.replicas, numel) - dense) / (4 * numel)


MOVED: dict[Compressor, Compressor | None] = {
    quantize(8): None,
    quantize(4): None,
    sign(block=128): None,
    sign(block=1024): None,
    random_k(0.1): random_k(0.1),
    cocktail(): random_k(0.1),
}
"""Codes, and the code that chooses what they look at; None for all values."""
BUCKET = 2**22  # values of a message
_KEY = Key(jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.uint32))


def payload_bytes(code: Compressor, numel: int) -> int:
    """Bytes of a code's payload."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(_payload(code, numel)))


def _payload(code, numel):
    x = jax.ShapeDtypeStruct((numel,), jnp.float32)
    return jax.eval_shape(code.encode, x, _KEY, _KEY)


def least_bytes(code: Compressor, chooses: Compressor | None, numel: int) -> tuple[int, int]:
    """Bytes that encoding and decoding must move, if each value is read once and written once.

    With n values, of which a share s is looked at, and a payload of p bytes,

        encode = 4 s n + p,  decode = p + 4 n.

    A scale is known when its block has been read: a kernel that keeps the block in registers need
    not read it again.
    """
    payload = payload_bytes(code, numel)
    seen = 4 * numel if chooses is None else payload_bytes(chooses, numel)
    return seen + payload, payload + 4 * numel


def compiled_costs(name: str, numel: int) -> tuple[Cost, Cost]:
    """What the H100 programs of encoding and of decoding cost, for a name in `MOVED`."""
    (code,) = (code for code in MOVED if code.name == name)
    mesh = mesh_of("h100", (1,))
    whole = NamedSharding(mesh, P())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
    x = jax.ShapeDtypeStruct((numel,), jnp.float32)
    calls = (code.encode, (x, _KEY, _KEY)), (code.decode, (_payload(code, numel), _KEY))

    def cost(function, arguments):
        on_device = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P())
        program = jax.jit(on_device).lower(*jax.tree.map(place, arguments)).compile()
        return Program(program.as_text()).cost

    encode, decode = (cost(*call) for call in calls)
    return encode, decode


def measure_codec(options: argparse.Namespace) -> Iterator[dict]:
    """The rows of all codes, and a line of print for each."""
    numel, repeats = (2**20, 3) if options.quick else (options.numel, options.repeats)
    x = jnp.asarray(np.random.default_rng(0).standard_normal(numel, np.float32))
    rows = [codec_row(each, target, x, repeats) for each, target in CODES]
    nearest, stochastic = quantize(4), quantize(4, rounding="stochastic")
    pair = "4 bits, stochastic / nearest"
    rows.append(against_row(pair, stochastic, nearest, 2.0, x, repeats))
    print(f"{'':52s} {'ms':>9s} {'ratio':>8s} target")
    for row in rows + select_rows(x, min(repeats, 3)):
        target = "" if row["target"] is None else f"{row['target']:g}"
        missed = " MISSED" if row["met"] is False else ""
        print(f"{row['code']:52s} {1e3 * row['seconds']:9.2f} {row['ratio']:8.3f} {target}{missed}")
        yield row | {"numel": numel}


def measure_update(options: argparse.Namespace) -> Iterator[dict]:
    """The rows of all updates, one method after the other, each with its dense one."""
    names, model, repeats = options.methods or TIMED, options.model, options.repeats
    if options.quick:
        names, model, repeats = options.methods or QUICK, "0.5M", 3
    devices.start(1)
    mesh = step_probe.alone(devices.make_mesh(1), AXIS_NAME)
    config = lambda name: config_of(UPDATES[name], MODELS[model], 1, options.sequences)
    gradient = planning.gradient_timer(config(DENSE), devices.make_mesh(1))
    dense = {name: timer_of(config(name), mesh) for name in {dense_of(name) for name in names}}
    for name in names:
        against = dense[dense_of(name)]
        timed = timer_of(config(name), mesh) if name not in dense else against
        for sends, count in kinds(config(name)).items():
            turns = [(against(None), timed(count), gradient(1)) for _ in range(repeats)]
            row = update_row(name, sends, turns)
            print(table([row]).splitlines()[-1], flush=True)
            yield row | {"model": model, "sequences": options.sequences}


def measure_memory(options: argparse.Namespace) -> Iterator[dict]:
    """The rows of all steps that are compiled for their memory."""
    numel = 2**20 if options.quick else NUMEL
    devices.start(max(row.replicas for row in HELD))
    for row in [row for row in HELD if row.target is not None or not options.quick]:
        gradients = gradients_above_dense(row, numel)
        print(f"{row.name}, {row.replicas} replicas: {gradients:.2f}", flush=True)
        facts = {"method": row.name, "replicas": row.replicas, "target": row.target}
        yield facts | {"gradients": gradients, "numel": numel}


def measure_moved(options: argparse.Namespace) -> Iterator[dict]:
    """The rows of all codes that are compiled for an H100; none without its compiler."""
    if (reason := unavailable("h100")) is not None:
        print(reason)
        return
    numel = 2**16 if options.quick else BUCKET
    for code, chooses in MOVED.items():
        # Apart: here JAX would look for the device of the compiler's plugin.
        costs = apart(compiled_costs, code.name, numel, environment=COMPILING)
        least = least_bytes(code, chooses, numel)
        moved = [cost.moved for cost in costs]
        facts = {"code": code.name, "device": "h100", "numel": numel, "target": 1.3}
        row = facts | {
            "encode_kernels": costs[0].kernels,
            "decode_kernels": costs[1].kernels,
            "encode_bytes": moved[0],
            "decode_bytes": moved[1],
            "encode_least_bytes": least[0],
            "decode_least_bytes": least[1],
            "ratio": sum(moved) / sum(least),
        }
        print(moved_table([row]).splitlines()[-1], flush=True)
        yield row


def moved_table(rows: list[dict]) -> str:
    """The rows of `moved` in Markdown, in bytes per value; a missed target is bold."""
    lines = []
    for row in rows:
        each = {half: row[f"{half}_bytes"] for half in ("encode", "decode")}
        least = {half: row[f"{half}_least_bytes"] for half in each}
        ratios = [f"{each[half] / least[half]:.2f}" for half in each]
        both = f"{row['ratio']:.2f}"
        cells = [f"{sum(found.values()) / row['numel']:.2f}" for found in (least, each)]
        kernels = f"{row['encode_kernels']} + {row['decode_kernels']}"
        cells += [kernels, *ratios, both if row["ratio"] <= row["target"] else f"**{both}**"]
        lines.append([f"`{row['code']}`", *cells])
    return markdown(["code", "must move", "moves", "kernels", "encode", "decode", "both"], lines)


PARTS = {
    "codec": measure_codec,
    "update": measure_update,
    "memory": measure_memory,
    "moved": measure_moved,
}


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; or all")
    parser.add_argument("--quick", action="store_true", help="small arrays, few methods: a minute")
    parser.add_argument("--folder", type=pathlib.Path, help="for the rows, a file for each part")
    parser.add_argument(
        "--numel", type=int, default=2**24, help="codec: float32 values in a bucket"
    )
    parser.add_argument("--repeats", type=int, default=9, help="of each call, or turns")
    parser.add_argument("--methods", nargs="+", choices=TIMED, metavar="NAME", help="update: these")
    parser.add_argument("--model", default="14M", choices=list(MODELS), help="update: its size")
    parser.add_argument("--sequences", type=int, default=1, help="update: of the gradient")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"got {', '.join(unknown)}, need parts of {', '.join(PARTS)}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measures a part, and saves after each row; several parts have a process each."""
    argv = sys.argv[1:] if argv is None else argv
    options = parsed(argv)
    if len(options.parts) != 1:  # each has a number of devices of its own
        rest = [word for word in argv if word not in PARTS]
        for part in options.parts or PARTS:
            print(f"\n{part}", flush=True)
            subprocess.run([sys.executable, "-m", "benchmarks.codes", part, *rest], check=True)
        return
    (part,), rows = options.parts, []
    for row in PARTS[part](options):
        rows.append(row | rows_file.machine())
        if options.folder:
            rows_file.write(options.folder / f"{part}.json", rows)


if __name__ == "__main__":
    main()
