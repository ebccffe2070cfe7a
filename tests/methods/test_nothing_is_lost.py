"""Parameters, and what drifts, residuals and owners hold of them, follow plain SGD to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import schedules
from jaxcomp.replicas import protocol
from tests.helpers.replicas import history_of, random_tree

SHAPES, RATE, STEPS = {"kernel": (33, 40)}, 0.125, 7
COCKTAIL = jaxcomp.cocktail(0.5, 0.5)
GROUPS = jaxcomp.compose(jaxcomp.random_k(0.25), jaxcomp.group_top_1(8), jaxcomp.quantize(4))
FOUR_BUCKETS = jaxcomp.two_shot(jaxcomp.quantize(4, block=16), bucket_numel=330)


def power_sgd(**options):
    return jaxcomp.power_sgd(2, "replica", **{"warmup_steps": 0} | options)


def cocktail(code, **options):
    return jaxcomp.cocktail_sgd(optax.sgd(RATE), "replica", compressor=code, **options)


def local_steps(exchange):
    code = exchange(jaxcomp.quantize(2, block=8))
    return jaxcomp.local_steps(
        optax.sgd(RATE), "replica", every=2, code=code, outer=optax.sgd(1.0), error_decay=1.0
    )


def zero_one_adam(every=2, precondition=True, step_bound=None, **options):
    """Without momentum and with a variance that stays zero, so that it divides by `eps`."""
    return jaxcomp.zero_one_adam(
        *(RATE, "replica", 0.0),
        eps=1.0,
        compressor=jaxcomp.sign(block=64),
        sync_at=schedules.every(every, STEPS),
        variance_at=schedules.never,
        deviations=jaxcomp.Deviations(precondition=precondition, step_bound=step_bound),
        **options,
    )


WARM = {"warmup_steps": 2, "sync_every": 2}
MEANS = {
    "four buckets": (jaxcomp.compressed_mean(FOUR_BUCKETS, "replica"), 3),
    "power_sgd": (power_sgd(), 4),
    "power_sgd, both sides": (power_sgd(sides="both"), 4),
    "power_sgd after a warm-up": (power_sgd(warmup_steps=2), 4),
}
METHODS = {
    "cocktail": (cocktail(COCKTAIL), 1),
    "cocktail, gathered": (cocktail(jaxcomp.gathered(COCKTAIL)), 3),
    "groups": (cocktail(GROUPS, sync_every=3), 4),
    "noise": (cocktail(jaxcomp.quantize(2, rounding="stochastic")), 3),
    "cocktail after a warm-up": (cocktail(COCKTAIL, **WARM), 4),
    "groups at once": (cocktail(GROUPS, delayed=False, sync_every=3), 4),
    "cocktail at once, after a warm-up": (cocktail(COCKTAIL, delayed=False, **WARM), 4),
    "local steps": (local_steps(jaxcomp.two_shot), 4),
    "local steps, gathered": (local_steps(jaxcomp.gathered), 4),
    "0/1 Adam": (zero_one_adam(precondition=False), 3),
    "0/1 Adam after a warm-up": (
        zero_one_adam(warmup_steps=4, warmup_compressor=jaxcomp.quantize(3)),
        3,
    ),
    # What its bound cuts off moves later.
    "0/1 Adam, bounded": (zero_one_adam(1, step_bound=1.0), 4),
    "0/1 Adam, bounded, by local steps": (zero_one_adam(step_bound=1.0, precondition=False), 4),
}


def held(state):
    """What replicas and owners have not sent or passed on, in the mean over the replicas."""
    owned = jax.tree.leaves([*protocol.fields(state, "owner_residual").values()])
    flat = np.concatenate([np.zeros(0), *(np.ravel(x) for x in owned)])[: 33 * 40]
    return mean_of(protocol.residuals(state)) + (flat.reshape(33, 40) if owned else 0)


def mean_of(trees):
    return sum(np.asarray(x).mean(axis=0) for x in jax.tree.leaves(trees))


def follow(tx, num_replicas, unit=1.0, dtype=np.float64, atol=1e-14):
    """Some steps, in which nothing is lost; the rest is `unit` times what is held."""
    draw = lambda *of: random_tree(*of, shapes=SHAPES, dtype=np.float64)
    gradients = [draw(1 + step, num_replicas) for step in range(STEPS)]
    start = jax.tree.map(lambda x: x.astype(dtype), draw(0))
    history = history_of(tx, start, gradients, num_replicas)
    wanted = np.float64(start["kernel"])
    for grads, (params, state) in zip(gradients, history[1:], strict=True):
        wanted = wanted - RATE * grads["kernel"].mean(axis=0)
        kernel = np.float64(params["kernel"])
        found = kernel + mean_of(protocol.drifts(state)) + unit * held(state)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)
    assert np.abs(kernel - wanted).max() > RATE / 8  # there was something to lose


@pytest.mark.parametrize("name", MEANS | METHODS)
def test_nothing_is_lost(name):
    tx, num_replicas = (MEANS | METHODS)[name]
    with jax.enable_x64(True):
        if name in MEANS:  # which keep gradients, where a method keeps its own steps
            follow(optax.chain(tx, optax.sgd(RATE)), num_replicas, -RATE)
        else:
            follow(tx, num_replicas)


def test_what_a_narrow_consensus_rounds_off_is_not_lost():
    # It is 2**-9 of a parameter, and float32 rounds the sums.
    follow(cocktail(COCKTAIL), 4, dtype=jnp.bfloat16, atol=3e-6)
