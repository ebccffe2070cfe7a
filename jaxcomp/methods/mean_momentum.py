"""Momenta that replicas average when they average their models, inside `local_steps`."""

from __future__ import annotations

import jax
import optax
from jax import lax

from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy
from jaxcomp.compressors.quantize import quantize
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.replicas.protocol import with_extra_args
from jaxcomp.replicas.types import to_varying, vary_like

_THREE_BITS = quantize(3, block=64)


def mean_momentum(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    code: Compressor | Policy | Transport = _THREE_BITS,
) -> optax.GradientTransformationExtraArgs:
    """Averages the momentum of a local optimizer whenever replicas exchange their models.

    A replica's own momentum is noisy, as its batch is a part of the whole one, and Adam and Muon
    step as far for noise as for a mean. Write this around the inner optimizer of `local_steps`:
    before the last step of an interval each momentum becomes the mean of all replicas' momenta. It
    is sent beside the models, at the bits of `code`, with the first of several fragments. A `delay`
    hides the models' message, not this one. Second moments stay local.

    A replica whose gradient is not finite in such a step keeps its own momentum.

    Args:
      inner: Optimizer with a momentum: fields `mu` or `trace` in its state, as in optax's.
      axis_name: Mesh axis of the replicas.
      code: Code of the momenta, dense; a policy sees paths such as `0/mu/embed`. Errors are not fed
        back. Adam divides small momenta by small second moments, so a block should not hold rows of
        rare and of frequent tokens: with 2 bits in blocks of 1,024 Adam diverges.

    Returns:
      A `GradientTransformationExtraArgs` with the state of `inner`.

    Raises:
      ValueError: At trace time, if no method is around it that tells when replicas exchange, or if
        the state of `inner` has no momentum.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> inner = jaxcomp.mean_momentum(jaxcomp.muon(4e-3), "replica")
      >>> tx = jaxcomp.local_steps(inner, "replica", every=16, outer=optax.sgd(1.0))

    References:
      A. Iacob et al., `DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
      Foundation Models <https://arxiv.org/abs/2505.22549>`_, 2025. Deviations: momenta are encoded,
      and as often exchanged as models; second moments are not averaged.
    """
    inner = with_extra_args(inner, "mean_momentum")
    transport = transport_of(code, axis_name)

    def update_fn(updates, state, params=None, *, sync=None, **extra_args):
        if sync is None:
            raise ValueError(
                "mean_momentum needs a method around it that tells when replicas exchange; write "
                "local_steps(mean_momentum(optax.adam(1e-3), 'replica'), 'replica', every=16)."
            )
        # The momenta before this step are finite, and known before the gradient is.
        state = _with_mean_momenta(transport, state, sync)
        return inner.update(updates, state, params, sync=sync, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _with_mean_momenta(transport, state, sync):
    """The state after an exchange of its momenta, if one is due."""
    nodes, treedef = jax.tree.flatten(state, is_leaf=lambda x: bool(_fields(x)))
    own = [{name: getattr(x, name) for name in _fields(x)} for x in nodes]
    own = to_varying(own, transport.axis_name)
    if not jax.tree.leaves(own):
        raise ValueError(
            "mean_momentum found no momentum `mu` or `trace` in the inner optimizer's state; write "
            "it around an optimizer with one, as optax.adam or jaxcomp.muon."
        )

    def averaged():
        mean = averaging.average(transport, own, sync.step, part=sync.part).mean
        return jax.tree.map(lambda mean, x: vary_like(mean.astype(x.dtype), x), mean, own)

    momenta = averaged() if sync.due is True else lax.cond(sync.due, averaged, lambda: own)
    pairs = zip(nodes, momenta, strict=True)
    return treedef.unflatten([x._replace(**fields) if fields else x for x, fields in pairs])


def _fields(node):
    """The names of a node's momenta, if it is an optimizer's state with some."""
    return [name for name in ("mu", "trace") if name in getattr(node, "_fields", ())]
