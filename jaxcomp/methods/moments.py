"""What methods of the Adam family share: a variance that all replicas agree on, and its root."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp.exchange import averaging
from jaxcomp.methods import common
from jaxcomp.methods.common import require, require_static
from jaxcomp.replicas.finite import not_finite, unless
from jaxcomp.replicas.types import size_over_shards, sums_over_shards


class Adam(NamedTuple):
    """The constants that methods of Adam's family share."""

    rate_of: optax.Schedule  # `count -> f32[]`
    b1: float
    b2: float
    eps: float
    variance_floor: float = 0.0
    bias_correction: bool = True
    weight_decay: float = 0.0
    mask: Any = None  # of the leaves that decay, see `common.decays`

    def decays(self, params: Any) -> Any:
        """The rate at which each leaf decays, a number."""
        return common.decays(self.weight_decay, self.mask, params)

    def decayed(self, change: Any, rate: jax.Array, params: Any) -> Any:
        """The change of the parameters, and their decoupled decay."""
        lost = lambda c, p, decay: c - rate * decay * p if decay else c
        return jax.tree.map(lost, change, params, self.decays(params))

    def first_correction(self, count: jax.Array, like: Any) -> jax.Array | float:
        """What a momentum of `count` steps is multiplied by."""
        return 1 / (1 - power(self.b1, count, like)) if self.bias_correction else 1.0

    def root(
        self, variance: Any, weight: jax.Array, floor: float | None = None, others: Any = None
    ) -> Any:
        """D, see `denominator`, of a variance of gradients of this weight: 1 - b2^n in Adam."""
        floor = self.variance_floor if floor is None else floor
        return denominator(variance, self.eps, floor, weight if self.bias_correction else 1, others)

    def weight(self, num_updates: jax.Array, like: Any) -> jax.Array:
        """The weight of as many gradients, at least one."""
        return 1 - power(self.b2, jnp.maximum(num_updates, 1), like)


def adam(
    name: str,
    learning_rate: float | optax.Schedule,
    b1: float,
    b2: float,
    eps: float,
    variance_floor: float = 0.0,
    bias_correction: bool = True,
    weight_decay: float = 0.0,
    mask: Any = None,
) -> Adam:
    """Makes the `Adam` of a method; a ValueError for constants that are out of range, or arrays."""
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    require_static(name, **numbers, variance_floor=variance_floor)
    require(0 <= b1 < 1, name, "[0, 1)", "b1=0.9", b1=b1)
    require(0 <= b2 < 1, name, "[0, 1)", "b2=0.999", b2=b2)
    require(0 < eps, name, "more than 0", "eps=1e-8", eps=eps)
    floor = {"variance_floor": variance_floor}
    require(0 <= variance_floor < 1, name, "[0, 1)", "variance_floor=1e-4", **floor)
    rate = common.schedule_of(name, learning_rate)
    rate_of = lambda count: jnp.asarray(rate(count), jnp.float32)
    return Adam(rate_of, b1, b2, eps, variance_floor, bias_correction, weight_decay, mask)


class Freeze(NamedTuple):
    """When the variance of a 1-bit method stays as it is."""

    step: int | None  # after as many steps; None: when it is stable
    ratio: float  # share of today's norm from which that of `norms.size` steps ago is stable

    def holds(self, state: Any) -> jax.Array:
        """bool[], whether it does in the step after a state."""
        return state.frozen if self.step is None else state.count >= self.step

    def no_norms(self, b2: float, like: Any) -> jax.Array | None:
        """The norms of no steps yet, see `after`; None for a given end."""
        return jnp.zeros(round(1 / (1 - b2)), dtype_of(like)) if self.step is None else None

    def after(self, frozen: jax.Array, state: Any, variance: Any):
        """Whether the next step is of few bits, and the norms to tell the one after by.

        Args:
          frozen: bool[], whether this step was.
          state: With `norms`, of the last steps' l1 norms or None for a given end, and `count`.
          variance: Tree, equal on all replicas, after this step.
        """
        if self.step is not None:
            return state.count + 1 >= self.step, None
        norm = sum(sums_over_shards([jnp.sum(v) for v in jax.tree.leaves(variance)]))
        place = state.count % state.norms.size
        stable = (state.count >= state.norms.size) & (state.norms[place] >= self.ratio * norm)
        return frozen | stable, state.norms.at[place].set(norm)


def freeze(name: str, freeze_step: int | None, freeze_ratio: float) -> Freeze:
    """Makes the `Freeze` of a method; a ValueError for ends of a warm-up that are out of range."""
    least = freeze_step is None or freeze_step >= 1
    write = "a sixth of the steps, or None to find it"
    require(least, name, "at least 1", write, freeze_step=freeze_step)
    ratio = {"freeze_ratio": freeze_ratio}
    require(0 < freeze_ratio < 1, name, "(0, 1)", "freeze_ratio=0.96", **ratio)
    return Freeze(freeze_step, freeze_ratio)


def wide(dtype) -> jnp.dtype:
    """The dtype of what belongs to a parameter: float32, or wider if that is; else a ValueError."""
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"a parameter has dtype {dtype}, but only floating ones can be trained; keep others "
            "out of the parameters, in a closure of the loss."
        )
    return jnp.promote_types(dtype, jnp.float32)


def widened(x: jax.Array) -> jax.Array:
    """An array in float32, or wider if it is."""
    return x.astype(wide(x.dtype))


def zeros(param: jax.Array) -> jax.Array:
    """Zeros for a moment of a parameter: float32, or wider if it is."""
    return jnp.zeros_like(param, wide(param.dtype))


