"""Local steps: each replica trains alone between outer steps, which move all replicas."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomp._checks import is_count, require, require_static
from jaxcomp.compressors.base import Compressor
from jaxcomp.compressors.policies import Policy, path_of
from jaxcomp.compressors.quantize import quantize
from jaxcomp.exchange import averaging
from jaxcomp.exchange.wire import Transport, transport_of
from jaxcomp.methods import moments
from jaxcomp.methods.common import counted, method, no_rounds
from jaxcomp.methods.inner import Synchronization, inner_step
from jaxcomp.replicas.layers import LayersDiffer, in_batches, is_stack, layer_by_layer, one_by_one
from jaxcomp.replicas.protocol import EvaluatesConsensus, KeepsRounding, with_extra_args
from jaxcomp.replicas.types import to_varying, vary_like, zeros_of
from jaxcomp.schedules import Schedule

_FOUR_BITS = quantize(4)
_FEEDBACK = ("residual", "owner_residual")  # arguments of `average`


@EvaluatesConsensus.register
@KeepsRounding.register
class LocalStepsState(NamedTuple):
    """State of `local_steps`; trees have leaves of the parameters' shapes, float32 or wider."""

    # i32[], steps so far
    count: jax.Array  # type: ignore[assignment]
    drift: Any  # this replica's parameters minus the consensus
    # What this replica has not sent yet; None for leaves sent in float32, () without feedback.
    residual: Any
    # f32[numel / R] per bucket and fragment: what this owner has not passed on yet; or None.
    owner_residual: Any
    inner: Any  # state of the inner optimizer, this replica's own: never reset, never sent
    outer: Any  # states of the outer optimizer, one per fragment, equal on all replicas
    arrived: Any  # the mean drift until it is merged; () if it is merged in the same step
    # {"all", "synchronize"}: i32[], how often each was sent; of several fragments
    # "synchronize_0", "synchronize_1" and so on.
    rounds: Any
    skipped: jax.Array  # i32[], this replica's steps whose inner update was not finite


