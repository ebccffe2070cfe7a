"""Schedules: when to exchange and when to learn the variance, as functions of the step.

A schedule is `(count) -> bool`, elementwise over `i32[...]`: whether something happens in the step
after `count` earlier ones. It depends only on the count, so that all replicas agree.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomp._checks import is_count, is_power_of_two, require, schedule_of
from jaxcomp._printing import Printed, by_name, call

Schedule = Callable[[jax.Array], jax.Array]


@by_name
def always(count: jax.Array) -> jax.Array:
    """Every step."""
    return jnp.ones_like(count, bool)


@by_name
def never(count: jax.Array) -> jax.Array:
    """No step, for a variance from elsewhere."""
    return jnp.zeros_like(count, bool)


@by_name
def doubling(count: jax.Array) -> jax.Array:
    """Steps 1, 2, 4, 8, ... (the first is step 1), for values that change ever more slowly."""
    return (count + 1) & count == 0


def until(step: int) -> Schedule:
    """The first `step` steps."""
    return Printed(lambda count: count < step, f"until({step})")


def every(interval: int, steps: int, after: int = 0) -> Schedule:
    """Every step before `after`, then every `interval`-th.

    The last step is always included, so that no local change is lost.

    Args:
      interval: Steps from one to the next, at least 1.
      steps: Steps of the whole run, at least 1.
      after: Steps before this are all included; for example the end of the variance's schedule.

    Raises:
      ValueError: If `interval` or `steps` is below 1.
    """
    needs, given = "at least 1 of both, as integers", {"interval": interval, "steps": steps}
    holds = is_count(interval) and is_count(steps)  # no count is the last of 12.5 steps
    require(holds, "every", needs, "every(4, steps)", **given)
    due = lambda count: (count < after) | ((count + 1) % interval == 0) | (count == steps - 1)
    return Printed(due, call(every, interval=interval, steps=steps, after=after))


def both(first: Schedule, second: Schedule) -> Schedule:
    """The steps that are in both schedules."""
    return Printed(lambda count: first(count) & second(count), f"both({first!r}, {second!r})")


def growing(kappa: int = 16, until: int | None = None, longest: int | None = None) -> Schedule:
    """Steps whose distance doubles after every `kappa` of them: 0/1 Adam's for the variance.

    With kappa = 16 these are steps 1 to 16, 18, 20, ... 48, 52, ... (the first is step 1). The
    distance grows up to 2**30.

    Args:
      kappa: Number of steps at one distance, at least 1.
      until: There are none after this many steps, at least 1; None for no end.
      longest: Greatest distance, a power of two; None for 2**30.

    Raises:
      ValueError: If `kappa` or `until` is below 1, or `longest` is not a power of two.

    References:
      Lu et al., `Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam
      <https://arxiv.org/abs/2202.06009>`_, 2023, Section 4: k_{j+1} - k_j = 2^floor(j / kappa).
    """
    require(is_count(kappa), "growing", "at least 1, as an integer", "kappa=16", kappa=kappa)
    needs, write = "at least 1, or nothing is learned", "the steps of the learning rate's warm-up"
    require(until is None or until >= 1, "growing", needs, write, until=until)
    holds = longest is None or is_power_of_two(longest)
    require(holds, "growing", "a power of two", "longest=16", longest=longest)
    levels = 30 if longest is None else min(int(longest).bit_length() - 1, 30)

    def schedule(count):
        number = count + 1
        starts = [s for level in range(1, levels + 1) if (s := kappa * (2**level - 1)) < 2**30]
        level = sum((number > start).astype(jnp.int32) for start in starts)
        distance = 1 << level
        due = (number - kappa * (distance - 1)) % distance == 0
        return due if until is None else due & (count < until)

    return Printed(schedule, call(growing, kappa=kappa, until=until, longest=longest))


def halving(
    learning_rate: float | optax.Schedule, steps: int, longest: int = 16, after: int = 0
) -> Schedule:
    """Intervals that double whenever the learning rate halves: 0/1 Adam's for synchronization.

    Every step until the rate has peaked (and until `after`); then every 2, 4, ... `longest`
    steps, as the rate falls below 1/2, 1/4, ... of its peak. The last step is always included, so
    that no local change is lost.

    Args:
      learning_rate: The learning rate in use, constant or a schedule.
      steps: Steps of the whole run, at least 1.
      longest: Longest interval, a power of two; H in the paper.
      after: First step at which an interval may be longer than 1, for example the end of the
        variance's schedule.

    Raises:
      ValueError: If `longest` is not a power of two, or `steps` is below 1.

    References:
      Lu et al., `Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam
      <https://arxiv.org/abs/2202.06009>`_, 2023, Section 4. The authors' code counts steps instead
      of looking at the rate; here the interval follows the rate, even when it rises again.
    """
    holds = is_power_of_two(longest)
    require(holds, "halving", "a power of two", "longest=16", longest=longest)
    write = "the steps of the run"
    require(is_count(steps), "halving", "at least 1, as an integer", write, steps=steps)
    rate = schedule_of("halving", learning_rate)
    halvings = int(longest).bit_length() - 1

    @functools.cache
    def highest():
        # Evaluated late: a transformation may be made before JAX knows its devices.
        with _at_once():
            rates = np.asarray(jax.vmap(rate)(jnp.arange(steps)))
        return float(rates.max()), max(int(rates.argmax()), after)

    def schedule(count):
        peak, first = highest()
        # Comparisons, not a logarithm: exact if the rate is the peak over a power of two.
        now = jnp.asarray(rate(count))
        level = sum((now * 2**i <= peak).astype(jnp.int32) for i in range(1, halvings + 1))
        interval = jnp.where(count >= first, 1 << level, 1)
        return ((count + 1) % interval == 0) | (count == steps - 1)

    written = {"learning_rate": learning_rate, "steps": steps, "longest": longest, "after": after}
    return Printed(schedule, call(halving, **written))


def by_rate(learning_rate: float | optax.Schedule, steps: int, every: int) -> Schedule:
    """As many steps as every `every`-th, at equal sums of the learning rate between them.

    Intervals are short where the rate is high and replicas drift apart fast, and long where it is
    low. With a cosine that ends at zero the shortest is about half of `every`. The last step is
    always included, so that no local change is lost.

    Args:
      learning_rate: The learning rate in use, constant or a schedule.
      steps: Steps of the whole run, at least 1.
      every: Mean number of steps from one to the next, at least 1. With 1 or 2 the schedule may
        have fewer steps, as a step counts once however high its rate is.

    Raises:
      ValueError: If `every` or `steps` is below 1; when it is used, if the rate is always zero.
    """
    write, given = "by_rate(learning_rate, steps, 32)", {"steps": steps, "every": every}
    needs, holds = "at least 1 of both, and whole steps", every >= 1 and is_count(steps)
    require(holds, "by_rate", needs, write, **given)
    rate = schedule_of("by_rate", learning_rate)

    @functools.cache
    def table():
        # Evaluated late: a transformation may be made before JAX knows its devices.
        with _at_once():
            rates = np.asarray(jax.vmap(rate)(jnp.arange(steps)), np.float64)
        if not rates.any():
            raise ValueError(
                f"by_rate got {learning_rate!r}, which is zero in all {steps} steps; needs a rate "
                "above zero in some; write every(32, steps)."
            )
        rounds = np.cumsum(rates) / rates.sum() * max(round(steps / every), 1)
        rounds = np.floor(rounds + 1e-6)  # what rounding leaves below a whole one is one
        return np.append(np.diff(rounds, prepend=0)[:-1] > 0, True)

    schedule = lambda count: jnp.asarray(table())[jnp.minimum(count, steps - 1)]
    return Printed(schedule, call(by_rate, learning_rate=learning_rate, steps=steps, every=every))


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Evaluates inside a jitted function, too, and where a program forbids transfers."""
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        yield


