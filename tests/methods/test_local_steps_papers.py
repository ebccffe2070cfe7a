"""What papers found of local steps, on sums of squares: replicas with other data, or with noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp

REPLICAS, SIZE, EVERY, MEETINGS = 4, 256, 4, 60


def trained(targets, code, outer):
    """Parameters and state after the last outer step, and half an interval later."""
    code = jaxcomp.gathered(code)
    tx = jaxcomp.local_steps(optax.sgd(0.2), "replica", every=EVERY, code=code, outer=outer)
    loss_fn = lambda params, batch: 0.5 * jnp.sum((params - batch[0]) ** 2)
    init, step = jaxcomp.simulated_train_step(loss_fn, tx, REPLICAS, "replica")
    one = lambda carry, batch: (step(*carry, batch)[:2], None)
    scan = jax.jit(lambda carry, batches: jax.lax.scan(one, carry, batches)[0])
    params = jnp.zeros(SIZE)
    met = scan((params, init(params)), targets[: -EVERY // 2])
    return met, scan(met, targets[-EVERY // 2 :])


@functools.cache
def distance(code):
    """Of the consensus from the optimum, of replicas that each have another one."""
    own = np.random.default_rng(0).laplace(size=(REPLICAS, SIZE)).astype(np.float32)
    targets = jnp.broadcast_to(own, (EVERY * MEETINGS + EVERY // 2, *own.shape))
    (params, _), _ = trained(targets, code, optax.sgd(1.0))
    return np.linalg.norm(params - own.mean(axis=0)) / np.linalg.norm(own.mean(axis=0))


@pytest.mark.parametrize(("bits", "times"), [(2, 1.7), (4, 4)])
def test_zeros_for_small_values_without_feedback_are_worse_than_few_bits(bits, times):
    """Figure 11 of Streaming DiLoCo. The values alone have as many bits; positions come on top."""
    few_bits = {2: jaxcomp.bin_means(2, block=64), 4: jaxcomp.quantize(4, block=64)}[bits]
    assert distance(jaxcomp.top_k(bits / 32, block=SIZE)) > times * distance(few_bits)


def test_the_consensus_has_a_lower_loss_than_the_mean_of_replicas_and_that_than_each_of_them():
    """Table 3 of Streaming DiLoCo: 2.67, 2.68 and 2.77."""
    shape = EVERY * MEETINGS + EVERY // 2, REPLICAS, SIZE
    noise = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    (params, _), (_, state) = trained(noise, jaxcomp.identity(), optax.sgd(0.7))
    mean = np.asarray(params + state.drift.mean(axis=0))
    each = [np.sum(np.square(params + drift)) for drift in state.drift]
    assert 1.1 * np.sum(np.square(params)) < np.sum(np.square(mean)) < min(each) / 2
