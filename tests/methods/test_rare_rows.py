"""Rows of embeddings: the mean of local steps moves them as dense Adam does."""

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.replicas import everywhere, history_of, mesh_of, state_of, transform
from tests.helpers.replicas import rows as rows_of

REPLICAS, RATE, STEPS = 4, 0.25, 6
PARAMS = {"embed": np.zeros((5, 8), np.float32), "kernel": np.zeros((3, 8), np.float32)}
# Rows: a token that one replica sees, one that all see, and one with the same gradient on all.
ONE, ALL, SAME = 0, 1, 2


def adam():
    return optax.adam(RATE, b2=0.95, eps=0.0, eps_root=1e-30)


def averaged(inner, **options):
    """Every step's mean, without a code."""
    return jaxcomp.local_steps(
        inner, "replica", every=1, code=jaxcomp.identity(), outer=optax.sgd(1.0), **options
    )


def rare(inner=None, **options):
    return jaxcomp.rare_rows(inner or adam(), "replica", **options)


def gradients(step):
    """Powers of two, so that sums are exact; one entry of a row, so that its sketch is.

    All replicas see the second token, one of them in turn with the other sign: the square of their
    mean is a quarter of each one's square, as for independent gradients in expectation.
    """
    grads = {name: np.zeros((REPLICAS, *x.shape), np.float32) for name, x in PARAMS.items()}
    grads["embed"][1, ONE, 3] = 4.0 * (step % 3 == 0)
    grads["embed"][:, ALL, 0] = 1.0
    grads["embed"][step % REPLICAS, ALL, 0] = -1.0
    grads["embed"][:, SAME, 5] = 0.5 * (step % 2)
    grads["kernel"][:] = np.random.default_rng(step).normal(size=grads["kernel"].shape)
    return grads


def last(tx, steps=STEPS):
    history = history_of(tx, PARAMS, map(gradients, range(steps)), REPLICAS)
    return jax.tree.map(np.asarray, history[-1][0])


def dense():
    return optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), adam())


def test_tokens_move_as_in_dense_training_however_many_replicas_have_seen_them():
    wanted, got, local = last(dense()), last(averaged(rare())), last(averaged(adam()))
    np.testing.assert_allclose(got["embed"], wanted["embed"], rtol=1e-5)
    np.testing.assert_allclose(local["embed"][ONE], wanted["embed"][ONE] / REPLICAS, rtol=1e-5)
    np.testing.assert_allclose(local["embed"][ALL], wanted["embed"][ALL] / 2, rtol=1e-5)
    np.testing.assert_allclose(local["embed"][SAME], wanted["embed"][SAME], rtol=1e-5)
    np.testing.assert_array_equal(got["kernel"], local["kernel"])


def test_a_single_replica_takes_its_optimizers_steps():
    one = lambda step: jax.tree.map(lambda g: g[:1], gradients(step))
    of = lambda inner: history_of(averaged(inner), PARAMS, map(one, range(3)), 1)[-1][0]
    jax.tree.map(np.testing.assert_array_equal, of(rare()), of(adam()))


def test_codes_move_the_mean_of_the_replicas_as_no_code_does():
    def mean(code):
        tx = jaxcomp.cocktail_sgd(rare(), "replica", compressor=jaxcomp.gathered(code))
        params, state = history_of(tx, PARAMS, map(gradients, range(STEPS)), REPLICAS)[-1]
        return jax.tree.map(lambda p, d: np.asarray(p + d.mean(0)), params, state.drift)

    exact, coded = mean(jaxcomp.identity()), mean(jaxcomp.top_k(0.25))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), exact, coded)


def test_rows_count_as_seen_by_all_until_replicas_exchanged_and_then_as_at_the_last_exchange():
    tx = jaxcomp.local_steps(rare(), "replica", every=2, code=jaxcomp.identity())
    history = history_of(tx, PARAMS, map(gradients, range(3)), REPLICAS)
    shared = [state_of(state, "shared")["embed"] for _, state in history]
    assert np.all(shared[1] == -1)
    drift = np.asarray(history[1][1].drift["embed"])
    np.testing.assert_allclose(np.abs(drift[:, ALL, 0]), 2 * RATE, rtol=1e-5)
    np.testing.assert_allclose(np.abs(drift[1, ONE, 3]), 2 * RATE, rtol=1e-5)
    np.testing.assert_array_equal(shared[2], shared[3])
    assert shared[2][0, ONE] > 0 and shared[2][1, ONE] == 0


def test_sketches_give_the_second_moment_of_the_mean_gradient():
    params = {"embed": np.zeros((2048, 8), np.float32)}
    draw = np.random.default_rng(0)
    common, own = draw.normal(size=(STEPS, 1, 2048, 8)), draw.normal(size=(STEPS, 4, 2048, 8))
    grads = (common + own).astype(np.float32)
    history = history_of(averaged(rare()), params, ({"embed": g} for g in grads), REPLICAS)
    got = np.asarray(state_of(history[-1][1], "shared")["embed"])
    weights = 0.05 * 0.95 ** np.arange(STEPS)[::-1]
    wanted = np.tensordot(weights, np.mean(grads.mean(1) ** 2, -1), 1)
    np.testing.assert_allclose(got, np.broadcast_to(got[0], got.shape), rtol=1e-5)
    # The mean of 2,048 squares of normal numbers is known to sqrt(2 / 2048) = 3%.
    np.testing.assert_allclose(got[0].mean(), wanted.mean(), rtol=0.1)
    of_independent = weights.sum() * 2 / REPLICAS
    assert got[0].mean() > 2 * of_independent


