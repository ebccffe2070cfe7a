"""A row: one method's step compiled for one accelerator, and the facts of its program."""

import collections
import math
import os
import time
from collections.abc import Sequence

import jax

import jaxcomp
from benchmarks import accelerators_messages
from benchmarks import accelerators_roofline as roofline
from benchmarks.accelerators_devices import DEVICES, mesh_of
from benchmarks.accelerators_messages import Message, Overlap
from benchmarks.accelerators_program import Program
from benchmarks.accelerators_roofline import RATES, Work
from benchmarks.accelerators_step import IN_SHARDS, METHODS, Built, build_step, model_for
from jaxcomp import report
from train.config.run import AXIS_NAME
from train.placement.devices import FAST_AXIS

KEY = ("device", "model", "method", "mesh")


def row(device: str, model: str, method: str, sizes: tuple[int, ...]) -> dict:
    """Compiles a step and reads its program; takes seconds to minutes, runs nothing.

    Args:
      device: A key of `accelerators_devices.DEVICES`.
      model: A key of `accelerators_step.MODELS`.
      method: A key of `accelerators_step.METHODS`.
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
        "options": jaxcomp.compiler_options(
            built.mesh, gathers_layers=METHODS[method].qsdp is not None
        ),
    }


def rows(device: str, model: str, methods: Sequence[str], sizes: tuple[int, ...]) -> list[dict]:
    """Rows of several methods, made in one process."""
    return [row(device, model, method, sizes) for method in methods]


def compile_step(built: Built) -> jax.stages.Compiled:
    """Compiles a step for its mesh."""
    return built.step.lower(built.params, built.state, built.batch).compile()


def facts(
    compiled: jax.stages.Compiled, text: str, built: Built, device: str, sizes: tuple[int, ...]
) -> dict:
    """The facts from a program's text and XLA's analyses."""
    program, mesh, copy = Program(text), built.mesh, 4 * built.numel
    cost = program.cost
    crossing = [m for m in accelerators_messages.messages(program, mesh) if _is_slow(m)]
    overlap = accelerators_messages.overlap(program, crossing)
    sent = {axis: report.sent_bytes(compiled, mesh, axis) for axis in mesh.axis_names}
    work = _work(built, cost, overlap, sent, sizes)
    return {
        "moved_copies": cost.moved / copy,
        "kernels": cost.kernels,
        "loops": cost.loops,
        "unknown_loops": cost.unknown_loops,
        "accessed_bytes": _accessed(compiled),
        "memory": memory(compiled) | {"temp_copies": _temp(compiled) / copy},
        "messages": _counted(crossing),
        "messages_inside": sum(m.inside for m in crossing),
        "products": cost.products,
        "products_beside": overlap.beside,
        "products_in_span": overlap.span,
        "products_after_first": overlap.after_first,
        "bytes_asynchronous": overlap.bytes_asynchronous,
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
    seconds = {name: roofline.predicted_seconds(kind, work, rate) for name, rate in RATES.items()}
    return {**seconds, "unlimited": roofline.local_seconds(kind, work)}


def _work(built: Built, cost, overlap: Overlap, sent: dict[str, float], sizes) -> Work:
    """All devices of a host send through its link, each what crosses the axis of the replicas."""
    devices = math.prod(sizes)
    return Work(
        flops=roofline.gradient_flops(built.config.model, built.numel, devices),
        moved=cost.moved,
        kernels=cost.kernels,
        fast_bytes=sent.get(FAST_AXIS, 0.0),
        nic_bytes=sent[AXIS_NAME] * devices / sizes[0],
        beside=overlap.beside,
        asynchronous=overlap.bytes_asynchronous,
    )


def _is_slow(message: Message) -> bool:
    return message.axes == ("?",) or AXIS_NAME in message.axes


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


def _temp(compiled: jax.stages.Compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def _accessed(compiled: jax.stages.Compiled) -> float | None:
    """The bytes that XLA's own analysis counts, loops once; None on GPUs, which have none."""
    return (compiled.cost_analysis() or {}).get("bytes accessed")
