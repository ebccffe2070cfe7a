"""Steps that are compiled for accelerators, as `train` runs them, and the facts of their programs.

All arrays are abstract. A sequence has 128 tokens and each device one of them, so that what the
exchange needs is not hidden by activations: figures of a method are differences to the dense step.
"""

import collections
import dataclasses
import inspect
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from benchmarks import methods
from benchmarks.accelerators_devices import (
    DEVICES,
    RATES,
    Work,
    gradient_flops,
    local_seconds,
    mesh_of,
    predicted_seconds,
)
from benchmarks.accelerators_program import Message, Overlap, Program, messages, overlap
from benchmarks.methods import Method
from jaxcomp import report
from jaxcomp.steps.train import sends_early
from train.config import Config, Data, Optimizer
from train.config.run import AXIS_NAME
from train.models.decoder import DecoderConfig
from train.placement import build
from train.placement.devices import FAST_AXIS
from train.placement.resolve import resolve

TOKENS = 128
"""Of a sequence in the programs that are compiled; a prediction counts those of its own batch."""

_TINY = DecoderConfig(layers=1, width=256, heads=4, context=TOKENS, vocab=1024, dtype="bfloat16")
_124M = DecoderConfig(layers=12, width=768, heads=12, context=1024, vocab=50_257, dtype="bfloat16")
_1_3B = DecoderConfig(
    layers=24, width=2048, heads=32, context=1024, vocab=50_272, dtype="bfloat16", scan=True
)
MODELS: dict[str, DecoderConfig] = {
    "tiny": _TINY,
    "tiny-in-shards": _TINY,
    "toy": DecoderConfig(
        layers=4, width=768, heads=12, context=TOKENS, vocab=6720, dtype="bfloat16"
    ),
    "124m": _124M,
    "124m-scan": dataclasses.replace(_124M, scan=True),
    "124m-scans": dataclasses.replace(_124M, scan=True, stacks=4),
    "1.3b": _1_3B,
    "1.3b-scans": dataclasses.replace(_1_3B, stacks=4),
    "20b": DecoderConfig(
        layers=44, width=6144, heads=64, context=1024, vocab=50_432, dtype="bfloat16", scan=True
    ),
}
IN_SHARDS = ("tiny-in-shards", "20b")
"""Models whose parameters are sharded over the devices of a host."""


METHODS: dict[str, Method] = {
    name: methods.METHODS[known]._replace(
        layered=name in ("power_sgd", "dion", "muloco", "one_bit_lamb", "slamb", "slamb_mean")
    )
    for name, known in {
        "dense": "dense AdamW",
        "dense_sgd": "dense momentum SGD",
        "q8": "8-bit AdamW",
        "q4": "4-bit AdamW",
        "dense_in_tree_order": "dense AdamW, order of the tree",
        "q4_in_tree_order": "4-bit AdamW, order of the tree",
        "sign": "sign momentum SGD",
        "top_k": "top_k momentum SGD",
        "group_top_1": "group_top_1 momentum SGD",
        "cocktail": "CocktailSGD, AdamW",
        "cocktail_lean": "CocktailSGD, AdamW, narrow momentum",
        "local_steps": "local steps, AdamW",
        "muloco": "MuLoCo",
        "power_sgd": "PowerSGD",
        "dion": "Dion, rank 64",
        "demo": "DeMo",
        "demo_owners": "DeMo, 4 bits, owners",
        "one_bit_adam": "1-bit Adam, 100 dense steps",
        "one_bit_lamb": "1-bit LAMB, 100 dense steps",
        "zero_one_adam": "0/1 Adam, plain",
        "slamb": "SLAMB, plain",
        "slamb_mean": "SLAMB, plain, mean variance",
        "sharded_optimizer": "sharded AdamW",
        "qsdp": "QSDP W8G8, fast axis",
    }.items()
}
WITH_MOMENTUM = tuple(name for name, method in METHODS.items() if methods.SGD in method.update)
"""Methods before momentum SGD, including "dense_sgd"."""


class Built(NamedTuple):
    """A step and the abstract arrays that it is lowered for."""

    config: Config
    mesh: Mesh
    init: Callable[[Any], tuple[Any, Any]]  # natural parameters -> params, state
    step: Any  # a jitted function, or like one
    params: Any
    state: Any
    batch: Any
    numel: int  # of the parameters of a replica


