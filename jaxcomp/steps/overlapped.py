"""A training step whose exchange travels while the gradient is computed, also on CPUs.

XLA:CPU runs a program one operation after the other, and programs in the order in which a thread
has dispatched them: the exchange and the gradient of one program take the sum of their times.
Dispatched as two programs by two threads they take the longer one's.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp.replicas.specs import specs_of, state_specs
from jaxcomp.replicas.state import fields, per_replica, stack, unstack
from jaxcomp.replicas.types import to_varying
from jaxcomp.steps.train import TrainStep, apply_update, check_batch, local_gradients, train_step


class OverlappedStep(NamedTuple):
    """A step in three programs; called as the step of a `TrainStep` is.

    Attributes:
      exchange: `(params, state) -> exchanged`: all that does not depend on the gradient.
      gradient: `(params, drifts, batch) -> (loss, grads)`, no message on a mesh of one axis.
      finish: `(params, state, grads, exchanged, loss) -> (params, state, metrics)`.
      helper: The thread that dispatches `gradient`.
    """

    exchange: Callable
    gradient: Callable
    finish: Callable
    helper: concurrent.futures.Executor

    def __call__(self, params: Any, state: Any, batch: Any) -> tuple[Any, Any, dict]:
        drifts = fields(state, "drift")
        gradient = self.helper.submit(self.gradient, params, drifts, batch)
        # Whatever sends is dispatched by the caller's thread, in one order on all processes.
        exchanged = self.exchange(params, state)
        loss, grads = gradient.result()
        return self.finish(params, state, grads, exchanged, loss)

    def compile(self, params: Any, state: Any, batch: Any) -> "OverlappedStep":
        """Compiles the three programs for these shapes, dtypes and shardings."""
        drifts = fields(state, "drift")
        exchange, exchanged = _compiled(self.exchange, params, state)
        gradient, (loss, grads) = _compiled(self.gradient, params, drifts, batch)
        finish, _ = _compiled(self.finish, params, state, grads, exchanged, loss)
        return OverlappedStep(exchange, gradient, finish, self.helper)

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """The compiled programs, for `jaxcomp.report`."""
        return self.exchange, self.gradient, self.finish


def overlapped_train_step(
    loss_fn: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str,
    *,
    accumulate: int = 1,
) -> TrainStep:
    """Makes what `jaxcomp.train_step` makes, of a method that exchanges nothing of this gradient.

    Such a method (`cocktail_sgd`) takes an extra argument `ahead` in its `update`, a function
    `(make) -> made`, by default one that calls `make`, and hands it what computes its exchange
    from its state. Here `make` is called in a program of its own, and the update gets what that
    has made. Between the programs lies a copy of what was exchanged: for `cocktail_sgd` the change
    of the consensus and what was sent, each as large as a float32 gradient.

    On GPUs use `train_step`: collectives have streams of their own there. What a context
    manager of JAX says around a call, as `jax.default_matmul_precision`, does not reach the
    gradient's thread; around `step.compile` it does.

    Args:
      loss_fn: As for `train_step`.
      tx: As for `train_step`; wrappers that call its update in a `lax.cond`, as `optax.MultiSteps`
        does, are not possible.
      mesh: Of one axis, `axis_name`: on others the gradient would send as well, in an order that
        differs between processes.
      axis_name: The axis of the replicas.
      accumulate: As for `train_step`.

    Returns:
      The functions of `train_step`; `step.compile(params, state, batch)` compiles ahead of time.

    Raises:
      ValueError: At construction, if the mesh has more axes; at the first call, if nothing in
        `tx` exchanges ahead, and as `train_step`.
    """
    if mesh.axis_names != (axis_name,):
        raise ValueError(
            f"overlapped_train_step got a mesh of axes {mesh.axis_names}, needs one of "
            f"{axis_name!r} alone; write jaxcomp.train_step for the others."
        )
    plain = train_step(loss_fn, tx, mesh, axis_name, accumulate=accumulate)
    tx = per_replica(tx, axis_name)
    rows = P(axis_name)

    def begin(params, state):
        made = []

        def record(make):
            made.append(make())
            return made[-1]

        grads = to_varying(jax.tree.map(jnp.zeros_like, params), axis_name)
        # What is not recorded is computed by nobody: it does not reach the program's results.
        value = jnp.zeros([])
        tx.update(grads, state, params, axis_name=axis_name, value=value, ahead=record)
        if not made:
            raise ValueError(
                "nothing in the transformation exchanges ahead of the gradient: write "
                "jaxcomp.cocktail_sgd(..., delayed=True) in it, or jaxcomp.train_step around it."
            )
        return stack(made, axis_name)

    def finish(params, state, grads, exchanged, loss):
        made = iter(unstack(exchanged, axis_name))
        ahead = lambda make: next(made)
        return apply_update(tx, axis_name, params, state, grads, loss, ahead=ahead)

    sharded = functools.partial(jax.shard_map, mesh=mesh)
    specs_of_state = functools.partial(state_specs, tx, mesh=mesh, axis_name=axis_name)
    specs_of_exchanged = specs_of(begin, mesh, axis_name)

    @jax.jit
    def exchange_program(params, state):
        specs = P(), specs_of_state(params)
        made = specs_of_exchanged(specs, params, state)
        return sharded(begin, in_specs=specs, out_specs=made)(params, state)

    @jax.jit
    def gradient_program(params, drifts, batch):
        check_batch(batch, axis_name, mesh.size, accumulate)
        local = functools.partial(local_gradients, loss_fn, axis_name, accumulate)
        return sharded(local, in_specs=(P(), rows, rows), out_specs=rows)(params, drifts, batch)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def finish_program(params, state, grads, exchanged, loss):
        specs = P(), specs_of_state(params)
        made = specs_of_exchanged(specs, params, state)
        params, state, skipped = sharded(
            finish, in_specs=(*specs, rows, made, rows), out_specs=(*specs, P())
        )(params, state, grads, exchanged, loss)
        # By way of this program, so that who waits for the loss waits for the exchange too.
        return params, state, {"loss": loss, "skipped": skipped}

    helper = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gradient")
    step = OverlappedStep(exchange_program, gradient_program, finish_program, helper)
    return TrainStep(plain.init, step)


def _compiled(function, *args):
    """A program, and the shapes, dtypes and shardings of what it returns."""
    program = function.lower(*args).compile()
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return program, jax.tree.map(place, jax.eval_shape(function, *args), program.output_shardings)
