"""Measures a step without its messages, and lists these, for `jaxcomp.plan`.

All processes of a run call these functions together, and get the same numbers.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomp.measure import report
from jaxcomp.measure.link_probe import seconds_of
from jaxcomp.measure.planner import Message
from jaxcomp.replicas.state import per_replica
from jaxcomp.replicas.types import names_of
from jaxcomp.steps import untyped
from jaxcomp.steps.gradient import Gradient, all_gradients, checked_specs
from jaxcomp.steps.update import Update, all_updates, init_state, update_specs


class UpdateProgram(NamedTuple):
    """A step without its gradient: the exchange, the optimizer, and the new parameters."""

    init: Callable[[Any], Any]  # jitted: params -> state
    step: jax.stages.Compiled  # params, state, rows of gradients -> params, state; donates two


def update_program(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    axis_name: str,
    fast_axis: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> UpdateProgram:
    """Compiles the part of `jaxcomp.train_step` after the gradient.

    Arguments are those of `train_step`, except `params`, shapes and dtypes of the parameters,
    `mesh`, which has only the named axes, or is from `alone`, and `compiler_options`, XLA's.
    """
    update = Update(per_replica(tx, axis_name), mesh, axis_name, fast_axis=fast_axis)
    num_rows = math.prod(mesh.shape[name] for name in names_of(update.axes))
    init = jax.jit(functools.partial(init_state, update))

    def shape_at(x, spec, *lead):
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=place)

    def step(params, state, grads):
        return all_updates(update, params, state, grads, jnp.zeros(num_rows))[:2]

    state = jax.tree.map(shape_at, jax.eval_shape(init, params), update_specs(update, params)[1])
    grads = jax.tree.map(lambda x: shape_at(x, P(update.axes), num_rows), params)
    params = jax.tree.map(lambda x: shape_at(x, P()), params)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads)
    own = dict(compiler_options) if compiler_options else None
    return UpdateProgram(init, lowered.compile(compiler_options=own))


def messages(
    program: report.Program | Sequence[report.Program],
    mesh: Mesh,
    shares: Mapping[str, float],
    axis_name: str | None = None,
) -> tuple[Message, ...]:
    """Lists the messages of a compiled step, of one or several programs: one per collective.

    `shares` has the share of steps that send each part, for methods that skip some; {} for others.
    With `axis_name`, lists only what crosses that axis, and merges the messages of all devices of a
    replica.
    """
    devices = mesh.size // mesh.shape[axis_name] if axis_name else 1
    often = lambda row: shares.get(row.part, 0.0) if row.part and shares else 1.0
    return tuple(
        Message(row.op, devices * row.sent_bytes, row.count * often(row))
        for row in report.crossing(program, mesh, axis_name)
    )


def held_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a device holds while a program runs, according to XLA; 0 if it does not say."""
    planned = program.memory_analysis()
    return planned.argument_size_in_bytes + planned.temp_size_in_bytes if planned else 0


def alone(mesh: Mesh, axis_name: str, fast_axis: str | None = None) -> Mesh:
    """The mesh's devices as copies of one replica, which all do the same at once.

    Only the devices of one replica, the last axis if it has several, exchange anything.
    """
    fast = (fast_axis,) if fast_axis else ()
    devices = mesh.devices.reshape(1, -1, *(mesh.shape[name] for name in fast))
    names = axis_name, "copies", *fast
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def update_timer(
    program: UpdateProgram,
    params: Any,
    mesh: Mesh,
    axis_name: str,
    fast_axis: str | None = None,
) -> Callable[[int, int | None], float]:
    """Makes a timer of an update on every device at once, without a network.

    Args:
      program: Program of `update_program`, for the following arguments.
      params: Shapes and dtypes of the parameters.
      mesh: The mesh from `alone`.
      axis_name: The axis of the replicas.
      fast_axis: The axis of each replica's devices, if there are several.

    Returns:
      `(repeats, count) -> seconds`. `count` is the number of steps before each call, for methods
      that skip rounds; None leaves it to the state.
    """
    axes = (axis_name, fast_axis) if fast_axis else (axis_name,)
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(axes))
    start = jax.jit(functools.partial(_waves, params), out_shardings=everywhere)
    num_rows = math.prod(mesh.shape[name] for name in axes)
    grads = jax.jit(functools.partial(_waves, params, num_rows), out_shardings=rows)()
    state = program.init(start())
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    counts = [i for i, path in enumerate(paths) if getattr(path[-1], "name", None) == "count"]
    # Only the counts are new: a copy of the rest would be timed too.
    renewed = jax.jit(lambda leaves, count: [jnp.full_like(x, count) for x in leaves])
    held = [start(), state]

    def call(count):
        if count is not None:
            leaves, tree = jax.tree.flatten(held[1])
            for i, new in zip(counts, renewed([leaves[i] for i in counts], count), strict=True):
                leaves[i] = new
            held[1] = tree.unflatten(leaves)
        held[:] = program.step(*held, grads)
        return held

    return lambda repeats, count: seconds_of(functools.partial(call, count), repeats)


def _waves(like: Any, *lead: int) -> Any:
    """Numbers without a pattern that helps a code; random ones take long to compile."""
    wave = lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32) ** 1.5).reshape(x.shape)
    row = lambda x: jnp.broadcast_to(wave(x).astype(x.dtype), (*lead, *x.shape))
    return jax.tree.map(row, like)


def passes(messages: Sequence[Message], num_replicas: int) -> float:
    """A codec's work among R replicas, as a multiple of its work `alone`.

    A two-shot mean encodes 1 + 1/R buckets and decodes 3 + 1/R; a gathered mean encodes 1 and
    decodes R + 1. Encoding and decoding are assumed to cost the same.
    """
    ops = {message.op for message in messages}
    if "all-to-all" in ops:
        return (4 + 2 / num_replicas) / 6
    return (num_replicas + 2) / 3 if "all-gather" in ops else 1.0


def gradient_timer(
    loss_fn: Callable[[Any, Any], jax.Array],
    params: Any,
    batch: Any,
    mesh: Mesh,
    axis_name: str | tuple[str, ...],
    accumulate: int = 1,
) -> Callable[[int], float]:
    """Makes a timer `(repeats) -> seconds` of the gradient on every device at once.

    `params` and `batch` are shapes and dtypes of the parameters and of the global batch; the mesh
    has only the named axes. The rest is as for `train_step`.
    """
    gradient = Gradient(loss_fn, mesh, axis_name, accumulate)
    checked_specs(gradient, batch)
    program = jax.jit(untyped.as_needed(all_gradients, gradient))
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(axis_name))
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
    params = jax.jit(functools.partial(_waves, params), out_shardings=everywhere)()
    batch = jax.jit(zeros, out_shardings=rows)()
    return functools.partial(seconds_of, lambda: program(params, [], batch))
