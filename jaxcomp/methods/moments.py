"""What methods of the Adam family share: a common variance, and its square root."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import instead_of, require, require_decay, require_static, schedule_of
from jaxcomp.methods import common
from jaxcomp.replicas.layers import broadcast_over, own_axes
from jaxcomp.replicas.types import size_over_shards, sums_over_shards


class Deviations(NamedTuple):
    """What `one_bit_adam`, `one_bit_lamb` and `zero_one_adam` do otherwise than their papers.

    Each field has its reason; D is sqrt(v) + eps. `deviations=None` in place of a value is the
    paper's form. The last three fields are for `zero_one_adam` alone.

    Attributes:
      precondition: Whether messages hold momenta over D; the papers send momenta, and 1-bit LAMB
        scales each layer to the mean magnitude of all. One bit cannot encode zero: coordinates that
        never had a gradient get +-scale. Over D this noise is as large as a step in every
        coordinate, and error feedback removes it again.
      variance_floor: Least variance to divide by, a share in [0, 1) of its mean over the leaf; for
        the methods that freeze it, after the warm-up. Without it a coordinate whose gradients come
        late could take a step of any size. A leaf without any gradient so far gets the mean of the
        others. In the papers 0.
      step_bound: Most that a coordinate moves in a step, in units of the most that Adam could move
        it with any gradients; after the warm-up, if there is one. In LAMB this bounds m / D. None:
        no bound, as in the papers. See `jaxcomp.methods.step_bound`.
      bias_correction: Whether moments are divided by 1 - b^n, as in Adam, and in 1-bit LAMB the
        average of trust ratios likewise. Off in the papers' runs.
      fresh_variance: Whether a step uses the variance that it has learned; in the paper the next
        step does. While gradients grow an older variance makes steps too large.
      weigh_steps: Whether the variance decays by b2 per step; in the paper it decays by b2 per
        update. An update then counts for all steps since the last one, but one gradient is never
        more than an eighth of the variance, or its share in Adam if that is larger.
      mean_momentum: Whether every momentum becomes the mean one in a synchronization, as in the
        paper; a message's error then acts for 1 / (1 - b1) steps. False lost less on rare tokens,
        and more with a vocabulary of bytes.

    Examples:
      >>> import jaxcomp
      >>> unbounded = jaxcomp.Deviations(step_bound=None)
      >>> tx = jaxcomp.one_bit_adam(1e-3, "replica", deviations=unbounded)
    """

    precondition: bool = True
    variance_floor: float = 1e-2
    step_bound: float | None = 1.0
    bias_correction: bool = True
    fresh_variance: bool = True
    weigh_steps: bool = True
    mean_momentum: bool = True


NONE = Deviations(
    precondition=False,
    variance_floor=0.0,
    step_bound=None,
    bias_correction=False,
    fresh_variance=False,
    weigh_steps=False,
)


class Adam(NamedTuple):
    """The constants that methods of the Adam family share."""

    rate_of: optax.Schedule  # `count -> f32[]`
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Any  # of the leaves that decay, see `common.decays`
    deviations: Deviations

    def decays(self, params: Any) -> Any:
        """The weight decay of each leaf."""
        return common.decays(self.weight_decay, self.mask, params)

    def decayed(self, change: Any, rate: jax.Array, params: Any) -> Any:
        """The change of the parameters, plus their decoupled weight decay."""
        lost = lambda c, p, decay: c - rate * decay * p if decay else c
        return jax.tree.map(lost, change, params, self.decays(params))

    def first_correction(self, count: jax.Array, like: Any) -> jax.Array | float:
        """The bias correction of a momentum of `count` steps, a factor."""
        return 1 / (1 - power(self.b1, count, like)) if self.deviations.bias_correction else 1.0

    def root(
        self, variance: Any, weight: jax.Array, floor: float | None = None, others: Any = None
    ) -> Any:
        """D, the square root of the variance, plus eps.

        Args:
          variance: Tree, equal on all replicas.
          weight: f32[], of all gradients in it: 1 - b2^n in Adam.
          floor: In place of `variance_floor`, a share of the mean over the leaf, or layer of a
            stack, over all its shards. A leaf that never had a gradient gets the mean over the
            other leaves, so that its first gradient is not divided by `eps`.
          others: Tree for the mean over the other leaves, for example an older variance, so that no
            leaf waits for the gradients of the others; by default `variance`. (Over axes that shard
            leaves, all sums are sent together.)
        """
        floor = self.deviations.variance_floor if floor is None else floor
        correction = 1 / weight if self.deviations.bias_correction else 1.0
        leaves, treedef = jax.tree.flatten(variance)
        if floor and leaves:
            totals, sizes = sums(variance), layer_sizes(variance)
            seen = totals if others is None else sums(others)
            counted = [jnp.where(total > 0, n, 0.0) for total, n in zip(seen, sizes, strict=True)]
            mean = sum(map(_total, seen)) / jnp.maximum(1, sum(map(_total, counted)))
            lows = [
                jnp.where(t > 0, floor * t / n, mean) for t, n in zip(totals, sizes, strict=True)
            ]
            above = lambda v, low: jnp.maximum(v, broadcast_over(low.astype(v.dtype), v))
            leaves = list(map(above, leaves, lows))
        return treedef.unflatten([jnp.sqrt(v * correction) + self.eps for v in leaves])

    def weight(self, num_updates: jax.Array, like: Any) -> jax.Array:
        """The weight of this many gradients, at least one."""
        return 1 - power(self.b2, jnp.maximum(num_updates, 1), like)


def adam(
    name: str,
    learning_rate: float | optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float = 0.0,
    mask: Any = None,
    deviations: Deviations | None = None,
) -> Adam:
    """Makes the `Adam` of a method; a ValueError for constants that are out of range, or arrays."""
    deviations = NONE if deviations is None else deviations
    variance_floor, step_bound = deviations.variance_floor, deviations.step_bound
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    require_static(name, **numbers, variance_floor=variance_floor, step_bound=step_bound)
    require(0 <= b1 < 1, name, "[0, 1)", "b1=0.9", b1=b1)
    require(0 <= b2 < 1, name, "[0, 1)", "b2=0.999", b2=b2)
    require(0 < eps, name, "more than 0", "eps=1e-8", eps=eps)
    require_decay(name, weight_decay)
    floor = {"variance_floor": variance_floor}
    require(0 <= variance_floor < 1, name, "[0, 1)", "variance_floor=1e-4", **floor)
    write = "step_bound=1.0, or None for no bound"
    require(
        step_bound is None or 0 < step_bound < math.inf,
        name,
        "a number above 0",
        write,
        step_bound=step_bound,
    )
    rate = schedule_of(name, learning_rate)
    rate_of = lambda count: jnp.asarray(rate(count), jnp.float32)
    return Adam(rate_of, b1, b2, eps, weight_decay, mask, deviations)


def wide(dtype) -> jnp.dtype:
    """The dtype of a parameter's moments: at least float32; a ValueError if it is not floating."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"a parameter has dtype {dtype}, but only floating ones can be trained; "
            f"{instead_of(dtype)}"
        )
    return jnp.promote_types(dtype, jnp.float32)


