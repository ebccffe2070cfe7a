"""`python -m train CONFIG --plan`: recommends a method for a run on a network, or none."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxcomp.compressors.policies import path_of
from jaxcomp.launch import agree
from jaxcomp.measure import link_probe, planner, step_probe
from train.config import Config
from train.config.run import AXIS_NAME
from train.output import progress
from train.placement import build, counts, devices, replicated
from train.plan.arguments import Options

DENSE, DILOCO = "dense float32", "DiLoCo, 4 bits"
_MEAN = "chain(compressed_mean({}, axis_name), {})"
_ADAM, _SGD = "adam(learning_rate)", "sgd(learning_rate, momentum=0.9)"
METHODS = {
    # name: optimizer.update of a config, and its change to dense Adam; smallest change first
    DENSE: (_MEAN.format("identity()", _ADAM), ""),
    "dense bfloat16": (_MEAN.format("cast('bfloat16')", _ADAM), "rounds gradients"),
    "8 bits": (_MEAN.format("quantize(8)", _ADAM), "rounds gradients"),
    "4 bits": (_MEAN.format("quantize(4, block=32)", _ADAM), "rounds gradients"),
    "4 bits, sharded Adam": (
        f"sharded_optimizer({_ADAM}, axis_name)",
        "rounds gradients and updates",
    ),
    "1-bit Adam": (
        "one_bit_adam(learning_rate, axis_name, freeze_step=warmup_steps)",
        "variance frozen after the warm-up",
    ),
    "0/1 Adam": (
        "zero_one_adam(learning_rate, axis_name, "
        "sync_at=schedules.halving(learning_rate, steps, after=warmup_steps), "
        "variance_at=schedules.growing(until=warmup_steps))",
        "local steps, variance rarely learned",
    ),
    "1 bit, momentum SGD": (_MEAN.format("sign(block=128)", _SGD), "no Adam"),
    "CocktailSGD": (f"cocktail_sgd({_ADAM}, axis_name)", "local moments, a step late"),
    "PowerSGD, momentum SGD": (f"chain(power_sgd(4, axis_name), {_SGD})", "no Adam, rank 4"),
    DILOCO: (
        f"diloco({_ADAM}, axis_name, every=16, code=quantize(4))",
        "16 local steps, then an outer step",
    ),
    "SparseLoCo": (
        f"sparse_loco({_ADAM}, axis_name, every=16)",
        "16 local steps, then the largest differences",
    ),
}
OWN = "this config"
REPEATS = 5
_ROUND = 16  # steps of the methods with rounds
_UNOPTIMIZED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make_plan(config: Config, options: Options) -> tuple[planner.Plan, planner.Link]:
    """Predicts the step of every method for a run; all processes call it together.

    Args:
      config: The run; its own update is one of the methods.
      options: The given numbers, and whether the rest is measured on these devices.

    Returns:
      The plan, and the link that it is for.

    Raises:
      ValueError: If a number is neither given nor to be measured, or there is only one replica.
    """
    mesh = _mesh(config, options)
    replicas = mesh.shape[AXIS_NAME]
    if options.link_rate is None:
        link = link_probe.measure_link(mesh, AXIS_NAME)
    else:
        link = planner.uniform_link(options.link_rate, options.link_latency, replicas)
    runs, changes = runs_of(config)
    methods, silent = {}, contextlib.nullcontext(lambda more: None)
    local = functools.cache(lambda name: update_timer(runs[name], mesh)())
    make = lambda name: make_method(name, runs[name], mesh, changes[name])
    rate, timed = options.codec_rate, []
    parts = len(runs) if rate is not None else 2 * len(runs)
    with progress.counted("plan", parts) if agree.is_first() else silent as show:
        for method in _together(make, runs):
            methods[method.name] = method
            show(1)
        for name, run in runs.items():
            if rate is not None:
                seconds = codec_seconds(run, rate) if changes[name] else 0.0
            else:
                seconds = codec(methods[name], local(name) - local(DENSE), replicas)
                show(1)
            timed.append(dataclasses.replace(methods[name], codec_seconds=seconds))
    compute = options.compute_seconds
    if compute is None:
        compute = gradient_timer(config, mesh)() + local(DENSE)
    timed += [islands_of(method, replicas) for method in timed if method.name == DILOCO]
    return planner.plan(timed, link, compute), link


def _together(make, names):
    """What `make` returns for each name, in their order, compiled beside each other."""
    # Several processes compile in the same order: a GPU's compiler may wait for the others.
    workers = os.cpu_count() if jax.process_count() == 1 else 1
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        yield from pool.map(make, names)


def runs_of(config: Config) -> tuple[dict[str, Config], dict[str, str]]:
    """The run with each method, and each method's change to dense Adam; its own is second."""
    # A run that ends before the first round would send nothing, and cost nothing.
    long = dataclasses.replace(config, steps=max(_ROUND, config.steps))
    others = {name: with_update(long, update) for name, (update, _) in METHODS.items()}
    changes = {name: change for name, (_, change) in METHODS.items()}
    known = {update for update, _ in METHODS.values()}
    if config.optimizer.update in known and not config.overlap:
        return others, changes
    return {DENSE: others[DENSE], OWN: config} | others, changes | {OWN: "what it says"}


