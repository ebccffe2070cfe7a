"""Momenta that replicas average before the last step of each interval."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers.replicas import (
    PARAMS,
    everywhere,
    history_of,
    mesh_of,
    random_tree,
    rows,
    state_of,
    transform,
)

REPLICAS = 4
SHAPES = {name: x.shape for name, x in PARAMS.items()}
# The momentum's field in optax's state, its decay, and the factor of a gradient in it.
MOMENTA = {
    "mu": (optax.adam(0.1), 0.9, 0.1),
    "trace": (optax.sgd(0.1, momentum=0.5), 0.5, 1.0),
}


def gradients(step):
    return random_tree(step, REPLICAS, shapes=SHAPES)


def local_steps(inner, every=2, code=None, **options):
    code = jaxcomp.identity() if code is None else code
    inner = jaxcomp.mean_momentum(inner, "replica", code=code)
    return jaxcomp.local_steps(inner, "replica", every=every, outer=optax.sgd(1.0), **options)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("field", MOMENTA)
def test_momenta_are_averaged_before_the_last_step_of_an_interval(field, every):
    inner, decay, factor = MOMENTA[field]
    history = history_of(local_steps(inner, every), PARAMS, map(gradients, range(5)), REPLICAS)
    wanted = {name: np.zeros((REPLICAS, *shape)) for name, shape in SHAPES.items()}
    for step, (_, state) in enumerate(history[1:]):
        for name, grads in gradients(step).items():
            old = wanted[name]
            if (step + 1) % every == 0:
                old = np.broadcast_to(old.mean(0), old.shape)
            wanted[name] = decay * old + factor * grads
            found = state_of(state, field)[name]
            np.testing.assert_allclose(found, wanted[name], rtol=1e-5, atol=1e-6)


def test_second_moments_stay_local():
    plain = jaxcomp.local_steps(optax.adam(0.1), "replica", every=2)
    found, wanted = (
        state_of(history_of(tx, PARAMS, map(gradients, range(3)), REPLICAS)[-1][1], "nu")
        for tx in (local_steps(optax.adam(0.1)), plain)
    )
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_momentum_in_sixteen_bits_keeps_its_type_and_moves():
    inner = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    history = history_of(local_steps(inner), PARAMS, map(gradients, range(2)), REPLICAS)
    before, after = (state_of(state, "mu")["kernel"] for _, state in history[1:])
    assert before.dtype == after.dtype == jnp.bfloat16
    own = np.asarray(after, np.float32) - 0.1 * gradients(1)["kernel"]
    wanted = 0.9 * np.asarray(before, np.float32).mean(0)
    np.testing.assert_allclose(own, np.broadcast_to(wanted, own.shape), atol=0.01)


def test_a_gradient_that_is_not_finite_reaches_no_other_momentum():
    def grads(step):
        made = gradients(step)
        made["kernel"][0, 0, 0] = np.nan if step == 1 else 1.0
        return made

    history = history_of(local_steps(optax.adam(0.1)), PARAMS, map(grads, range(4)), REPLICAS)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(history))
    before, after = (np.asarray(state_of(state, "mu")["kernel"]) for _, state in history[1:3])
    np.testing.assert_array_equal(after[0], before[0])  # of the replica that stands still
    others = 0.9 * before.mean(0) + 0.1 * grads(1)["kernel"]
    np.testing.assert_allclose(after[1:], others[1:], rtol=1e-5, atol=1e-6)


def test_it_sends_its_code_with_each_exchange():
    mesh, code = mesh_of(2), jaxcomp.quantize(4, block=8)
    params = everywhere(mesh, PARAMS)

    def sent(tx):
        init, update = transform(tx, mesh, params)
        grads = random_tree(0, 2, shapes=SHAPES)
        program = update.lower(rows(mesh, grads), init(params), params).compile()
        return jaxcomp.report.sent_bytes_by_part(program, mesh, "replica")

    drifts = sent(jaxcomp.local_steps(optax.adam(0.1), "replica", every=3, code=code))
    both = sent(local_steps(optax.adam(0.1), 3, code))
    assert both["synchronize"] == 2 * drifts["synchronize"] > 0
    assert both[""] == drifts[""]


def test_it_sits_beside_other_optimizers_in_a_partition():
    labels = {"bias": "adam", "kernel": "sgd"}
    alone = optax.partition({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1)}, labels)
    history = history_of(local_steps(alone), PARAMS, map(gradients, range(2)), REPLICAS)
    momenta = jax.tree.leaves(state_of(history[-1][1], "mu"))
    wanted = 0.09 * gradients(0)["bias"].mean(0) + 0.1 * gradients(1)["bias"]
    np.testing.assert_allclose(*momenta, wanted, rtol=1e-5, atol=1e-6)


def test_errors():
    tx = jaxcomp.mean_momentum(optax.adam(0.1), "replica")
    with pytest.raises(ValueError, match=r"write local_steps\(mean_momentum"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    run = functools.partial(history_of, params=PARAMS, num_replicas=2)
    with pytest.raises(ValueError, match="found no momentum `mu` or `trace`"):
        run(local_steps(optax.sgd(0.1)), gradients=[random_tree(0, 2, shapes=SHAPES)])
