"""0/1 Adam's variance: how much one gradient makes of it, and where that leads in long runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcomp
from jaxcomp import schedules
from jaxcomp.methods.zero_one_adam import aged


def shares_of(b2, gaps):
    """What each gradient is of the variance in the end, learned so many steps after the last."""
    shares, weight = np.zeros(len(gaps)), jnp.float64(0.0)
    for j, gap in enumerate(gaps):
        keeps, weight = aged(b2, jnp.int32(gap), weight)
        shares[: j + 1] *= float(keeps)
        shares[j] = 1 - float(keeps)
    np.testing.assert_allclose(shares.sum(), float(weight), rtol=1e-9)
    return shares / shares.sum()


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 2**20), min_size=1, max_size=60),
    st.sampled_from([0.5, 0.9, 0.99, 0.999, 0.9999]),
)
def test_no_gradient_is_more_than_an_eighth_of_a_variance_or_than_in_adam(gaps, b2):
    with jax.enable_x64(True):
        for learned in range(1, len(gaps) + 1, 7):
            shares = shares_of(b2, gaps[:learned])
            adams = (1 - b2) / (1 - b2 ** np.arange(1, learned + 1))
            assert np.all(shares <= np.maximum(1 / 8, adams) * (1 + 1e-9))


@pytest.mark.parametrize("b2", [0.9, 0.999])
def test_a_variance_that_is_learned_in_every_step_is_adams(b2):
    with jax.enable_x64(True):
        wanted = b2 ** np.arange(50)[::-1] * (1 - b2) / (1 - b2**50)
        np.testing.assert_allclose(shares_of(b2, [1] * 50), wanted, rtol=1e-9)


def test_a_gradient_counts_for_the_steps_since_the_one_before():
    with jax.enable_x64(True):
        # In steps number 1 to 200, then 203 and 205: under an eighth nothing is bounded.
        shares = shares_of(0.99, [1] * 200 + [3, 2])
    wanted = np.array([0.99 ** (204 - i) * 0.01 for i in range(200)] + [0, 0])
    wanted[200:] = 0.99**2 * (1 - 0.99**3), 1 - 0.99**2
    np.testing.assert_allclose(shares, wanted / wanted.sum(), rtol=1e-9)


def trained(tx, gradient_of, start, steps, num_replicas=2):
    """Parameters and state after steps under one scan, the replicas under `jax.vmap`.

    `gradient_of(local, step, replica)` is a replica's own.
    """
    tx = jaxcomp.per_replica(tx, "replica")
    replicas = lambda f, axes: jax.vmap(
        f, in_axes=axes, axis_name="replica", axis_size=num_replicas
    )

    def one(params, state, step):
        local = jaxcomp.local_params(params, state, "replica")
        grads = gradient_of(local, step, jax.lax.axis_index("replica"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = lambda carry, count: (replicas(one, (0, 0, None))(*carry, count), None)
    alike = jnp.broadcast_to(start, (num_replicas, *start.shape))
    state = jax.jit(replicas(tx.init, 0))(alike)
    (params, state), _ = jax.jit(lambda *of: jax.lax.scan(step, *of))(
        (alike, state), jnp.arange(steps)
    )
    return params[0], jax.tree.map(lambda x: x[0], state)


def test_the_state_holds_no_single_gradient_after_many_steps(optimized):
    steps = 20_000
    due = np.flatnonzero(schedules.growing()(jnp.arange(steps)))
    place = jnp.searchsorted(jnp.asarray(due), jnp.arange(steps))
    # The n-th gradient that the variance learns from is the only one at place n.
    gradient_of = lambda local, step, _: jnp.zeros_like(local).at[place[step]].set(1.0)
    tx = jaxcomp.zero_one_adam(1e-3, "replica")
    _, state = trained(tx, gradient_of, jnp.zeros(due.size), steps)
    assert int(state.rounds["variance"]) == due.size and int(state.variance_steps) == due[-1] + 1
    shares = np.asarray(state.variance / state.variance_weight)
    np.testing.assert_allclose(shares.sum(), 1, rtol=1e-4)
    assert 0.1 < shares[-1] == shares.max() < 0.126


def test_as_it_comes_it_stays_beside_adam_for_200_000_steps(optimized):
    # A quadratic with noise as large as a start of 1: Adam's loss ends where noise holds it.
    def gradient_of(local, step, replica):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), replica)
        return local + jax.random.normal(key, local.shape)

    dense = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    txs = jaxcomp.zero_one_adam(1e-3, "replica"), optax.chain(dense, optax.adam(1e-3))
    start = jnp.full(256, 0.5)
    losses = [np.mean(np.square(trained(tx, gradient_of, start, 200_000)[0])) for tx in txs]
    assert losses[0] < 1.2 * losses[1]


@pytest.mark.parametrize("precondition", [True, False])
def test_the_momentum_of_an_interval_is_not_that_of_a_newer_root(precondition):
    # Gradients grow tenfold after the first; without decay of the momentum it is the gradient,
    # also where the replicas meet and learn a far larger variance than that of the steps before.
    learns = lambda count: (count == 0) | (count == 5)
    tx = jaxcomp.zero_one_adam(
        *(1e-3, "replica", 0.0),
        sync_at=lambda count: (count == 0) | (count % 3 == 2),
        variance_at=learns,
        compressor=jaxcomp.identity(),
        # These gradients are far larger than the root of the first.
        deviations=jaxcomp.Deviations(precondition=precondition, step_bound=None),
    )
    gradient_of = lambda local, step, _: jnp.where(step == 0, 1.0, 10.0) * jnp.ones_like(local)
    with jax.enable_x64(True):
        start = jnp.zeros(5)
        before, _ = trained(tx, gradient_of, start, 3)
        params, state = trained(tx, gradient_of, start, 6)
    np.testing.assert_allclose(state.momentum, 10.0, rtol=1e-9)
    # Two steps of the interval were made at the old root, the last at the new one.
    roots = 1.0, float(np.sqrt(state.variance / state.variance_weight)[0])
    assert roots[1] > 5
    moved = -1e-3 * 10 * (2 / roots[0] + 1 / roots[1])
    np.testing.assert_allclose(params - before, moved, rtol=1e-6)