def has_fast_axis(method: Method) -> bool:
    """Whether a step of the method distinguishes the devices of a host from other hosts."""
    arguments = inspect.signature(jaxcomp.train_step).parameters
    return method.qsdp is not None or "fast_axis" in arguments


def model_for(device: str, model: str) -> DecoderConfig:
    """The named model, in a device's compute dtype."""
    return dataclasses.replace(MODELS[model], dtype=DEVICES[device].dtype)


def build_step(model: DecoderConfig, method: Method, mesh: Mesh, in_shards: bool = False) -> Built:
    """Makes the step of a method, for `lower`; nothing is computed.

    Args:
      model: Its size.
      method: Its update.
      mesh: Mesh of hosts, or of hosts and their devices. Where the method knows no fast axis, all
        devices are replicas alike.
      in_shards: Whether the parameters of a replica, which is a host, lie on all its devices.
    """
    if len(mesh.axis_names) > 1 and not (in_shards or has_fast_axis(method)):
        mesh = Mesh(mesh.devices.reshape(-1), (AXIS_NAME,), axis_types=mesh.axis_types[:1])
    return abstract_step(config_of(model, method, mesh, in_shards), mesh, batch_of(mesh))


def abstract_step(config: Config, mesh: Mesh, batch: Any = None) -> Built:
    """The step of a run of `train`, for `lower`; by default with the batch of the run."""
    functions = resolve(config).functions(mesh)
    natural = build.param_shapes(config)
    everywhere = jax.tree.map(lambda _: NamedSharding(mesh, P()), natural)
    places = functions.places(natural) if functions.places else everywhere
    like = jax.eval_shape(functions.init, _placed(natural, places))
    params, state = _placed(like, functions.shardings(natural))
    batch = build.batch_of(config, mesh) if batch is None else batch
    numel = sum(leaf.size for leaf in jax.tree.leaves(natural))
    return Built(config, mesh, functions.init, functions.step, params, state, batch, numel)


def config_of(model: DecoderConfig, method: Method, mesh: Mesh, in_shards: bool = False) -> Config:
    """The run of `train` whose step it is."""
    return Config(
        name="accelerators",
        steps=1000,
        replicas=mesh.size,
        fast=mesh.shape.get(FAST_AXIS, 1),
        in_shards=in_shards,
        per_layer=method.layered,
        optimizer=Optimizer(update=method.update, learning_rate=1e-3),
        qsdp=method.qsdp,
        model=model,
        data=Data(batch=mesh.size),
    )


