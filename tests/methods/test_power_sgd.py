"""PowerSGD: torch's own steps, what error feedback keeps, and one message a step."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers import replicas
from tests.helpers.replicas import history_of, one_value

# Two matrices of one shape, one by three axes, and what travels exact.
SHAPES = {"a": (12, 20), "b": (12, 20), "bias": (5,), "c": (8, 4, 4), "small": (2, 3)}
random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def make(rank=2, warmup_steps=0, **options):
    return jaxcomp.power_sgd(rank, "replica", warmup_steps=warmup_steps, **options)


def sgd(**options):
    return optax.chain(make(**options), optax.sgd(1.0))


@pytest.mark.parametrize(("sides", "due"), [("both", 1), ("alternating", 2)])
def test_a_gradient_of_no_higher_rank_arrives_whole_after_one_that_was_zero(sides, due):
    """The factor on the left has its columns' span, so that the one on the right leaves nothing."""
    left, right = random_tree(3)["a"][:, :2], random_tree(4)["a"][:2]
    zero = jax.tree.map(np.zeros_like, random_tree(0, 2))
    low = zero | {"a": np.stack([left @ right * s for s in (0.5, 1.5)]).astype(np.float32)}
    start, grads = jax.tree.map(lambda x: x[0], zero), [zero, zero, *[low] * due]
    params, (state, *_) = history_of(sgd(sides=sides), start, grads, 2)[-1]
    np.testing.assert_allclose(one_value(params["a"]), -due * (left @ right), atol=1e-4)
    np.testing.assert_allclose(state.residual["a"], 0, atol=1e-4)


@pytest.mark.parametrize("sides", ["both", "alternating"])
def test_a_rank_above_the_smaller_side_sends_matrices_whole(sides):
    start, grads = random_tree(0), [random_tree(1 + t, 4) for t in range(4)]
    params, (state, *_) = history_of(sgd(rank=50, least=0.01, sides=sides), start, grads, 4)[-1]
    assert state.left["small"].shape == (2, 2) and state.right["small"].shape == (3, 2)
    moved = np.sum([g["small"].mean(axis=0) for g in grads], axis=0)
    kept = np.asarray(state.residual["small"]).mean(axis=0)
    wanted = start["small"] - moved + kept
    np.testing.assert_allclose(one_value(params["small"]), wanted, atol=1e-5)
    if sides == "both":
        np.testing.assert_allclose(kept, 0, atol=1e-5)


@pytest.mark.parametrize("sides", ["both", "alternating"])
def test_parameters_without_a_matrix_are_averaged_in_float32(sides):
    bias = lambda *args: {"bias": random_tree(*args)["bias"]}
    start, grads = bias(0), [bias(1, 2), bias(2, 2)]
    params, _ = history_of(sgd(sides=sides), start, grads, 2)[-1]
    wanted = start["bias"] - sum(each["bias"].mean(axis=0) for each in grads)
    np.testing.assert_allclose(one_value(params["bias"]), wanted, atol=1e-6)