def test_what_others_saw_is_remembered_by_those_who_did_not():
    history = history_of(averaged(rare()), PARAMS, map(gradients, range(3)), REPLICAS)
    # One of four replicas has a gradient of 4 in one of 8 entries, in the first step alone.
    wanted = 0.05 * (4 / REPLICAS) ** 2 / 8 * 0.95**2
    np.testing.assert_allclose(state_of(history[-1][1], "shared")["embed"][:, ONE], wanted, 1e-5)


def test_what_stands_before_adam_scales_its_moments_as_it_does_the_gradients():
    of = lambda inner: state_of(
        history_of(averaged(rare(inner)), PARAMS, [gradients(0)], REPLICAS)[-1][1], "shared"
    )["embed"]
    half = of(optax.chain(optax.scale(0.5), adam()))
    np.testing.assert_allclose(half, np.asarray(of(adam())) / 4, rtol=1e-5)


def test_rows_that_nobody_has_seen_decay_as_in_dense_training():
    inner = optax.adamw(RATE, b2=0.95, weight_decay=0.5)
    params = jax.tree.map(np.ones_like, PARAMS)
    got = history_of(averaged(rare(inner)), params, map(gradients, range(2)), REPLICAS)[-1][0]
    np.testing.assert_allclose(got["embed"][SAME + 1 :], (1 - RATE * 0.5) ** 2, rtol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_dense_steps_of_a_warm_up_are_not_scaled(every):
    options = {"warmup_steps": 2, "sync_every": every, "compressor": jaxcomp.identity()}
    of = lambda inner: last(jaxcomp.cocktail_sgd(inner, "replica", **options), 2)
    jax.tree.map(np.testing.assert_array_equal, of(rare()), of(adam()))


def test_a_gradient_that_is_not_finite_spoils_no_row_of_the_others():
    def grads(step):
        made = gradients(step)
        made["embed"][0, ALL, 0] = np.nan if step == 1 else 1.0
        return made

    history = history_of(averaged(rare()), PARAMS, map(grads, range(3)), REPLICAS)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(history))
    np.testing.assert_array_equal(history[-1][1].skipped, [1, 0, 0, 0])
    assert history[2][0]["embed"][ALL, 0] != history[1][0]["embed"][ALL, 0]


@pytest.mark.parametrize("every", [1, 3])
def test_it_sends_one_float_a_row_with_each_exchange(every):
    mesh = mesh_of(REPLICAS)
    params = everywhere(mesh, PARAMS)

    def sent(inner):
        tx = jaxcomp.local_steps(inner, "replica", every=every)
        init, update = transform(tx, mesh, params)
        program = update.lower(rows_of(mesh, gradients(0)), init(params), params).compile()
        return jaxcomp.report.sent_bytes_by_part(program, mesh, "replica")

    more = sent(rare())["synchronize"] - sent(adam())["synchronize"]
    assert more == 2 * (REPLICAS - 1) / REPLICAS * 4 * len(PARAMS["embed"])
    assert sent(rare())[""] == 0


def test_another_number_of_replicas_goes_on_with_the_mean():
    _, state = history_of(averaged(rare()), PARAMS, map(gradients, range(2)), REPLICAS)[-1]
    init, _ = transform(averaged(rare()), mesh_of(2), PARAMS)
    resized = jaxcomp.resize(jax.tree.map(np.asarray, state), jax.eval_shape(init, PARAMS))
    shared = np.asarray(state_of(state, "shared")["embed"])
    np.testing.assert_allclose(state_of(resized, "shared")["embed"][0], shared.mean(0), rtol=1e-6)


def test_other_leaves_can_be_named():
    tx = averaged(rare(rows=lambda path, leaf: path == "kernel"))
    state = history_of(tx, PARAMS, [gradients(0)], REPLICAS)[-1][1]
    shared = state_of(state, "shared")
    assert shared["embed"] is None and shared["kernel"].shape == (REPLICAS, 3)


def test_it_sits_beside_other_optimizers_in_a_partition():
    labels = {"embed": "adam", "kernel": "sgd"}
    inner = lambda one: optax.partition({"adam": one, "sgd": optax.sgd(1.0)}, labels)
    np.testing.assert_array_equal(
        last(averaged(inner(rare())))["embed"], last(averaged(rare(inner(adam()))))["embed"]
    )


def test_errors():
    tx = rare()
    with pytest.raises(ValueError, match=r"write cocktail_sgd\(rare_rows"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"found 0 second moments .* 'embed'"):
        last(averaged(rare(optax.sgd(1.0))), 1)