def to_moment_dtype(x: jax.Array) -> jax.Array:
    """An array in float32; unchanged if it is wider."""
    return x.astype(wide(x.dtype))


def zeros(param: jax.Array) -> jax.Array:
    """Zeros for a moment of a parameter: float32, or its dtype if that is wider."""
    return jnp.zeros_like(param, wide(param.dtype))


def dtype_of(tree):
    """The widest dtype of the leaves, at least float32."""
    return jnp.result_type(jnp.float32, *jax.tree.leaves(tree))


def power(b: float, n: jax.Array, like) -> jax.Array:
    """b^n in the dtype of the tree `like`; JAX alone would use float64 if that is enabled."""
    return lax.pow(jnp.asarray(b, dtype_of(like)), n)


def sums(tree: Any) -> list[jax.Array]:
    """The sum of each leaf, over all its shards, or of each layer of a stack."""
    return sums_over_shards(list(map(jnp.sum, jax.tree.leaves(tree), own_axes(tree))))


def _total(x: jax.Array) -> jax.Array:
    # Without the barrier XLA would add up the entries again, over all layers at once.
    return jnp.sum(lax.optimization_barrier(x)) if x.ndim else x


def layer_sizes(tree: Any, *but: str) -> list[int]:
    """Elements of each leaf, over all its shards, or of one layer of a stack; at least 1."""
    layers = [
        math.prod(x.shape[: x.ndim - len(axes)])
        for x, axes in zip(jax.tree.leaves(tree), own_axes(tree), strict=True)
    ]
    sizes = [size_over_shards(x, *but) for x in jax.tree.leaves(tree)]
    return [max(1, size // max(1, n)) for size, n in zip(sizes, layers, strict=True)]


def trust_ratio(param_square, update_square, otherwise: float = 1.0) -> jax.Array:
    """The quotient of two norms, given their squares; `otherwise` if one is zero."""
    both = (param_square > 0) & (update_square > 0)
    quotient = jnp.sqrt(param_square) / jnp.sqrt(update_square)
    return jnp.where(both, quotient, otherwise)
