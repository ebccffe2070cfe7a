"""Float32 masters of narrow parameters, kept as what their rounding takes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.replicas.narrow import is_narrow, widened
from jaxcomp.replicas.protocol import MethodState, keeps_rounding
from jaxcomp.replicas.wrapping import with_extra_args


@MethodState.register
class MasterWeightsState(NamedTuple):
    """State of `master_weights`."""

    # f32 leaves of the parameters' shapes: the masters minus the parameters; None for leaves that
    # are float32 or wider. Equal on all replicas.
    remainder: Any
    inner: Any  # of the transformation, which sees the masters

    @property
    def keeps_rounding(self) -> bool:
        """No update is lost, however small."""
        return True


def master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Trains bfloat16 or float16 parameters as if they were float32, and rounds them after.

    Of a narrow parameter every update under half of its last bit is lost: in bfloat16 all below
    1/512 of it. Here `tx` sees gradients, parameters and moments in float32. The state keeps the
    masters as a remainder: the parameters plus the remainder are the masters, and the parameters
    are the masters rounded to nearest. So parameters that were loaded or changed outside stay what
    they are, and `jaxcomp.compact(..., 16, fields=("remainder",))` keeps masters of 16 bits behind
    the first one in 4 bytes a parameter, of both together.

    Goes around the whole chain, inside of `jaxcomp.per_replica`; in `optax.partition`, around each
    group. `cocktail_sgd`, `local_steps`, `slamb` and `sharded_optimizer` keep what is rounded off
    by themselves, the last one in pieces of its owners, and need no masters.

    Where replicas drift, gradients are taken at the narrow parameters plus the drift.

    Args:
      tx: Any transformation, of this library, of optax, or a chain.

    Returns:
      A `GradientTransformationExtraArgs` whose updates, in float32, are what the parameters move
      by: mostly zeros in bfloat16. `optax.apply_updates` must get them as they are. It keeps one
      float32 for each narrow parameter, and the moments of `tx` are float32, too.

    Raises:
      ValueError: In `init` if a method in `tx` keeps what is rounded off by itself; in `update`
        without `params`.

    References:
      Micikevicius et al., `Mixed Precision Training <https://arxiv.org/abs/1710.03740>`_, ICLR
      2018, section 3.1. Deviation: the remainder is kept beside the parameters, not the masters.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> mean = jaxcomp.compressed_mean(jaxcomp.quantize(8), "replica")
      >>> tx = jaxcomp.master_weights(optax.chain(mean, optax.adamw(2e-4)))
    """
    tx = with_extra_args(tx, "master_weights")

    def init(params):
        inner = tx.init(jax.tree.map(widened, params))
        if keeps_rounding(inner):
            raise ValueError(
                "master_weights got a method that keeps what narrow parameters round off by "
                "itself, as cocktail_sgd, local_steps, slamb and sharded_optimizer do; leave "
                "master_weights out, or in optax.partition put it around the other groups alone."
            )
        nothing = lambda p: jnp.zeros_like(widened(p)) if is_narrow(p) else None
        return MasterWeightsState(jax.tree.map(nothing, params), inner)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(
                "master_weights needs the parameters; write tx.update(grads, state, params)."
            )
        masters = jax.tree.map(_master, params, state.remainder)
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), updates, masters)
        changes, inner = tx.update(grads, state.inner, masters, **extra_args)
        rounded = jax.tree.map(_rounded, params, masters, changes)
        remainder = jax.tree.map(_remainder, params, masters, changes, rounded)
        return jax.tree.map(_moves, params, changes, rounded), MasterWeightsState(remainder, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _master(param, remainder):
    return param if remainder is None else widened(param) + remainder


def _rounded(param, master, change):
    """The new parameter, in the dtype of its master."""
    new = master + change
    # The barrier keeps XLA from leaving out the cast there and back (excess precision).
    return lax.optimization_barrier(new.astype(param.dtype)).astype(new.dtype)


def _remainder(param, master, change, rounded):
    return master + change - rounded if is_narrow(param) else None


def _moves(param, change, rounded):
    # What is not narrow rounds nothing off, and a difference of two sums would.
    return rounded - widened(param) if is_narrow(param) else change