def dtype_of(tree):
    """The widest dtype of the leaves, at least float32."""
    return jnp.result_type(jnp.float32, *jax.tree.leaves(tree))


def power(b: float, n: jax.Array, like) -> jax.Array:
    """b^n in the dtype of the tree `like`: by itself JAX takes float64 where that is enabled."""
    return jnp.asarray(b, dtype_of(like)) ** n


def gradients(updates, like, axis_name: str):
    """A replica's own gradients in the moments' dtypes, those of `like`, and whether they fail.

    They do, i32[] 1, if the square of one is not finite: a variance would not be after it.
    """
    grads = jax.tree.map(lambda g, moment: g.astype(moment.dtype), updates, like)
    return grads, not_finite(jax.tree.map(jnp.square, grads), axis_name)


# Most that one gradient makes of a variance that learns from few: about 15 count at any time.
_LARGEST_SHARE = 1 / 8


def aged(b2: float, steps: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a variance keeps of itself when it is learned some steps after the last time.

    That is b2^steps, but the square of the new gradient never makes more of the variance than
    an eighth, or what Adam gives it. Without that bound a gradient weighs 1 - b2^steps, and a
    variance that is learned every thousand steps is one noisy square, near zero somewhere.

    Args:
      b2: Decay of the variance in a step, in [0, 1).
      steps: i32[], since it was last learned, at least 1.
      weight: f32[], of all gradients that it is of; 0 if of none.

    Returns:
      The share kept, f32[] in [0, b2], and the new `weight`.
    """
    least = (1 - _LARGEST_SHARE) / (1 - _LARGEST_SHARE * (1 - weight))
    keeps = jnp.minimum(jnp.maximum(power(b2, steps, weight), least), b2)
    return keeps, keeps * weight + (1 - keeps)


def learned(grads, variance, b2: jax.Array, due: jax.Array, transport, count: jax.Array):
    """The variance after the mean gradient, where `due`: only then is anything sent.

    A program that sends in some steps alone has a branch; here each bucket has one of its own, so
    that what travels next can leave before the whole gradient is known.

    Args:
      grads: This replica's own.
      variance: Tree, equal on all replicas.
      b2: Its decay.
      due: bool[].
      transport: How gradients travel.
      count: i32[], how often the variance was learned before; the source of masks and noise.
    """

    instead = averaging.Instead(~due)
    mean = averaging.average(transport, grads, count, "variance", instead=instead).mean
    new = optax.tree_utils.tree_update_moment(mean, variance, b2, 2)
    return unless(~due, new, variance)


def root_of(adam: Adam, new: Any, old: Any, learns: jax.Array, fresh: bool) -> tuple[Any, Any]:
    """D in a step that may learn the variance, and which leaves have none but eps: bool[] each.

    No leaf waits for the gradients of the others: where one never had any, D is the mean of the
    others' old variances. In the first step there are none; there the mean of a leaf's gradients
    may be zero where they are not.

    Args:
      adam: The constants.
      new: `(variance, weight)` after the step.
      old: The same before it.
      learns: bool[], whether the step has learned it.
      fresh: Whether it is used at once. There is none to use before the first one.
    """
    is_first = old[1] == 0
    variance, weight = unless(is_first | (learns & fresh), old, new)
    guarded = is_first & learns & (adam.variance_floor > 0)
    rootless = jax.tree.map(lambda v: guarded & (jnp.sum(v) == 0), variance)
    # Without the barrier XLA sums old and new variances of a leaf in one kernel: all would wait.
    others = jax.tree.map(lax.optimization_barrier, old[0])
    return adam.root(variance, weight, others=others), rootless


def denominator(
    variance, eps: float, floor: float, weight: jax.typing.ArrayLike, others: Any = None
):
    """The root of the variance plus eps.

    Args:
      variance: Tree, equal on all replicas.
      eps: Added to the root.
      floor: Least variance as a share of the mean over the leaf, over all its shards. A leaf
        that never had a gradient gets the mean over all that had one instead: else its first
        one would be divided by `eps`.
      weight: f32[], of all gradients that it is of, for the bias correction; 1 for none.
      others: Tree that this mean is of, as an older variance, so that no leaf waits for the
        gradients of the others; by default `variance`. (Over axes that shard leaves, the sums of
        all travel together.)
    """
    correction = 1 / weight
    leaves, treedef = jax.tree.flatten(variance)
    if floor and leaves:
        totals, sizes = _sums(variance), [max(1, size_over_shards(v)) for v in leaves]
        seen = totals if others is None else _sums(others)
        numel = sum(jnp.where(total > 0, n, 0.0) for total, n in zip(seen, sizes, strict=True))
        of_all = sum(seen) / jnp.maximum(1, numel)
        lows = [jnp.where(t > 0, floor * t / n, of_all) for t, n in zip(totals, sizes, strict=True)]
        leaves = [jnp.maximum(v, low.astype(v.dtype)) for v, low in zip(leaves, lows, strict=True)]
    return treedef.unflatten([jnp.sqrt(v * correction) + eps for v in leaves])


def _sums(tree: Any) -> list[jax.Array]:
    return sums_over_shards([jnp.sum(leaf) for leaf in jax.tree.leaves(tree)])


def trust_ratio(param_square, update_square, otherwise: float = 1.0) -> jax.Array:
    """The quotient of two norms, of their squares; `otherwise` where one is zero."""
    both = (param_square > 0) & (update_square > 0)
    quotient = jnp.sqrt(param_square) / jnp.sqrt(update_square)
    return jnp.where(both, quotient, otherwise)