def islands_of(diloco: planner.Method, replicas: int) -> planner.Method:
    """Islands with the code of DiLoCo: rounds of 100 steps, whose outer step is 10 steps late."""
    rounds = min(message.times for message in diloco.messages)
    shares = sum(message.sent_bytes * message.times for message in diloco.messages) / rounds
    message_bytes = shares * replicas / (2 * (replicas - 1))  # a two-shot mean sends it in parts
    made = planner.over_bucket(message_bytes, replicas, every=100, delay=10, name="islands, 4 bits")
    codec_seconds = diloco.codec_seconds / rounds / 100
    return dataclasses.replace(made, codec_seconds=codec_seconds, memory_bytes=diloco.memory_bytes)


def codec(method: planner.Method, more: float, num_replicas: int) -> float:
    """Seconds of a codec among replicas, if alone it takes `more` seconds."""
    return max(0.0, more) * step_probe.passes(method.messages, num_replicas)


def _mesh(config: Config, options: Options) -> Mesh:
    """The mesh of a run; a ValueError if the run cannot be planned."""
    if config.qsdp is not None:
        raise ValueError(
            f"a plan is for replicas that hold all parameters, not for qsdp={config.qsdp!r}; "
            "write --report for its bytes."
        )
    missing = [
        f"--{name.replace('_', '-')}"
        for name, value in dataclasses.asdict(options).items()
        if value is None
    ]
    if missing and not options.measure:
        raise ValueError(
            f"a plan needs {', '.join(missing)}; write them, or --measure to time them here."
        )
    if (options.link_rate is None) != (options.link_latency is None):
        raise ValueError(
            "a link has a rate and a latency; write --link-rate 500e6 --link-latency 1e-3."
        )
    mesh = devices.make_mesh(config.replicas, config.fast)
    if mesh.shape[AXIS_NAME] < 2:
        raise ValueError(
            f"one replica has nobody to send to; write --replicas {4 * config.fast}, or more."
        )
    return mesh


def with_update(config: Config, update: str) -> Config:
    """The run with another update, in one program, with a warm-up of at least one step."""
    warmup = max(1, config.optimizer.warmup_steps)
    optimizer = dataclasses.replace(config.optimizer, update=update, warmup_steps=warmup)
    steps = max(2, config.steps)
    return dataclasses.replace(config, optimizer=optimizer, steps=steps, overlap=False)


def make_method(name: str, config: Config, mesh: Mesh, changes: str) -> planner.Method:
    """Compiles a run's exchange and reads its bytes and memory; does not time its codec."""
    placed, params = replicated.resolve(config), build.param_shapes(config)
    axes = AXIS_NAME, devices.fast_axis_of(config.fast)
    # The program never runs. Only the CPU's compiler is known to keep its messages and memory.
    how = _UNOPTIMIZED if mesh.devices.flat[0].platform == "cpu" else None
    program = step_probe.update_program(placed.tx, params, mesh, *axes, how).step
    shares = {part: n / config.steps for part, n in rounds_of(config).items()}
    return planner.Method(
        name=name,
        messages=step_probe.messages(program, mesh, shares, AXIS_NAME),
        memory_bytes=step_probe.held_bytes(program),
        changes=changes,
        overlaps=float(config.overlap),
    )


def update_timer(config: Config, mesh: Mesh) -> Callable[[], float]:
    """Makes a timer of a run's update without its messages, averaged over its steps."""
    placed, params = replicated.resolve(config), build.param_shapes(config)
    axes = AXIS_NAME, devices.fast_axis_of(config.fast)
    copies = step_probe.alone(mesh, *axes)
    program = step_probe.update_program(placed.tx, params, copies, *axes)
    time = step_probe.update_timer(program, params, copies, *axes)
    tx, few = replicated.counted(config)
    kinds = counts.kinds_of_steps(tx, config.steps, few)
    return lambda: sum(share * time(REPEATS, first) for first, share in kinds.items())


def codec_seconds(config: Config, rate: float) -> float:
    """Seconds per step of encoding what is trained at a given rate, averaged over a run.

    Each device of a replica encodes a share.
    """
    share = rounds_of(config).get("all", config.steps) / config.steps
    return 4 * num_elements(config) / config.fast / rate * share


@functools.cache
def rounds_of(config: Config) -> dict[str, int]:
    """How often a run sends each part, see `counts.rounds`."""
    tx, few = replicated.counted(config)
    return counts.rounds(tx, config.steps, few)


def num_elements(config: Config) -> int:
    """Elements of the parameters that a run trains; others are not encoded."""
    leaves = jax.tree.leaves_with_path(build.param_shapes(config))
    trains = re.compile(config.trainable or "").search
    return sum(math.prod(x.shape) for key, x in leaves if trains(path_of(key)))


def gradient_timer(config: Config, mesh: Mesh) -> Callable[..., float]:
    """Makes a timer of the gradient of a run's replicas: `(repeats) -> seconds`."""
    loss_fn = build.loss_of(config)
    shapes = build.param_shapes(config), build.batch_of(config, mesh)
    time = step_probe.gradient_timer(loss_fn, *shapes, mesh, mesh.axis_names, config.accumulate)
    return lambda repeats=REPEATS: time(repeats)


def text(planned: planner.Plan, link: planner.Link) -> str:
    """A plan and its link as text."""
    return "\n".join([planner.table(planned), *(_line(op, cost) for op, cost in link.items())])


def _line(op: str, cost: planner.Cost) -> str:
    """A collective's time at three sizes."""
    shown = (1e3, 1e5, 1e7)
    times = [f"{1e3 * planner.cost_seconds(cost, size):,.2f} ms" for size in shown]
    return f"{op} of 1 kB {times[0]}, of 100 kB {times[1]}, of 10 MB {times[2]}"
