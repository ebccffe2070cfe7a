"""Where a method sends all of it exactly, it takes the steps of the optimizer that it came from."""

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.replicas import protocol
from tests.helpers.replicas import history_of, random_tree

# An odd matrix, vectors shorter and longer than the axis, one number, and nothing.
SHAPES = {"bias": (7,), "kernel": (33, 40), "none": (0, 4), "one": (), "scale": (2,)}
RATE, STEPS = 2.0**-7, 5
EXACT = jaxcomp.identity()
ADAM, LAMB, SGD = optax.adam(RATE), optax.lamb(RATE, weight_decay=0.5), optax.sgd(RATE)
CLIPPED = optax.chain(jaxcomp.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.1))


def sharded_optimizer():
    codes = {"gradients": EXACT, "differences": EXACT}
    return jaxcomp.sharded_optimizer(CLIPPED, "replica", **codes)


def slamb(**options):
    return jaxcomp.slamb(RATE, "replica", exact_numel=64, weight_decay=0.5, **options)


# A method, the optimizer, and the replicas; those of slamb have the same gradients if each learns
# the variance of its own.
ROWS = {
    "one_bit_adam until its freeze": (
        jaxcomp.one_bit_adam(RATE, "replica", freeze_step=STEPS),
        ADAM,
        4,
    ),
    "one_bit_lamb until its freeze": (
        jaxcomp.one_bit_lamb(
            *(RATE, "replica"),
            freeze_step=STEPS,
            weight_decay=0.5,
            trust=jaxcomp.TrustRatio(bounds=(1e-6, 1e6)),  # optax's has none
        ),
        LAMB,
        2,
    ),
    "cocktail_sgd in its warm-up": (
        jaxcomp.cocktail_sgd(ADAM, "replica", warmup_steps=STEPS),
        ADAM,
        4,
    ),
    "local_steps that meet in each": (
        jaxcomp.local_steps(SGD, "replica", every=1, code=EXACT, outer=optax.sgd(1.0)),
        SGD,
        4,
    ),
    "sharded_optimizer of one": (sharded_optimizer(), CLIPPED, 1),
    "sharded_optimizer of three": (sharded_optimizer(), CLIPPED, 3),
    "sharded_optimizer of eight": (sharded_optimizer(), CLIPPED, 8),
    "slamb with a mask of everything": (slamb(density=1.0), LAMB, 2),
    "slamb without a mask": (slamb(compressor=EXACT, density=None), LAMB, 2),
    "a mean variance and a mask of everything": (slamb(density=1.0, variance="mean"), LAMB, 4),
    "a mean variance without a mask": (
        slamb(compressor=EXACT, density=None, variance="mean"),
        LAMB,
        2,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_it_is_the_optimizer_on_the_mean_gradient(name):
    tx, optimizer, num_replicas = ROWS[name]
    with jax.enable_x64(True):
        draw = lambda *of: random_tree(*of, shapes=SHAPES, dtype=np.float64)
        # Whole numbers, whose mean is exact.
        gradients = [jax.tree.map(np.round, draw(1 + t, num_replicas)) for t in range(STEPS)]
        if name.startswith("slamb"):
            alike = lambda g: np.repeat(g[:1], num_replicas, 0)
            gradients = [jax.tree.map(alike, grads) for grads in gradients]
        history = history_of(tx, draw(0), gradients, num_replicas)
        wanted = draw(0)
        inner = optimizer.init(wanted)
        for grads, (params, state) in zip(gradients, history[1:], strict=True):
            mean = jax.tree.map(lambda g: g.mean(axis=0), grads)
            updates, inner = optimizer.update(mean, inner, wanted)
            wanted = optax.apply_updates(wanted, updates)
            drift = next(iter(protocol.drifts(state)), dict.fromkeys(SHAPES, np.zeros(1)))
            for k in SHAPES:
                for own in drift[k]:
                    np.testing.assert_allclose(params[k] + own, wanted[k], rtol=0, atol=1e-6)
    assert np.abs(np.asarray(wanted["kernel"]) - draw(0)["kernel"]).max() > RATE
    assert not any(np.any(x) for x in jax.tree.leaves(protocol.residuals(state)))
