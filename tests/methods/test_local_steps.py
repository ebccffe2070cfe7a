"""Local steps: against plain loops in NumPy, and what the state promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import report
from tests.helpers import replicas
from tests.helpers.replicas import everywhere, history_of, mesh_of, one_value, rows, transform

SHAPES = {"bias": (6,), "kernel": (5, 8)}
RATE = 0.125
random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def make(**options):
    return jaxcomp.local_steps(optax.sgd(RATE), "replica", **options)


def gradients(steps, num_replicas=4):
    """Eighths, so that sums are exact in any order."""
    whole = lambda x: np.round(8 * x) / 8
    return [jax.tree.map(whole, random_tree(100 + t, num_replicas)) for t in range(steps)]


def nesterov(rate, momentum):
    """The outer optimizer, in NumPy: `(params, gradient) -> params`."""
    trace = {name: 0.0 for name in SHAPES}

    def step(params, gradient):
        for name, g in gradient.items():
            trace[name] = g + momentum * trace[name]
            params[name] = params[name] - rate * (g + momentum * trace[name])
        return params

    return step


def test_the_mean_of_local_steps_is_federated_averaging():
    start, grads = random_tree(0), gradients(7)
    tx = make(every=3, code=jaxcomp.identity(), outer=optax.sgd(1.0))
    history = history_of(tx, start, grads, 4)
    models = [{name: x.copy() for name, x in start.items()} for _ in range(4)]
    consensus = start
    for step, (grad, (params, state)) in enumerate(zip(grads, history[1:], strict=True), 1):
        for i, model in enumerate(models):
            for name in SHAPES:
                model[name] = model[name] - RATE * grad[name][i]
        if step % 3 == 0:
            consensus = {name: np.mean([m[name] for m in models], axis=0) for name in SHAPES}
            models = [dict(consensus) for _ in range(4)]
        for name in SHAPES:
            np.testing.assert_allclose(one_value(params[name]), consensus[name], atol=1e-6)
            local = np.asarray(params[name]) + np.asarray(state.drift[name])
            np.testing.assert_allclose(local, [m[name] for m in models], atol=1e-6)
    assert {k: int(n) for k, n in history[-1][1].rounds.items()} == {"all": 2, "synchronize": 2}


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_fragments_meet_in_turn_and_are_merged_late(delay, keep):
    """Streaming DiLoCo, as a loop over replicas and fragments."""
    start, grads, offsets = random_tree(0), gradients(9), {"kernel": 0, "bias": 2}
    tx = make(
        every=4,
        code=jaxcomp.identity(),
        fragments=lambda path, leaf: int(path == "bias"),
        delay=delay,
        keep=keep,
    )
    history = history_of(tx, start, grads, 4)
    consensus, outer, on_the_way = dict(start), nesterov(0.7, 0.9), {}
    models = [dict(start) for _ in range(4)]
    for done, (grad, (params, state)) in enumerate(zip(grads, history[1:], strict=True), 1):
        for i, model in enumerate(models):
            for name in SHAPES:
                model[name] = model[name] - RATE * grad[name][i]
        for name, offset in offsets.items():
            if done % 4 == offset:
                own = np.mean([model[name] for model in models], axis=0)
                on_the_way[name, done + delay] = consensus[name] - own
            if (name, done) in on_the_way:
                consensus = outer(consensus, {name: on_the_way.pop((name, done))})
                for model in models:
                    model[name] = keep * model[name] + (1 - keep) * consensus[name]
        for name in SHAPES:
            np.testing.assert_allclose(one_value(params[name]), consensus[name], atol=2e-6)
            local = np.asarray(params[name]) + np.asarray(state.drift[name])
            np.testing.assert_allclose(local, [m[name] for m in models], atol=2e-6)
    counts = {name: int(n) for name, n in history[-1][1].rounds.items()}
    assert counts == {"all": 4, "synchronize_0": 2, "synchronize_1": 2}


def test_a_schedule_says_when_replicas_meet():
    """1, 2, 4 and 6: with a gradient of ones the consensus is where replicas were when they met."""
    every = jaxcomp.schedules.growing(2, longest=2)
    tx = make(every=every, code=jaxcomp.identity(), outer=optax.sgd(1.0))
    start = random_tree(0)
    grads = [{name: np.ones((2, *shape)) for name, shape in SHAPES.items()}] * 7
    history = history_of(tx, start, grads, 2)
    moved = [float((start["bias"] - one_value(params["bias"]))[0] / RATE) for params, _ in history]
    np.testing.assert_allclose(moved, [0, 1, 2, 2, 4, 4, 6, 6], atol=1e-5)
    assert int(history[-1][1].rounds["all"]) == 4


def test_what_was_not_sent_decays():
    code = jaxcomp.gathered(jaxcomp.top_k(0.125, block=8))
    tx = make(every=1, code=code, outer=optax.sgd(1.0), error_decay=0.5)
    grads = [random_tree(1, 2), jax.tree.map(np.zeros_like, random_tree(1, 2))]
    (_, _), (_, first), (_, second) = history_of(tx, random_tree(0), grads, 2)
    for name in SHAPES:
        before, after = (np.asarray(state.residual[name]) for state in (first, second))
        is_sent = after == 0
        np.testing.assert_array_equal(after, np.where(is_sent, 0, before / 2))
        assert 0 < np.sum(is_sent & (before != 0)) < before.size


def test_a_mean_of_senders_divides_by_those_that_sent_an_entry():
    drifts = np.zeros((4, 5, 8), np.float32)
    drifts[0, 0, 0], drifts[:2, 1, 1], drifts[:, 2, 2] = -8, (-8, -4), -2
    means = {}
    for mean in (jaxcomp.gathered, jaxcomp.from_senders):
        tx = jaxcomp.local_steps(
            optax.sgd(1.0), "replica", every=1, outer=optax.sgd(1.0),
            code=mean(jaxcomp.top_k(0.125, block=8)),
        )  # fmt: skip
        params, _ = history_of(tx, {"w": np.zeros((5, 8), np.float32)}, [{"w": -drifts}], 4)[-1]
        means[mean] = one_value(params["w"])
    wanted = np.zeros((5, 8))
    wanted[0, 0], wanted[1, 1], wanted[2, 2] = -8, -6, -2
    np.testing.assert_array_equal(means[jaxcomp.from_senders], wanted)
    np.testing.assert_array_equal(means[jaxcomp.gathered], drifts.mean(axis=0))


def test_coded_differences_converge_where_coded_weights_stand_still():
    """Counterexample 4.1 of SDP4Bit, at a rate below 1/8 and by signs or zero."""
    ternary = jaxcomp.quantize(2, block=2)
    tx = jaxcomp.local_steps(optax.sgd(0.1), "replica", every=1, code=ternary,
                             outer=optax.sgd(1.0))  # fmt: skip
    mesh = mesh_of(1)
    params = everywhere(mesh, {"w": np.array([1.0, -1.0], np.float32)})
    init, update = transform(tx, mesh, params)
    state, weights = init(params), np.array([1.0, -1.0])
    rng = np.random.default_rng(0)
    for _ in range(200):
        chosen = np.eye(2)[rng.integers(2)]
        local = np.asarray(params["w"]) + np.asarray(state.drift["w"][0])
        grads = {"w": (4 * chosen * local)[None].astype(np.float32)}
        updates, state = update(rows(mesh, grads), state, params)
        params = optax.apply_updates(params, updates)
        moved = (weights - 0.1 * 4 * chosen * weights).astype(np.float32)
        weights = np.asarray(jaxcomp.transmit(ternary, jnp.asarray(moved)).decoded)
    np.testing.assert_array_equal(np.abs(weights), 1.0)
    assert np.abs(np.asarray(params["w"])).max() < 1e-6


def test_a_replica_whose_gradient_fails_stands_still_and_the_others_go_on():
    tx = make(every=2, code=jaxcomp.identity(), outer=optax.sgd(1.0))
    grads = gradients(2)
    grads[0]["kernel"][1, 0, 0] = np.nan
    params, state = history_of(tx, random_tree(0), grads, 4)[-1]
    assert np.asarray(state.skipped).tolist() == [0, 1, 0, 0]
    moved = [grads[0]["bias"][i] * (i != 1) + grads[1]["bias"][i] for i in range(4)]
    wanted = random_tree(0)["bias"] - RATE * np.mean(moved, axis=0)
    np.testing.assert_allclose(one_value(params["bias"]), wanted, atol=1e-6)


def test_an_outer_state_in_shards_of_owners_is_the_whole_ones():
    """The outer optimizer averages by itself, only in outer steps."""
    momentum, exact = optax.sgd(0.7, momentum=0.9, nesterov=True), lambda path, leaf: True
    owners = jaxcomp.sharded_optimizer(momentum, "replica", exact=exact)
    apart = make(every=2, outer=owners, code=None)
    whole = make(every=2, outer=momentum, code=jaxcomp.identity())
    start, grads = random_tree(0), gradients(5)
    histories = [history_of(tx, start, grads, 4) for tx in (apart, whole)]
    for (params, _), (wanted, _) in zip(*histories, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(one_value(params[name]), one_value(wanted[name]), atol=2e-6)
    pieces = [x.shape for x in jax.tree.leaves(histories[0][-1][1].outer[0].owned)]
    assert sorted(pieces) == [(4, 1, 10), (4, 2)]  # of 40 and 6 elements
    mesh = mesh_of(4)
    init, update = transform(apart, mesh, start)
    program = update.lower(rows(mesh, grads[0]), init(start), start).compile()
    sent = report.sent_bytes_by_part(program, mesh, "replica")
    assert sent["synchronize"] > 4 * 46 and sent.get("", 0) < 64


def test_an_outer_optimizer_gets_the_loss():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = make(every=1, outer=plateau, code=jaxcomp.identity())

    def scale(grads):
        state = tx.init(grads)
        for _ in range(2):
            _, state = tx.update(grads, state, grads, value=jnp.ones([]))
        return replicas.state_of(state.outer, "scale")

    scales = jax.jit(jax.vmap(scale, axis_name="replica"))(jnp.ones([2, 6]))
    assert scales.tolist() == [0.5, 0.5]
