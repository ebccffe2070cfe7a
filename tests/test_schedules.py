"""Schedules: which steps, in closed form, and what they add up to."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import schedules


def counts(schedule, steps):
    """Numbers of the steps that a schedule picks; the first step is number 1."""
    return (np.flatnonzero(np.asarray(schedule(jnp.arange(steps)))) + 1).tolist()


@pytest.mark.parametrize("kappa", [1, 3, 16])
def test_growing_doubles_its_distance_after_every_kappa_updates(kappa):
    wanted, step = [], 0
    for update in range(200):
        step += 2 ** (update // kappa)
        if step > 5000:
            break
        wanted.append(step)
    assert counts(schedules.growing(kappa), 5000) == wanted


def test_growing_stays_at_its_longest_distance():
    assert counts(schedules.growing(2, longest=4), 22) == [1, 2, 4, 6, 10, 14, 18, 22]
    assert repr(schedules.growing(2, longest=4)) == "growing(kappa=2, longest=4)"
    with pytest.raises(ValueError, match="longest=3; needs a power of two"):
        schedules.growing(longest=3)


def test_growing_is_the_papers_at_kappa_16():
    # 16 at each of the distances 1 to 256, then 8 at 512: 152 in the first 12,500 steps.
    assert len(counts(schedules.growing(16), 12_500)) == 152
    assert counts(schedules.growing(16, until=48), 100)[-2:] == [46, 48]


def test_doubling_picks_powers_of_two():
    assert counts(schedules.doubling, 100) == [1, 2, 4, 8, 16, 32, 64]


def test_halving_follows_the_rate_that_is_used():
    steps = 400
    rate = optax.join_schedules(
        [optax.linear_schedule(0.0, 1.0, 100), optax.piecewise_constant_schedule(1.0, {100: 0.5})],
        [100],
    )
    found = counts(schedules.halving(rate, steps, longest=16), steps)
    halved = int(np.argmax(np.asarray(jax.vmap(rate)(jnp.arange(steps)))[100:] < 1)) + 101
    assert halved > 190
    assert found == [*range(1, halved), *(n for n in range(halved, 401) if n % 2 == 0)]


def test_halving_is_clipped_and_ends_together():
    rate = optax.exponential_decay(1.0, 10, 0.5)
    found = counts(schedules.halving(rate, 203, longest=4), 203)
    assert found[-3:] == [196, 200, 203]
    assert max(np.diff(found)) == 4


def test_halving_waits_for_the_variance():
    rate = optax.exponential_decay(1.0, 10, 0.5)
    found = counts(schedules.halving(rate, 100, after=50), 100)
    assert found[:50] == list(range(1, 51)) and len(found) < 60


def test_every_waits_and_ends_together():
    wanted = [*range(1, 11), 12, 16, 20, 24, 27]
    assert counts(schedules.every(4, 27, after=10), 27) == wanted
    assert counts(schedules.every(1, 5), 5) == [1, 2, 3, 4, 5]


def test_both_are_the_steps_of_both():
    found = counts(schedules.both(schedules.growing(1), schedules.every(3, 40)), 40)
    assert found == [n for n in (1, 3, 7, 15, 31) if n % 3 == 0]


def test_a_constant_rate_synchronizes_always():
    assert counts(schedules.halving(1e-3, 30), 30) == list(range(1, 31))


def test_the_plan_counts_what_happens():
    variance = schedules.growing(16, until=100)
    sync = schedules.halving(optax.exponential_decay(1.0, 50, 0.5), 1000, after=100)
    plan = schedules.plan(sync, variance, 1000)
    assert plan.variance_updates == len(counts(variance, 1000))
    assert plan.synchronizations == plan.rounds == len(counts(sync, 1000)) < 250


def test_a_variance_learned_while_replicas_are_apart_is_refused():
    sync = schedules.halving(optax.exponential_decay(1.0, 10, 0.5), 100)
    with pytest.raises(ValueError, match="variance_at holds at count"):
        schedules.plan(sync, schedules.always, 100)


def test_a_variance_that_is_not_learned_at_first_is_refused():
    with pytest.raises(ValueError, match="variance_at does not hold at count 0"):
        schedules.plan(schedules.always, lambda count: count > 3, 100)
    assert schedules.plan(schedules.always, schedules.never, 100).variance_updates == 0


def test_what_the_refusals_of_every_say_to_write_is_accepted():
    default = lambda sync_at: schedules.both(schedules.growing(), sync_at)
    every = schedules.every(4, 100)
    with pytest.raises(ValueError, match=r"sync_at does not hold at count 0.*every\(4, steps, aft"):
        schedules.plan(every, default(every), 100)
    with pytest.raises(
        ValueError, match=r"count 0, where.*growing\(until=N\).*every\(4, steps, aft"
    ):
        schedules.plan(every, schedules.growing(until=10), 100)
    for after in (1, 10):
        sync_at = schedules.every(4, 100, after=after)
        assert schedules.plan(sync_at, default(sync_at), 100).variance_updates >= after
        assert (
            schedules.plan(sync_at, schedules.growing(until=after), 100).variance_updates == after
        )


def test_schedules_are_traced_without_a_table():
    sync = jax.jit(schedules.halving(optax.cosine_decay_schedule(1.0, 1000), 1000))
    assert bool(sync(jnp.int32(999))) and not bool(sync(jnp.int32(995)))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: schedules.growing(0), "kappa=0"),
        (lambda: schedules.growing(until=0), "until=0"),
        (lambda: schedules.every(0, 10), "interval=0"),
        (lambda: schedules.every(4, 0), "steps=0"),
        (lambda: schedules.halving(1.0, 10, longest=12), "longest=12"),
        (lambda: schedules.halving(1.0, 0), "steps=0"),
    ],
)
def test_wrong_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_by_rate_has_equal_sums_of_the_rate_between_its_steps():
    steps, every = 4000, 32
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.01, 400, steps, 0.0)
    found = counts(schedules.by_rate(rate, steps, every), steps)
    sums = np.cumsum(np.asarray(jax.vmap(rate)(jnp.arange(steps)), np.float64))
    moved = np.diff(sums[np.array(found) - 1], prepend=0)
    # A step is the least: sums miss their share by no more than a step's rate at each end.
    np.testing.assert_allclose(moved[:-1], sums[-1] * every / steps, atol=0.01)
    assert len(found) in (steps // every, steps // every + 1) and found[-1] == steps
    assert np.diff(found).min() < every / 2 + 2 < np.diff(found)[-4]


@pytest.mark.parametrize("every", [1, 4, 20])
def test_by_rate_of_a_constant_rate_is_every(every):
    by_rate, equal = schedules.by_rate(0.1, 100, every), schedules.every(every, 100)
    assert counts(by_rate, 100) == counts(equal, 100)


def test_by_rate_says_what_it_needs():
    with pytest.raises(ValueError, match="every=0; needs at least 1"):
        schedules.by_rate(0.1, 100, 0)
    with pytest.raises(ValueError, match="zero in all 10 steps"):
        schedules.by_rate(0.0, 10, 2)(jnp.arange(3))


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(schedules.every, 2.5, 100),
        functools.partial(schedules.every, 4, 62.5),  # without a last step
        functools.partial(schedules.growing, 2.5),
        functools.partial(schedules.halving, 0.1, 62.5),
        functools.partial(schedules.by_rate, 0.1, 62.5, 4),
    ],
)
def test_parts_of_steps_are_refused(make):
    with pytest.raises(ValueError, match=r"2\.5.*; needs at least 1"):
        make()


@pytest.mark.parametrize("rate", [float("nan"), None, "1e-3"])
def test_a_rate_that_is_no_number_is_refused(rate):
    for make in (schedules.halving, functools.partial(schedules.by_rate, every=4)):
        with pytest.raises(ValueError, match="a finite number or a schedule"):
            make(rate, 100)


def test_integers_may_be_numpys():
    two, ten = np.int64(2), np.int32(10)
    assert counts(schedules.every(two, ten), 10) == [2, 4, 6, 8, 10]
    assert counts(schedules.growing(two, longest=two), 8) == [1, 2, 4, 6, 8]
    assert jaxcomp.quantize(4, block=np.int64(8)).bits_per_parameter == 6.0


def test_a_program_may_forbid_transfers_between_host_and_device():
    rate = optax.cosine_decay_schedule(1e-3, 64)
    count = jax.device_put(jnp.arange(64))
    with jax.transfer_guard("disallow"):
        for sync_at in (schedules.halving(rate, 64), schedules.by_rate(rate, 64, every=4)):
            assert jax.jit(sync_at)(count).any()
        assert schedules.plan(schedules.always, schedules.never, 64).rounds == 64