class Plan(NamedTuple):
    """The number of exchanges of a run."""

    rounds: int  # steps in which anything is exchanged
    synchronizations: int
    variance_updates: int


def plan(sync_at: Schedule, variance_at: Schedule, steps: int) -> Plan:
    """Counts the exchanges of a run before it starts.

    Args:
      sync_at: Steps that synchronize.
      variance_at: Steps that learn the variance.
      steps: Steps of the run, at least 1.

    Raises:
      ValueError: If there are no steps, or the variance is learned in a step that does not
        synchronize, or not in the first one.
    """
    needs = "at least 1, as an integer"
    require(is_count(steps), "plan", needs, "the steps of the run", steps=steps)
    with _at_once():
        count = jnp.arange(steps)
        sync, variance = (np.asarray(schedule(count)) for schedule in (sync_at, variance_at))
    if np.any(variance & ~sync):
        step = int(np.argmax(variance & ~sync))
        raise ValueError(
            f"variance_at holds at count {step}, where sync_at does not: the variance may change "
            "only when the replicas are together; write variance_at=growing(until=N), and "
            "sync_at=every(4, steps, after=N) or halving(..., after=N), with one N."
        )
    if variance_at is not never and not variance[0]:
        if not sync[0]:
            raise ValueError(
                "sync_at does not hold at count 0, where the variance has to be learned: the "
                "replicas must meet at first; write sync_at=every(4, steps, after=N) or "
                "halving(..., after=N), with N of at least 1."
            )
        raise ValueError(
            "variance_at does not hold at count 0: there is no variance to divide by before it is "
            "learned; write growing(until=N)."
        )
    return Plan(int(np.sum(sync | variance)), int(np.sum(sync)), int(np.sum(variance)))