def batch_of(mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A batch with a sequence per device."""
    rows = NamedSharding(mesh, P(mesh.axis_names))
    return jax.ShapeDtypeStruct((mesh.size, TOKENS + 1), "int32", sharding=rows)


def _placed(like: Any, shardings: Any) -> Any:
    place: Callable = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, like, shardings)


KEY = ("device", "model", "method", "mesh")


def row(device: str, model: str, method: str, sizes: tuple[int, ...]) -> dict:
    """Compiles a step and reads its program; takes seconds to minutes, runs nothing.

    Args:
      device: A key of `DEVICES`.
      model: A key of `MODELS`.
      method: A key of `METHODS`.
      sizes: `(hosts,)`, or `(hosts, devices of each)`.
    """
    began, spent = time.perf_counter(), _cpu_seconds()
    typed = model_for(device, model)
    built = build_step(typed, METHODS[method], mesh_of(device, sizes), model in IN_SHARDS)
    compiled = compile_step(built)
    seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - spent
    text = compiled.as_text()
    return {
        **dict(zip(KEY, (device, model, method, "x".join(map(str, sizes))), strict=True)),
        "parameters": built.numel,
        "compile_seconds": seconds,
        "compile_cpu_seconds": cpu_seconds,
        **facts(compiled, text, built, device, sizes),
        "jax": jax.__version__,
        "options": _options(built, model in IN_SHARDS),
    }


def _options(built: Built, in_shards: bool) -> dict[str, Any]:
    """What XLA is told by the step."""
    if built.config.qsdp is not None:
        return jaxcomp.compiler_options(built.mesh, gathers_layers=True)
    axes = (AXIS_NAME,) if in_shards else built.mesh.axis_names
    return jaxcomp.compiler_options(built.mesh, early=sends_early(built.mesh, axes, built.state))


def rows(device: str, model: str, names: Sequence[str], sizes: tuple[int, ...]) -> list[dict]:
    """Rows of several methods, made in one process."""
    return [row(device, model, name, sizes) for name in names]


def compile_step(built: Built) -> jax.stages.Compiled:
    """Compiles a step for its mesh."""
    return built.step.lower(built.params, built.state, built.batch).compile()


def facts(
    compiled: jax.stages.Compiled, text: str, built: Built, device: str, sizes: tuple[int, ...]
) -> dict:
    """The facts from a program's text and XLA's analyses."""
    program, mesh, copy = Program(text), built.mesh, 4 * built.numel
    cost, held = program.cost, memory(compiled)
    crossing = between_hosts(program, mesh)
    hidden = overlap(program, crossing)
    sent = {axis: report.sent_bytes(compiled, mesh, axis) for axis in mesh.axis_names}
    work = _work(built, cost, hidden, sent, sizes)
    return {
        "moved_copies": cost.moved / copy,
        "kernels": cost.kernels,
        "loops": cost.loops,
        "unknown_loops": cost.unknown_loops,
        "accessed_bytes": _accessed(compiled),
        "memory": held | {"temp_copies": held["temp_bytes"] / copy},
        "messages": _counted(crossing),
        "messages_inside": sum(m.inside for m in crossing),
        "products": cost.products,
        "products_beside": hidden.beside,
        "products_in_span": hidden.span,
        "products_after_first": hidden.after_first,
        "bytes_asynchronous": hidden.bytes_asynchronous,
        "sent_bytes": sent,
        "nic_bytes": work.nic_bytes,
        "predicted": predictions(device, work),
    }


def memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of one device, according to the compiler; donated buffers count once."""
    found = compiled.memory_analysis()
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return {
        "argument_bytes": found.argument_size_in_bytes,
        "temp_bytes": found.temp_size_in_bytes,
        "peak_bytes": kept + found.temp_size_in_bytes,
    }


def predictions(device: str, work: Work) -> dict[str, float]:
    """Predicted seconds of a step at each rate of `RATES`, and with an unlimited network."""
    kind = DEVICES[device]
    seconds = {name: predicted_seconds(kind, work, rate) for name, rate in RATES.items()}
    return {**seconds, "unlimited": local_seconds(kind, work)}


def _work(built: Built, cost, hidden: Overlap, sent: dict[str, float], sizes) -> Work:
    """All devices of a host send through its link, each what crosses the axis of the replicas."""
    devices = math.prod(sizes)
    return Work(
        flops=gradient_flops(built.config.model, built.numel, devices),
        moved=cost.moved,
        kernels=cost.kernels,
        fast_bytes=sent.get(FAST_AXIS, 0.0),
        nic_bytes=sent[AXIS_NAME] * devices / sizes[0],
        beside=hidden.beside,
        asynchronous=hidden.bytes_asynchronous,
    )


def between_hosts(program: Program, mesh: Mesh) -> list[Message]:
    """The messages that cross the axis of the replicas, or an unknown one."""
    return [m for m in messages(program, mesh) if m.axes == ("?",) or AXIS_NAME in m.axes]


def _counted(crossing: list[Message]) -> dict[str, dict[str, int]]:
    """How many messages of each kind the program has, and how many are asynchronous."""
    counts: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"all": 0, "async": 0})
    for message in crossing:
        counts[message.op]["all"] += 1
        counts[message.op]["async"] += message.asynchronous
    return dict(counts)


def _cpu_seconds() -> float:
    """Seconds of this process and of ended ones, as the assembler: a busy machine adds none."""
    return sum(os.times()[:4])


def _accessed(compiled: jax.stages.Compiled) -> float | None:
    """The bytes that XLA's own analysis counts, loops once; None on GPUs, which have none."""
    return (compiled.cost_analysis() or {}).get("bytes accessed")
