"""A step whose messages leave while the backward pass still runs.

A bucket's message needs the gradients of its own leaves only. Compilers send it after the whole
gradient all the same: they optimize for memory, or assume fast links. So the step is traced once,
and evaluated in another order, with barriers that a compiler cannot undo.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from jaxcomp.replicas.elementwise import innermost
from jaxcomp.replicas.types import is_message, names_of, tied
from jaxcomp.steps.gradient import Given, Gradient, local_gradient
from jaxcomp.steps.loss import Extra
from jaxcomp.steps.update import Update, local_update

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot")
_SMALL = 1024  # entries of a message that nothing is computed beside, for example the mean loss


def early(
    gradient: Gradient, update: Update, params: Any, state: Any, given: Given, extra_args: Any
) -> tuple[Any, Any, jax.Array, jax.Array, Extra]:
    """A whole step, inside `shard_map`: `(params, state, skipped, losses, extra)`.

    For a mesh with only the axes of the replicas and their devices, which are manual throughout.
    Arguments are those of the two halves of a step.
    """

    def exchanged(made):
        losses, grads, extra = made
        new = local_update(update, params, state, grads, losses, extra_args)
        return *new, losses, extra

    first = functools.partial(local_gradient, gradient, params, given)
    return in_early_order(first, exchanged, update.axis_name)


def in_early_order(first: Callable[[], Any], second: Callable[[Any], Any], axis_name: str) -> Any:
    """`second(first())`, where messages of `second` leave once what they need of `first` is made.

    Between the start and the end of a message lie the matrix products of `first` up to the next
    message that is ready. Values are those of the plain order.
    """

    def both():
        made = first()
        return made, second(made)

    closed, (made, results) = jax.make_jaxpr(both, return_shape=True)()
    if any(map(_is_call, closed.eqns)):
        closed = jax.make_jaxpr(lambda: _opened(closed, []))()
    order = _Order(closed, len(jax.tree.leaves(made)), axis_name)
    return jax.tree.unflatten(jax.tree.structure(results), order.evaluated())


class _Order:
    """The equations of a step, what each needs, and what is evaluated so far."""

    def __init__(self, closed: core.ClosedJaxpr, num_first: int, axis_name: str):
        self.jaxpr, self.results = closed.jaxpr, closed.jaxpr.outvars[num_first:]
        self.eqns = closed.jaxpr.eqns
        self.values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self.made_by = {var: i for i, eqn in enumerate(self.eqns) for var in eqn.outvars}
        self.used = _used(closed.jaxpr)
        # Sets of equations are the bits of integers.
        self.needs: list[int] = []
        for i, eqn in enumerate(self.eqns):
            self.needs.append(self._needs_of(eqn.invars) | 1 << i)
        self.first = self._needs_of(closed.jaxpr.outvars[:num_first])
        self.needed = self._needs_of(self.results)
        self.products = [i for i in _bits(self.first) if _has_product(self.eqns[i])]
        for i, eqn in enumerate(self.eqns):
            # Callbacks, for example of jax.debug.print; the effect of a message is its axis.
            self.needed |= self.needs[i] if eqn.effects and not is_message(eqn) else 0
        rest = self.needed & ~self.first
        self.messages = [i for i in _bits(rest) if _is_large_message(self.eqns[i], axis_name)]
        self.done = 0

    def _needs_of(self, variables) -> int:
        needs = 0
        for var in variables:
            if not _is_literal(var) and var in self.made_by:
                needs |= self.needs[self.made_by[var]]
        return needs

    def evaluated(self) -> list[Any]:
        """The results of the second function."""
        cuts, rounds = self._rounds()
        arrived: list[Any] = []
        for place, messages in zip(cuts, rounds, strict=True):
            self._run(self.first & ((1 << place + 1) - 1))
            if arrived:
                self._tie(arrived, self._frontier(place))
            sent = [x for i in messages for x in _variables(self.eqns[i])]
            self._run(self._needs_of(sent))
            ready = {x: self.values[x] for x in sent}
            self._tie(sent, self._frontier(place))
            # Messages bypass the barrier: XLA:GPU would start them late.
            self.values |= ready
            self._run(_set_of(messages))
            arrived = [x for i in messages for x in self.eqns[i].outvars if x in self.used]
        self._run(self.first)
        if arrived:
            last = [x for x in self.eqns[self.products[-1]].outvars if x in self.used]
            self._tie(arrived, last)
        self._run(self.needed)
        return [x.val if isinstance(x, core.Literal) else self.values[x] for x in self.results]

    def _rounds(self) -> tuple[list[int], list[list[int]]]:
        """Where the first function is cut, and the messages that are sent at each place."""
        if not self.products:
            return [], []
        products = _set_of(self.products)
        ready = {i: (self.needs[i] & products).bit_length() - 1 for i in self.messages}
        sent = _set_of(self.messages)
        begins = {ready[i] for i in self.messages if not self.needs[i] & sent & ~(1 << i)}
        cuts = sorted(place for place in begins if 0 <= place < self.products[-1])
        rounds: list[list[int]] = [[] for _ in cuts]
        turn: dict[int, int] = {}
        for i in self.messages:
            before = [turn[j] + 1 for j in _bits(self.needs[i] & sent & ~(1 << i))]
            turn[i] = max([bisect.bisect_left(cuts, ready[i]), *before])
            if turn[i] < len(cuts):
                rounds[turn[i]].append(i)
        return cuts, rounds

    def _frontier(self, place: int) -> list[Any]:
        """What each of the first products after a place waits for: the value that is made last."""
        later = [i for i in self.products if i > place]
        mask, found = _set_of(later), []
        for i in later:
            if self.needs[i] & mask != 1 << i:
                continue
            open_eqns = list(_bits(self.needs[i] & ~self.done))
            known = [
                x
                for j in open_eqns
                for x in _variables(self.eqns[j])
                if x in self.made_by and self.done >> self.made_by[x] & 1
            ]
            found += [max(known, key=self.made_by.__getitem__)] if known else []
        return list(dict.fromkeys(found))

    def _tie(self, some: list[Any], others: list[Any]) -> None:
        both = list(dict.fromkeys([*some, *others]))
        (made,) = tied([self.values[x] for x in both])
        self.values |= dict(zip(both, made, strict=True))

    def _run(self, wanted: int) -> None:
        """Evaluates those of a set of equations that have not been."""
        eqns = [self.eqns[i] for i in _bits(wanted & ~self.done)]
        self.done |= wanted
        self.values |= _evaluated(self.jaxpr, eqns, self.values, self.used)


def _opened(closed: core.ClosedJaxpr, arguments: list[Any]) -> list[Any]:
    """The results of a program: products in jitted functions are then among its equations."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
    read = lambda x: x.val if _is_literal(x) else values[x]
    used = _used(jaxpr)
    for is_call, group in itertools.groupby(jaxpr.eqns, _is_call):
        if not is_call:
            values |= _evaluated(jaxpr, [*group], values, used)
            continue
        for eqn in group:
            made = _opened(eqn.params["jaxpr"], [read(x) for x in eqn.invars])
            values |= dict(zip(eqn.outvars, made, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _evaluated(jaxpr: core.Jaxpr, eqns: list[Any], values: dict, used: set) -> dict[Any, Any]:
    """What some equations of a program make, of what is used."""
    makes = [x for eqn in eqns for x in eqn.outvars if x in used]
    own = set(makes)
    takes = dict.fromkeys(x for eqn in eqns for x in _variables(eqn) if x not in own)
    debug_info = jaxpr.debug_info.with_unknown_names()
    part = jaxpr.replace(
        constvars=[], invars=[*takes], outvars=makes, eqns=eqns, debug_info=debug_info
    )
    run = core.jaxpr_as_fun(core.ClosedJaxpr(part, []))
    return dict(zip(makes, run(*[values[x] for x in takes]), strict=True))


def _used(jaxpr: core.Jaxpr) -> set[Any]:
    """The variables that a program reads or returns."""
    read = [*jaxpr.outvars, *itertools.chain.from_iterable(eqn.invars for eqn in jaxpr.eqns)]
    return {x for x in read if not _is_literal(x)}


def _is_call(eqn) -> bool:
    return eqn.primitive.name in ("jit", "pjit") and _has_product(eqn)


def _bits(number: int) -> Iterator[int]:
    """The members of a set, in order."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _set_of(numbers: list[int]) -> int:
    return sum(1 << i for i in numbers)


def _is_literal(x) -> bool:
    return isinstance(x, core.Literal)


def _variables(eqn) -> list[Any]:
    return [x for x in eqn.invars if not _is_literal(x)]


def _is_large_message(eqn, axis_name: str) -> bool:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    is_large = sum(x.aval.size for x in eqn.outvars) >= _SMALL
    return is_message(eqn) and is_large and axis_name in names_of(axes)


def _has_product(eqn) -> bool:
    return any(each.primitive.name in _PRODUCTS for each in innermost(eqn))
