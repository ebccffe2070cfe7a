"""What `--report` prints of a run: bytes, rounds and memory, from compiled programs."""

import jaxcomp
from train.config import advice
from train.config.run import AXIS_NAME
from train.task import Task, num_parameters

# Of dense bytes, in a run of 1-bit Adam that is dense for 15% of its steps, as its authors' runs
# of BERT; then a bit each and a float32 scale for 1,024.
ONE_BIT_ADAM = 0.15 + 0.85 * (1 + 32 / 1024) / 32


def text(task: Task) -> str:
    """What one step of the run sends, as text: from the compiled program, nothing is run."""
    numel, slow = num_parameters(task), task.mesh.shape[AXIS_NAME]
    fast = task.mesh.size // slow
    passes, plain = task.placement.dense
    dense = passes * 4 * numel / fast * (slow - 1) / slow
    exact = jaxcomp.report.exact_leaves(task.like["params"], task.like["state"])
    lines = [
        jaxcomp.report.table(task.programs, task.mesh),
        f"{numel:,} parameters on {task.mesh.size} replicas; one replica sends "
        f"{task.sent_bytes:,.0f} bytes a step{' in the mean' if task.rounds else ''}"
        f"{f' across the slow axis of {slow} x {fast} replicas' if fast > 1 else ''},",
        f"{dense / task.sent_bytes:.1f}x fewer than a float32 {plain}, "
        f"{dense / 2 / task.sent_bytes:.1f}x fewer than a float16 one."
        if task.sent_bytes
        else f"nothing to send with one replica{' across the slow axis' if fast > 1 else ''}.",
        *_rounds(task, dense),
        *_memory(task),
        *([] if exact is None else [f"travel exact: {', '.join(exact) or 'none'}"]),
        *advice.notes(task.config.optimizer.update),
    ]
    return "\n".join(lines)


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
