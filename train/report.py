"""The text of `--report`: bytes, rounds and memory of a run, from compiled programs."""

import importlib.metadata
import itertools
import json
import platform
import re
from collections.abc import Sequence
from typing import Any

import jax
import optax

import jaxcomp
from train.config.facts import to_json
from train.config.run import AXIS_NAME
from train.output import metrics
from train.task import Task, num_parameters, num_trained

# Share of dense bytes in a run of 1-bit Adam that is dense for 15% of its steps, as in its authors'
# BERT runs; then 1 bit per parameter and a float32 scale for each 1,024.
ONE_BIT_ADAM = 0.15 + 0.85 * (1 + 32 / 1024) / 32
# Codes with fewer bits are sparse, or have 1 or 2 bits.
_COARSE_BITS = 3


def text(task: Task) -> str:
    """The bytes that one step of the run sends, as text; read from the program, nothing runs."""
    numel, trained, slow = num_parameters(task), num_trained(task), task.mesh.shape[AXIS_NAME]
    fast, dense, plain = task.mesh.size // slow, dense_bytes(task), task.placement.dense[1]
    lines = [
        jaxcomp.report.table(task.programs, task.mesh),
        f"{numel:,} parameters{f', {trained:,} of them trained,' if trained < numel else ''} on "
        f"{task.mesh.size} replicas; one replica sends "
        f"{task.sent_bytes:,.0f} bytes a step{' on average' if task.rounds else ''}"
        f"{f' across the slow axis of {slow} x {fast} replicas' if fast > 1 else ''},",
        *([f"through the link of {fast} go {fast * task.sent_bytes:,.0f},"] if fast > 1 else []),
        f"{dense / task.sent_bytes:.1f}x fewer than a float32 {plain}, "
        f"{dense / 2 / task.sent_bytes:.1f}x fewer than a float16 one."
        if task.sent_bytes
        else f"nothing to send with one replica{' across the slow axis' if fast > 1 else ''}.",
        *_rounds(task, dense),
        *_memory(task.programs),
        *_exact(task),
        *notes(task),
    ]
    return "\n".join(lines)


def notes(task: Task) -> list[str]:
    """Warns about updates that train badly, or at other parameters than they are evaluated at."""
    return [*_coarse_mean(task), *_schedule_free(task.like["state"])]


def _schedule_free(state: Any) -> list[str]:
    is_one = lambda node: isinstance(node, optax.contrib.ScheduleFreeState)
    if not any(map(is_one, jax.tree.leaves(state, is_leaf=is_one))):
        return []
    return [
        "note: validation, exports and start_from take the parameters of the steps, and not "
        "schedule_free_eval_params, the average that schedule_free makes for them. Write "
        "adamw(learning_rate) instead."
    ]


def _coarse_mean(task: Task) -> list[str]:
    """Warns about few bits before an optimizer that divides by the root of a second moment.

    Sparse and 1-bit means of gradients arrive in bursts, even with error feedback, and bursts
    inflate a second moment. It looks at what the step sends, and at the state: there is no note for
    a mean after the optimizer, or for a method with its own second moment.
    """
    if not task.sent_bytes or not _has_mean_before_second_moment(task.like["state"]):
        return []
    bits = 32 * task.sent_bytes / dense_bytes(task)
    if bits >= _COARSE_BITS:
        return []
    return [
        f"note: compressed_mean at {bits:.2g} bits per parameter and direction before an "
        "optimizer with a second moment trains badly: updates in bursts inflate that moment. "
        "Write quantize(4) or quantize(8); or sgd(learning_rate, momentum=0.9) after "
        "this compressor; or use a method made for so few bits."
    ]


def _has_mean_before_second_moment(state: Any) -> bool:
    # The states of a chain are in the order in which its parts run.
    is_mean = lambda node: isinstance(node, jaxcomp.CompressedMeanState) and _is_lossy(node)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: is_mean(node) or hasattr(node, "nu"))
    behind = itertools.dropwhile(lambda node: not is_mean(node), nodes)
    return any(hasattr(node, "nu") for node in behind)


def _is_lossy(mean: jaxcomp.CompressedMeanState) -> bool:
    """Whether a mean has a code for any leaf; that of frozen parameters, for one, has none."""
    is_mark = lambda x: x is None or (type(x) is tuple and not x)  # float32, no error feedback
    marks = jax.tree.leaves(mean.residual, is_leaf=is_mark)
    return any(mark is not None for mark in marks)


def dense_bytes(task: Task) -> float:
    """Bytes that one replica would send in a step without codes."""
    passes, slow = task.placement.dense[0], task.mesh.shape[AXIS_NAME]
    fast = task.mesh.size // slow
    return passes * 4 * num_trained(task) / fast * (slow - 1) / slow


def _exact_leaves(task: Task) -> list[str] | None:
    exact = jaxcomp.report.exact_leaves(task.like["params"], task.like["state"])
    return None if exact is None else [*filter(task.placement.trains, exact)]


def _exact(task: Task) -> list[str]:
    """The arrays that are sent in float32; where only a number differs, they have one name."""
    exact = _exact_leaves(task)
    if exact is None:
        return []
    names = dict.fromkeys(re.sub(r"\d+", "*", name) for name in exact)
    return [f"in float32, {len(exact)} arrays: {', '.join(names)}" if exact else "in float32: none"]


def _memory(programs: Sequence[jax.stages.Compiled]) -> list[str]:
    """The memory of a device, according to XLA."""
    plans = [program.memory_analysis() for program in programs]
    if None in plans:
        return []
    held = max(plan.argument_size_in_bytes for plan in plans)
    more = max(plan.temp_size_in_bytes for plan in plans)
    return [
        f"a device holds {held / 2**20:,.0f} MiB of parameters, state and batch, and "
        f"{more / 2**20:,.0f} MiB more during a step, by XLA's plan for this machine."
    ]


def _rounds(task: Task, dense: float) -> list[str]:
    """The bytes of a run whose steps differ, by part; `dense` are bytes per step without codes."""
    steps = task.config.steps
    parts = [
        f"{part} {count:,} times ({task.sent.get(part, 0.0):,.0f} bytes)"
        for part, count in task.rounds.items()
        if part != "all"
    ]
    if not parts or not dense:  # one replica counts rounds but sends nothing
        return []
    return [
        f"of {steps:,} steps {task.rounds['all']:,} send anything: {', '.join(parts)};",
        f"{steps * task.sent_bytes:,.0f} bytes over the run, {32 * task.sent_bytes / dense:.2f} "
        f"bits per parameter and direction (dense: {steps * dense:,.0f}, 32; 1-bit Adam after 15% "
        f"of dense steps: about {steps * dense * ONE_BIT_ADAM:,.0f}, {32 * ONE_BIT_ADAM:.2f}).",
    ]


def record(task: Task) -> str:
    """The record of a run as JSON: config, versions, hardware, data, and what it sends."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = {name: importlib.metadata.version(name) for name in packages}
    plan = {
        "parameters": num_parameters(task),
        "trained": num_trained(task),
        "replicas": task.mesh.size,
        "sent_bytes_per_step": task.sent_bytes,
        "sent_bytes_by_part": task.sent,
        "dense_bytes_per_step": dense_bytes(task),
        "rounds": task.rounds,
        "exact": _exact_leaves(task),
    }
    record = {
        "config": json.loads(to_json(task.config)),
        "versions": {"python": platform.python_version(), **versions},
        "hardware": metrics.hardware_name(),
        "data": task.examples.record,
        "plan": plan,
    }
    return json.dumps(record, indent=2)
