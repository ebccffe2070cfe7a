"""A training step that exchanges while the gradient is computed, even on CPUs.

XLA:CPU runs the operations of a program one at a time, and the programs of a thread in the order of
their dispatch. So the exchange and the gradient of one program take the sum of their times. As two
programs dispatched by two threads, they take the longer of the two.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxcomp._checks import require_kept
from jaxcomp.replicas import protocol
from jaxcomp.replicas.specs import specs_of
from jaxcomp.replicas.state import per_replica, stack, unstack
from jaxcomp.replicas.types import names_of
from jaxcomp.steps import untyped
from jaxcomp.steps.compiling import Donating, Initial, Kept, shapes_at
from jaxcomp.steps.gradient import Gradient, all_gradients, check_accumulate, metrics_of
from jaxcomp.steps.interleaved import exchanged
from jaxcomp.steps.train import TrainStep
from jaxcomp.steps.update import (
    Update,
    init_state,
    local_update,
    placed_state,
    shardings_of,
    update_specs,
    whole_drifts,
    with_shares,
)


class OverlappedStep(NamedTuple):
    """A step in three or four programs; called like the step of a `TrainStep`.

    Attributes:
      gather: `(params, drifts) -> drifts`, for replicas of several devices; None otherwise.
      exchange: `(params, state, extra_args) -> exchanged`: everything that does not depend on the
        gradient.
      gradient: `(params, drifts, batch, rng, model_state) -> (loss, grads, extra)`; sends nothing.
      finish: `(params, state, exchanged, model_state, extra_args, (loss, grads, extra)) ->
        (params, state, metrics)`.
      helper: The thread that dispatches `gradient`.
    """

    gather: Any
    exchange: Any
    gradient: Any
    finish: Any
    helper: concurrent.futures.Executor

    def __call__(
        self,
        params: Any,
        state: Any,
        batch: Any,
        rng: Any = None,
        model_state: Any = None,
        extra_args: Any = None,
    ) -> tuple[Any, Any, dict]:
        require_kept(params, state, batch, rng, model_state, extra_args)
        params, state = self.finish.placed(params, state)
        # The caller's thread dispatches all programs that send, in one order on all processes.
        drifts = protocol.drifts(state)
        drifts = self.gather(params, drifts) if self.gather else drifts
        gradient = self.helper.submit(self.gradient, params, drifts, batch, rng, model_state)
        exchanged = self.exchange(params, state, extra_args)
        made = gradient.result()
        spared = batch, rng
        return self.finish(params, state, exchanged, model_state, extra_args, made, spared=spared)

    def compile(
        self,
        params: Any,
        state: Any,
        batch: Any,
        rng: Any = None,
        model_state: Any = None,
        extra_args: Any = None,
    ) -> "OverlappedStep":
        """Compiles the programs for these shapes, dtypes and shardings."""
        params, state = self.finish.placed(params, state, shapes_at)
        gather, drifts = None, protocol.drifts(state)
        if self.gather:
            gather, drifts = _compiled(self.gather, params, drifts)
        exchange, exchanged = _compiled(self.exchange, params, state, extra_args)
        gradient, made = _compiled(self.gradient, params, drifts, batch, rng, model_state)
        end = params, state, exchanged, model_state, extra_args, made
        finish, _ = _compiled(self.finish, *end)
        return OverlappedStep(gather, exchange, gradient, finish, self.helper)

    @property
    def programs(self) -> tuple[jax.stages.Compiled, ...]:
        """The compiled programs, for `jaxcomp.report`."""
        gather = (self.gather,) if self.gather else ()
        return *gather, self.exchange, self.gradient, self.finish


def overlapped_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    axis_name: str,
    *,
    fast_axis: str | None = None,
    accumulate: int = 1,
    has_aux: bool = False,
    batch_specs: Any = None,
) -> TrainStep:
    """Makes a step that exchanges while it computes the gradient, for methods that allow it.

    Such a method (`cocktail_sgd`) can exchange before it knows the gradient. Its `update` has an
    extra argument `ahead: (make) -> made`, and gives it a function `make` that computes the
    exchange from the state. By default `ahead` calls `make` at once. Here a separate program calls
    it, and `update` gets the result. `make` takes the exchange's pace, or nothing.

    The exchange's results are copied between the programs: for `cocktail_sgd` the change of the
    consensus and what was sent, each as large as a float32 gradient.

    On GPUs use `train_step`: collectives have their own streams there. A context manager of JAX,
    such as `jax.default_matmul_precision`, has no effect on the gradient's thread around a call of
    the step; put it around `step.compile`.

    Args:
      loss_fn: As for `train_step`, like `fast_axis` and `accumulate`.
      tx: As for `train_step`, but without wrappers that call its update in a `lax.cond`, such as
        `optax.MultiSteps`.
      mesh: Has only the axis `axis_name` and, if used, `fast_axis`. Over other axes the gradient
        would send too, in an order that differs between processes.
      axis_name: The axis of the replicas.
      fast_axis: The axis of the devices of one replica.
      accumulate: Microbatches.
      has_aux: As for `train_step`, like `batch_specs`.
      batch_specs: Over these axes.

    Returns:
      The functions of `train_step`. `step.compile`, with the arguments of a step, compiles ahead of
      time.

    Raises:
      ValueError: At construction, if the mesh has more axes; at the first call, if nothing in `tx`
        exchanges ahead; also the errors of `train_step`.
    """
    check_accumulate(accumulate)
    update = Update(per_replica(tx, axis_name), mesh, axis_name, fast_axis=fast_axis)
    if set(mesh.axis_names) != set(names_of(update.axes)):
        raise ValueError(
            f"overlapped_train_step got a mesh of axes {mesh.axis_names}, needs one of "
            f"{update.axes!r} alone; write jaxcomp.train_step for the others."
        )
    gradient = Gradient(loss_fn, mesh, update.axes, accumulate, has_aux, batch_specs)
    step = OverlappedStep(
        jax.jit(functools.partial(whole_drifts, update)) if fast_axis else None,
        jax.jit(functools.partial(_exchange, update)),
        Kept(jax.jit(untyped.as_needed(all_gradients, gradient)), mesh),
        Donating(
            jax.jit(functools.partial(_finish, gradient, update), donate_argnums=(0, 1)),
            mesh,
            functools.partial(shardings_of, update),
        ),
        concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="gradient"),
    )
    return TrainStep(Initial(jax.jit(functools.partial(init_state, update)), mesh), step)


def _exchange(update, params, state, extra_args):
    if protocol.loss_scale(state) is not None:
        raise ValueError(
            "overlapped_train_step computes the gradient without looking at the state, and "
            "jaxcomp.loss_scale keeps the scale there; write jaxcomp.train_step around it."
        )
    state = placed_state(update, params, state)
    specs, made = _specs(update, params, state, extra_args)
    own = functools.partial(_exchange_local, with_shares(update, params))
    sharded = jax.shard_map(own, mesh=update.mesh, in_specs=(*specs, P()), out_specs=made)
    return sharded(params, state, extra_args)


def _exchange_local(update, params, state, extra_args):
    made = exchanged(update, params, state, extra_args=extra_args)
    if not made:
        raise ValueError(
            "nothing in the transformation exchanges ahead of the gradient: write "
            "jaxcomp.cocktail_sgd(..., delayed=True) in it, or jaxcomp.train_step around it."
        )
    return stack(made, update.axes)


def _finish(gradient, update, params, state, exchanged, model_state, extra_args, made):
    state = placed_state(update, params, state)
    specs, exchanged_specs = _specs(update, params, state, extra_args)
    loss, grads, extra = made
    rows = P(update.axes)
    params, state, skipped = jax.shard_map(
        functools.partial(_finish_local, with_shares(update, params)),
        mesh=update.mesh,
        in_specs=(*specs, rows, exchanged_specs, rows, P()),
        out_specs=(*specs, P()),
    )(params, state, grads, exchanged, loss, extra_args)
    # Through this program, so that waiting for the loss also waits for the exchange.
    return params, state, metrics_of(gradient, loss, skipped, extra, model_state)


def _finish_local(update, params, state, grads, exchanged, loss, extra_args):
    made = iter(unstack(exchanged, update.axes))
    ahead = lambda make: next(made)
    return local_update(update, params, state, grads, loss, extra_args, ahead=ahead)


def _specs(update, params, state, extra_args):
    """The PartitionSpecs of the parameters and the state, and of what is exchanged ahead."""
    specs = update_specs(update, params)
    own = functools.partial(_exchange_local, with_shares(update, params))
    args = params, state, extra_args
    return specs, specs_of(own, update.mesh, update.axes, (*specs, P()), *args)


def _compiled(function, *args):
    """A program, and the shapes, dtypes and shardings of its results."""
    program = function.lower(*args).compile()
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return program, jax.tree.map(place, jax.eval_shape(function, *args), program.output_shardings)