def local_steps(
    inner: optax.GradientTransformation,
    axis_name: str,
    *,
    every: int | Schedule,
    code: Compressor | Policy | Transport | None = _FOUR_BITS,
    outer: optax.GradientTransformation | None = None,
    error_decay: float | None = None,
    fragments: int | Callable[[str, Any], int] = 1,
    delay: int = 0,
    keep: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Lets each replica take `every` steps alone; then an outer optimizer moves all replicas.

    `params` are the consensus; gradients are taken at `jaxcomp.local_params`, which adds this
    replica's `drift` d_i. A step adds the inner update to d_i and sends nothing. In every
    `every`-th step, with C the code and e_i the residual,

        e_i <- error_decay e_i + d_i,  g = -mean_i C[e_i],  e_i <- e_i - C[e_i],
        params <- params + outer(g),  d_i <- 0.

    Without `error_decay` there is no e_i, and what C loses is lost. `every` counts updates, not
    microbatches. With `every=1` and outer `optax.sgd(1.0)` inner steps are averaged. For more outer
    steps at the start: `every=jaxcomp.schedules.growing(8, longest=16)`.

    A replica whose inner update is not finite skips it, keeps its inner state, and counts it in
    `skipped`; the outer step goes on.

    Args:
      inner: Any optax optimizer, with its learning rate. It sees local gradients and must not
        average over the replicas.
      axis_name: Mesh axis of the replicas.
      every: Inner steps per outer step, at least 1; or a schedule, see `jaxcomp.schedules`, that
        gives the steps in which an outer step follows.
      code: Code of the differences; or a policy `(path, leaf) -> Compressor`; or a transport:
        `jaxcomp.gathered(code)`, or `jaxcomp.from_senders(code)`, which divides by the number of
        replicas that sent an entry. None if `outer` averages itself, like
        `jaxcomp.sharded_optimizer`, whose state is sharded.
      outer: Any optax optimizer, equal on all replicas. Its gradient is minus the mean drift.
        Default: `optax.sgd(0.7, momentum=0.9, nesterov=True)`. Sparse codes do not work with
        momentum: use `optax.sgd(1.0)` with them.
      error_decay: Decay of the residual at each outer step, in (0, 1], in both directions; None for
        no error feedback, which saves memory.
      fragments: Parts of the model that are exchanged in turn, evenly over `every` steps: a number
        of equal parts, or a policy `(path, leaf) -> int`, from 0 on.
      delay: Steps from the end of a fragment's interval until its mean is merged, at most `every`.
        From 1 on, `jaxcomp.overlapped_train_step` can overlap the message with the gradient. From
        2 on it costs one more float32 per parameter.
      keep: Share of its own difference that a replica keeps when it merges, in [0, 1).

    Returns:
      A `GradientTransformationExtraArgs` whose updates move the consensus, in float32. It keeps
      the inner and the outer state, a float32 drift, and with feedback 1 + 1/R float32 residuals.

    Raises:
      ValueError: At construction for arguments out of range, or fragments or a delay with a
        schedule; at trace time without `params`, for an unknown axis, gradients that are already
        reduced, leaves that are not floating, more fragments than leaves, or an inner optimizer
        that averages over the replicas.

    Examples:
      >>> import jaxcomp
      >>> import optax
      >>> tx = jaxcomp.local_steps(optax.adamw(1e-3), "replica", every=16)

    References:
      A. Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023, algorithm 1; A. Douillard et al., `Streaming
      DiLoCo with overlapping communication <https://arxiv.org/abs/2501.18512>`_, 2025, algorithm
      2. Presets with their settings: `diloco`, `streaming_diloco`, `sparse_loco`, `muloco`.
      Deviation: the drift keeps what narrow parameters round off.
    """
    name, averages = "local_steps", code is not None  # otherwise `outer` does
    require_static(name, "optax.adam(learning_rate)", every=every)
    require_ranges(name, every, error_decay, fragments, delay, keep)
    if not averages:
        alone = error_decay is None and delay == 0 and fragments == 1
        needs, write = "no feedback, delay or fragments", "codes of `outer`"
        require(alone, name, needs, write, code=code)
    if outer is None:
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    transport = transport_of(averaging.EXACT if code is None else code, axis_name)
    # Of stacked layers the drift is one array. All else sees the layers.
    inner, outer = layer_by_layer(with_extra_args(inner, name)), layer_by_layer(outer)

    def init_fn(params):
        parts, zero = fragments_of(fragments, params), jnp.zeros([], jnp.int32)
        wide = jax.tree.map(moments.to_moment_dtype, params)
        zeros = jax.tree.map(jnp.zeros_like, wide)
        drift = to_varying(zeros, axis_name)
        zero_of = functools.partial(one_by_one, averaging.nothing_sent, transport)
        nothing = [] if error_decay is None else [zero_of(tree) for tree in parts.cut(drift)]
        return LocalStepsState(
            count=zero,
            drift=drift,
            # All of it this replica's own from the start.
            inner=to_varying(inner.init(wide), axis_name),
            outer=tuple(map(outer.init, parts.cut(wide))),
            arrived=zeros if delay > 1 else (),
            rounds=no_rounds(*parts.names("synchronize")),
            skipped=to_varying(zero, axis_name),
            **_residuals(parts, nothing),
        )

    def due_after(count, parts):
        """bool[] for each fragment, whether its interval ended after `count` steps."""
        if callable(every):
            return [(count > 0) & every(count - 1)]
        offsets = [part * every // parts.number for part in range(parts.number)]
        return [(count > 0) & (count % every == offset) for offset in offsets]

    def chosen(due, then, otherwise, *operands):
        if every == 1 and not delay:
            return then(*operands)
        return lax.cond(due, then, otherwise, *operands)

    def averaged(parts, state, drift, count):
        """The mean drift of the fragments that are exchanged after `count` steps, and residuals.

        For the others: what has arrived and is not merged yet, or zeros.
        """
        if not averages:
            return drift, []
        held = parts.cut(state.arrived) if delay > 1 else [None] * parts.number
        kept: list[Any] = [()] * parts.number
        if error_decay is not None:
            kept = list(zip(parts.cut(state.residual), state.owner_residual, strict=True))

        def sent(name, due, kept, held, tree):
            # Masks roll once per outer step, not per step: else some entries might never be sent.
            number = state.rounds[name]
            send = functools.partial(_sent, transport, error_decay, name, number, kept)
            return chosen(due, send, functools.partial(_not_sent, send, kept, held), tree)

        rows = parts.names("synchronize"), due_after(count, parts), kept, held, parts.cut(drift)
        means, left = zip(*map(sent, *rows), strict=True)
        return parts.merged(means), [] if error_decay is None else left

    def merged(parts, state, params, drift, arrived, count, extra_args):
        """The change of the consensus, the drifts after it, and the outer states."""
        merge = functools.partial(
            _moved, outer, keep, "" if averages else "synchronize", extra_args
        )
        operands = *map(parts.cut, (params, drift, arrived)), state.outer
        stay = functools.partial(_unmoved, merge)
        rows = [
            chosen(due, merge, stay, *own)
            for due, *own in zip(due_after(count - delay, parts), *operands, strict=True)
        ]
        changes, drifts, outer_states = zip(*rows, strict=True)
        return parts.merged(changes), parts.merged(drifts), outer_states

    def update_fn(updates, state, params, *, ahead=lambda make: make(), **extra_args):
        parts, count = fragments_of(fragments, params), optax.safe_increment(state.count)
        # Below 2e-4 the square of a float16 gradient is zero, and Adam's step would be m / eps.
        updates = jax.tree.map(moments.to_moment_dtype, updates)
        if delay:
            early = functools.partial(averaged, parts, state, state.drift, state.count)
            arrived, left = ahead(early)
        due = due_after(state.count if delay else count, parts)
        names = parts.names("synchronize")
        step, inner_state, is_bad = inner_step(
            name,
            inner,
            updates,
            state.inner,
            jax.tree.map(jnp.add, params, state.drift),
            axis_name,
            Synchronization(due[0], names[0], always=every == 1 and not delay, step=state.count),
            extra_args,
        )
        drift = jax.tree.map(jnp.add, state.drift, step)
        if not delay:
            arrived, left = averaged(parts, state, drift, count)
        change, drift, outer_states = merged(
            parts, state, params, drift, arrived, count, extra_args
        )
        sent = dict(zip(names, due, strict=True))
        return change, LocalStepsState(
            count=count,
            drift=drift,
            inner=inner_state,
            outer=outer_states,
            arrived=arrived if delay > 1 else (),
            rounds=counted(state.rounds, all=functools.reduce(jnp.logical_or, due), **sent),
            skipped=state.skipped + is_bad,
            **_residuals(parts, left),
        )

    return in_batches(method(name, axis_name, init_fn, update_fn))


def _sent(transport, decay, name, number, kept, tree):
    """A fragment's mean drift, and its residuals after that: `(residual, owner_residual)` or ()."""
    kept = jax.tree.map(lambda e: decay * e, dict(zip(_FEEDBACK[: len(kept)], kept, strict=True)))
    average = functools.partial(averaging.average, transport, part=name)
    got = one_by_one(lambda tree, kept: average(tree, number, **kept), tree, kept)
    return got.mean, (got.residual, got.owner_residual) if kept else ()


def _not_sent(send, kept, held, tree):
    """What `send` returns in steps without an exchange: what is `held` since the last, or zeros."""
    like = jax.eval_shape(send, tree)[0]
    mean = jax.tree.map(zeros_of, like) if held is None else jax.tree.map(vary_like, held, like)
    return mean, kept


def _moved(outer, keep, name, extra_args, param, drift, mean, state):
    """The outer step of a fragment; `name` is the part that the optimizer sends, if it does."""
    with averaging.named(name):
        return outer_step(outer, keep, param, drift, mean, state, **extra_args)


def _unmoved(merge, param, drift, mean, state):
    """What `merge` returns in steps without an outer step: nothing moves."""
    change, _, like = jax.eval_shape(merge, param, drift, mean, state)
    return jax.tree.map(zeros_of, change), drift, jax.tree.map(vary_like, state, like)


def _residuals(parts, each):
    """The state's fields from the residuals of each fragment; [] without feedback."""
    if not each:
        return {"residual": (), "owner_residual": None}
    residuals, owner_residuals = zip(*each, strict=True)
    return {"residual": parts.merged(residuals), "owner_residual": owner_residuals}


def outer_step(
    outer: optax.GradientTransformation,
    keep: float,
    params: Any,
    drift: Any,
    mean: Any,
    state: Any,
    **extra_args: Any,
) -> tuple[Any, Any, Any]:
    """The step of all replicas along their mean drift, which `jaxcomp.islands` takes too.

    Args:
      outer: The outer optimizer; its gradient is minus the mean.
      keep: Share of its own difference that a replica keeps.
      params: The consensus.
      drift: What this replica has moved from it.
      mean: The mean drift.
      state: Of the optimizer.
      **extra_args: What else the optimizer needs, such as the mean loss as `value`.

    Returns:
      The change of the consensus, the drift after it, and the optimizer's state.
    """
    wide, gradient = jax.tree.map(moments.to_moment_dtype, params), jax.tree.map(jnp.negative, mean)
    change, state = outer.update(gradient, state, wide, **extra_args)
    change = jax.tree.map(lambda c, w: c.astype(w.dtype), change, wide)

    def left(param, drift, change):
        own = keep * (drift - change) if keep else zeros_of(drift)
        return own if param.dtype == change.dtype else own + averaging.rounded_off(param, change)

    return change, jax.tree.map(left, params, drift, change), state


def require_ranges(name, every, error_decay, fragments, delay, keep) -> None:
    """Raises a ValueError for an argument of local steps, or of islands, that is out of range."""
    if callable(every):
        alone = fragments == 1 and delay == 0
        needs, given = "1 and 0 with a schedule", {"fragments": fragments, "delay": delay}
        require(alone, name, needs, "every=16, or neither of them", **given)
    else:
        # A count is never a multiple of 12.5, or only of two of them.
        require(is_count(every), name, "at least 1, as an integer", "every=16", every=every)
        in_time = is_count(delay, 0) and delay <= every
        require(in_time, name, "an integer from 0 to `every`", "delay=1", delay=delay)
    feedback = {"error_decay": error_decay}
    decays = error_decay is None or 0 < error_decay <= 1
    require(decays, name, "(0, 1], or None", "error_decay=1.0", **feedback)
    require(0 <= keep < 1, name, "[0, 1)", "keep=0.0", keep=keep)
    some = callable(fragments) or is_count(fragments)
    require(some, name, "at least 1, as an integer", "fragments=1", fragments=fragments)


class Fragments(NamedTuple):
    """The part of each leaf of a tree, numbered from 0 on."""

    treedef: jax.tree_util.PyTreeDef
    owners: tuple[int, ...]  # the part of each leaf

    @property
    def number(self) -> int:
        """How many parts there are."""
        return max(self.owners, default=0) + 1

    def cut(self, tree: Any) -> list[Any]:
        """One tree per part, with an `optax.MaskedNode` in place of the other parts' leaves."""
        if self.number == 1:
            return [tree]
        leaves = self.treedef.flatten_up_to(tree)
        masked = lambda part: [
            x if owner == part else optax.MaskedNode()
            for x, owner in zip(leaves, self.owners, strict=True)
        ]
        return [self.treedef.unflatten(masked(part)) for part in range(self.number)]

    def merged(self, trees: Sequence[Any]) -> Any:
        """Undoes `cut`."""
        if self.number == 1:
            return trees[0]
        columns = [self.treedef.flatten_up_to(tree) for tree in trees]
        return self.treedef.unflatten(
            [columns[owner][leaf] for leaf, owner in enumerate(self.owners)]
        )

    def names(self, name: str) -> list[str]:
        """The name of each part; `name` itself if there is only one."""
        return [name] if self.number == 1 else [f"{name}_{i}" for i in range(self.number)]


def fragments_of(fragments: int | Callable[[str, Any], int], params: Any) -> Fragments:
    """Cuts a tree into a number of parts of about equal sizes, or as `(path, leaf) -> int` says.

    Raises:
      ValueError: If a part has no leaf. It is a `LayersDiffer` for stacks, whose layers may
        be in several parts.
    """
    keyed, treedef = jax.tree.flatten_with_path(params)
    if fragments != 1 and any(is_stack(path) for path, _ in keyed):
        raise LayersDiffer("the layers of a stack may be in several fragments.")
    if callable(fragments):
        owners = [fragments(path_of(path), leaf) for path, leaf in keyed]
    else:
        # The largest remaining leaf goes to the smallest part.
        sizes, owners = [0] * fragments, [0] * len(keyed)
        for i in sorted(range(len(keyed)), key=lambda i: -keyed[i][1].size):
            owners[i] = min(range(fragments), key=lambda part: (sizes[part], part))
            sizes[owners[i]] += max(keyed[i][1].size, 1)
    wanted = max(owners, default=0) + 1 if callable(fragments) else fragments
    if keyed and set(owners) != set(range(wanted)):
        raise ValueError(
            f"got fragments {sorted(set(owners))} of {len(keyed)} leaves; needs a leaf in each of "
            f"{list(range(wanted))}; write fragments=1, or a policy that numbers them from 0 on."
        )
    return Fragments(treedef, tuple(owners))
