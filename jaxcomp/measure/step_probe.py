"""What a step takes apart from its messages, and what it sends, for `jaxcomp.plan`.

All processes of a run call these functions together, and get the same numbers.
"""

import functools
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
from jaxcomp.replicas.specs import state_specs
from jaxcomp.replicas.state import per_replica
from jaxcomp.steps.train import apply_update, check_batch, local_gradients


class UpdateProgram(NamedTuple):
    """A step without its gradient: the exchange, the optimizer, and the new parameters."""

    init: Callable[[Any], Any]  # jitted: params -> state
    step: jax.stages.Compiled  # params, state, rows of gradients -> params, state; donates two


def update_program(
    tx: optax.GradientTransformation, params: Any, mesh: Mesh, axis_name: str
) -> UpdateProgram:
    """Compiles what `jaxcomp.train_step` does after the gradient.

    Args:
      tx: As for `train_step`.
      params: Shapes and dtypes of the parameters, which all replicas hold.
      mesh: Of the run, with one axis; or that of `alone`.
      axis_name: The axis of the replicas.

    Returns:
      The programs.
    """
    tx = per_replica(tx, axis_name)
    specs = state_specs(tx, params, mesh, axis_name)
    rows = P(axis_name)
    sharded = functools.partial(jax.shard_map, mesh=mesh)
    init = jax.jit(sharded(tx.init, in_specs=P(), out_specs=specs))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        update = functools.partial(apply_update, tx, axis_name)
        outs = sharded(update, in_specs=(P(), specs, rows, rows), out_specs=(P(), specs, P()))
        loss = jnp.zeros(mesh.shape[axis_name])
        return outs(params, state, grads, loss)[:2]

    def placed(x, spec, *lead):
        place = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype, sharding=place)

    grads = jax.tree.map(lambda x: placed(x, rows, mesh.shape[axis_name]), params)
    params = jax.tree.map(lambda x: placed(x, P()), params)
    state = jax.tree.map(placed, jax.eval_shape(init, params), specs)
    return UpdateProgram(init, step.lower(params, state, grads).compile())


def messages(
    program: report.Program | Sequence[report.Program], mesh: Mesh, shares: Mapping[str, float]
) -> tuple[Message, ...]:
    """Lists what a compiled step sends.

    Args:
      program: Of the step, or those of one that consists of several.
      mesh: Of the run, of one axis.
      shares: The share of steps that send a part, for methods that skip some; {} for the others.

    Returns:
      One message a collective.
    """
    often = lambda row: shares.get(row.part, 0.0) if row.part and shares else 1.0
    return tuple(
        Message(row.op, row.sent_bytes, row.count * often(row))
        for row in report.collectives(program, mesh)
        if row.sent_bytes
    )


def held_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a device holds while a program runs, by XLA's plan; 0 where it has none."""
    planned = program.memory_analysis()
    return planned.argument_size_in_bytes + planned.temp_size_in_bytes if planned else 0


def alone(mesh: Mesh, axis_name: str) -> Mesh:
    """The mesh's devices as copies of one replica: all do the same at once, and nothing is sent."""
    types = (AxisType.Auto,) * 2
    return Mesh(mesh.devices.reshape(1, -1), (axis_name, "copies"), axis_types=types)


def update_timer(
    program: UpdateProgram, params: Any, mesh: Mesh, axis_name: str
) -> Callable[[int, int | None], float]:
    """Makes what times an update on every device at once, without a network.

    Args:
      program: Of `update_program`, over `mesh`.
      params: Shapes and dtypes of the parameters.
      mesh: That of `alone`.
      axis_name: The axis of the replicas.

    Returns:
      `(repeats, count) -> seconds`. `count` is the number of steps done before each call, for
      methods that skip rounds by it; None leaves it to the state.
    """
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P(axis_name))
    start = jax.jit(functools.partial(_waves, params), out_shardings=everywhere)
    grads = jax.jit(functools.partial(_waves, params, 1), out_shardings=rows)()
    state = program.init(start())
    flags = [_is_count(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    # All but the counts stays where it is: a copy of it would be timed too.
    renewed = jax.jit(lambda leaves, count: [jnp.full_like(x, count) for x in leaves])
    held = [start(), state]

    def call(count):
        if count is not None:
            leaves, tree = jax.tree.flatten(held[1])
            new = iter(renewed([x for x, flag in zip(leaves, flags, strict=True) if flag], count))
            held[1] = tree.unflatten(
                [next(new) if flag else x for x, flag in zip(leaves, flags, strict=True)]
            )
        held[:] = program.step(*held, grads)
        return held

    return lambda repeats, count: seconds_of(functools.partial(call, count), repeats)


def _waves(like: Any, *lead: int) -> Any:
    """Numbers without a pattern that a code could profit from; random ones take long to compile."""
    wave = lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32) ** 1.5)
    return jax.tree.map(lambda x: wave(x).reshape(*lead, *x.shape).astype(x.dtype), like)


def _is_count(path) -> bool:
    return getattr(path[-1], "name", None) == "count"


def passes(messages: Sequence[Message], num_replicas: int) -> float:
    """What a codec's work is among R replicas, as a multiple of that in one `alone`.

    A two-shot mean encodes 1 + 1/R of a bucket and decodes 3 + 1/R, a gathered one encodes one
    and decodes R + 1; encoding and decoding are taken to cost the same.

    Args:
      messages: What the method sends.
      num_replicas: R.

    Returns:
      The ratio.
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
    axis_name: str,
    accumulate: int = 1,
) -> Callable[[int], float]:
    """Makes what times the gradient of every replica at once, without a network.

    Args:
      loss_fn: As for `train_step`.
      params: Shapes and dtypes of the parameters, which all replicas hold.
      batch: Shapes and dtypes of the batch of all replicas; what is in it are zeros.
      mesh: Of the run, with one axis.
      axis_name: The axis of the replicas.
      accumulate: As for `train_step`.

    Returns:
      `(repeats) -> seconds`.
    """
    check_batch(batch, axis_name, mesh.shape[axis_name], accumulate)
    rows = P(axis_name)

    @jax.jit
    def gradient(params, batch):
        local = functools.partial(local_gradients, loss_fn, axis_name, accumulate)
        local = jax.shard_map(local, mesh=mesh, in_specs=(P(), rows, rows), out_specs=rows)
        return local(params, [], batch)

    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
    args = (
        jax.jit(lambda: _waves(params), out_shardings=NamedSharding(mesh, P()))(),
        jax.jit(zeros, out_shardings=NamedSharding(mesh, rows))(),
    )
    return functools.partial(seconds_of, lambda: gradient(*args))
