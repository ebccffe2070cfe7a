"""What `--report` prints of a run: bytes, rounds and memory, from compiled programs."""

import itertools
from typing import Any

import jax

import jaxcomp
from train.config.as_json import to_json
from train.config.run import AXIS_NAME
from train.output import metrics
from train.task import Task, num_parameters

# Share of dense bytes in a run of 1-bit Adam that is dense for 15% of its steps, as its authors'
# runs of BERT; then a bit each and a float32 scale for 1,024.
ONE_BIT_ADAM = 0.15 + 0.85 * (1 + 32 / 1024) / 32
# Codes of fewer bits than these are sparse, or of 1 or 2 bits.
_COARSE_BITS = 3


def text(task: Task) -> str:
    """What one step of the run sends, as text: from the compiled program, nothing is run."""
    numel, slow = num_parameters(task), task.mesh.shape[AXIS_NAME]
    fast, dense, plain = task.mesh.size // slow, dense_bytes(task), task.placement.dense[1]
    exact = jaxcomp.report.exact_leaves(task.like["params"], task.like["state"])
    lines = [
        jaxcomp.report.table(task.programs, task.mesh),
        f"{numel:,} parameters on {task.mesh.size} replicas; one replica sends "
        f"{task.sent_bytes:,.0f} bytes a step{' in the mean' if task.rounds else ''}"
        f"{f' across the slow axis of {slow} x {fast} replicas' if fast > 1 else ''},",
        *([f"through the link of {fast} go {fast * task.sent_bytes:,.0f},"] if fast > 1 else []),
        f"{dense / task.sent_bytes:.1f}x fewer than a float32 {plain}, "
        f"{dense / 2 / task.sent_bytes:.1f}x fewer than a float16 one."
        if task.sent_bytes
        else f"nothing to send with one replica{' across the slow axis' if fast > 1 else ''}.",
        *_rounds(task, dense),
        *_memory(task),
        *([] if exact is None else [f"in float32: {', '.join(exact) or 'none'}"]),
        *notes(task),
    ]
    return "\n".join(lines)


def notes(task: Task) -> list[str]:
    """Warns of few bits in front of an optimizer that divides by the root of a second moment.

    Sparse and 1-bit means of gradients arrive in bursts, also with error feedback, and bursts
    inflate a second moment. Read from what the step sends, and from the state: a mean behind the
    optimizer gets no note, nor does a method that takes care of its own second moment.
    """
    if not task.sent_bytes or not _has_mean_before_second_moment(task.like["state"]):
        return []
    bits = 32 * task.sent_bytes / dense_bytes(task)
    if bits >= _COARSE_BITS:
        return []
    return [
        f"note: compressed_mean of {bits:.2g} bits per parameter and direction in front of an "
        "optimizer with a second moment trains badly: what arrives in bursts inflates what it "
        "divides by. Write quantize(4) or quantize(8); or sgd(learning_rate, momentum=0.9) behind "
        "this compressor; or use a method made for so few bits."
    ]


def _has_mean_before_second_moment(state: Any) -> bool:
    # The states of a chain lie in the order in which its parts run.
    is_mean = lambda node: isinstance(node, jaxcomp.CompressedMeanState)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: is_mean(node) or hasattr(node, "nu"))
    behind = itertools.dropwhile(lambda node: not is_mean(node), nodes)
    return any(hasattr(node, "nu") for node in behind)


def dense_bytes(task: Task) -> float:
    """Bytes that one replica would send in a step without codes."""
    passes, slow = task.placement.dense[0], task.mesh.shape[AXIS_NAME]
    fast = task.mesh.size // slow
    return passes * 4 * num_parameters(task) / fast * (slow - 1) / slow


def _memory(task: Task) -> list[str]:
    """What a device holds, as XLA plans it."""
    plans = [program.memory_analysis() for program in task.programs]
    if None in plans:
        return []
    held = max(plan.argument_size_in_bytes for plan in plans)
    more = max(plan.temp_size_in_bytes for plan in plans)
    return [
        f"a device holds {held / 2**20:,.0f} MiB of parameters, state and batch, and "
        f"{more / 2**20:,.0f} MiB more during a step, by XLA's plan for this machine."
    ]


def _rounds(task: Task, dense: float) -> list[str]:
    """What a run whose steps differ sends, part by part; `dense` bytes a step without codes."""
    steps = task.config.steps
    parts = [
        f"{part} {count:,} times ({task.sent.get(part, 0.0):,.0f} bytes)"
        for part, count in task.rounds.items()
        if part != "all"
    ]
    if not parts or not dense:  # one replica counts rounds, and sends nothing in them
        return []
    return [
        f"of {steps:,} steps {task.rounds['all']:,} send anything: {', '.join(parts)};",
        f"{steps * task.sent_bytes:,.0f} bytes over the run, {32 * task.sent_bytes / dense:.2f} "
        f"bits per parameter and direction (dense: {steps * dense:,.0f}, 32; 1-bit Adam after 15% "
        f"of dense steps: about {steps * dense * ONE_BIT_ADAM:,.0f}, {32 * ONE_BIT_ADAM:.2f}).",
    ]


def record(task: Task) -> str:
    """What a run is, as JSON: its config, its data, and what it sends."""
    facts = {
        "parameters": num_parameters(task),
        "replicas": task.mesh.size,
        "sent_bytes_per_step": task.sent_bytes,
        "sent_bytes_by_part": task.sent,
        "dense_bytes_per_step": dense_bytes(task),
        "rounds": task.rounds,
        "exact": jaxcomp.report.exact_leaves(task.like["params"], task.like["state"]),
    }
    return metrics.run_record(to_json(task.config), task.examples.record, facts)
