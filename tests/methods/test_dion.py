"""Dion: a loop in NumPy, the mean of momenta that is one replica's, and two messages a step."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from tests.helpers import replicas
from tests.helpers.replicas import history_of, one_value

# Two matrices of one shape, one of three axes, and what travels exact.
SHAPES = {"a": (12, 20), "b": (12, 20), "bias": (5,), "c": (2, 4, 6), "embed": (4, 6)}
MATRICES = ("a", "b", "c")
random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)
RATE, RANK = 0.125, 3


def make(**options):
    exact = lambda path, leaf: leaf.ndim < 2 or path == "embed"
    options = {"rank": RANK, "exact": exact, "others": optax.sgd(RATE)} | options
    return jaxcomp.dion(RATE, "replica", **options)


def stepped(x, m, q, decay=0.1, momentum=0.95):
    """A step of one replica in NumPy, in float64: parameters, what M loses, the next factor."""
    shape, n = x.shape, x.shape[-1]
    m = m.reshape(-1, n)
    p = np.linalg.qr(m @ q)[0]
    r = m.T @ p
    q = r / (np.linalg.norm(r, axis=0) + 1e-8)
    step = np.sqrt(n / len(m)) * p @ q.T
    lost = (1 - momentum) * p @ r.T
    return (1 - RATE * decay) * x - RATE * step.reshape(shape), lost.reshape(shape), q


def test_four_replicas_take_the_steps_of_one_with_all_data_and_share_its_momentum():
    start, grads = random_tree(0), [random_tree(1 + t, 4) for t in range(4)]
    history = history_of(make(weight_decay=0.1), start, grads, 4)
    first = history[0][1]
    wanted = {k: x.astype(np.float64) for k, x in start.items()}
    momenta = {k: np.zeros((4, *SHAPES[k])) for k in MATRICES}
    factors = {k: np.asarray(first.right[k], np.float64) for k in MATRICES}
    for grad, (params, state) in zip(grads, history[1:], strict=True):
        for k, x in grad.items():
            if k not in MATRICES:
                wanted[k] = wanted[k] - RATE * x.astype(np.float64).mean(axis=0)
            else:
                momenta[k] = momenta[k] + x
                mean = momenta[k].mean(axis=0)
                wanted[k], lost, factors[k] = stepped(wanted[k], mean, factors[k])
                momenta[k] = momenta[k] - lost
                np.testing.assert_allclose(state.residual[k], momenta[k], atol=5e-6)
            np.testing.assert_allclose(one_value(params[k]), wanted[k], atol=2e-6)
    assert state.residual["embed"] is None and state.residual["bias"] is None


@pytest.mark.parametrize("others", [optax.sgd(RATE), None])
def test_parameters_without_a_matrix_take_the_others_steps(others):
    # As in the tree of one number by which `train` counts messages.
    start, grads = {"bias": random_tree(0)["bias"]}, [random_tree(1 + t, 4) for t in range(2)]
    grads = [{"bias": tree["bias"]} for tree in grads]
    *_, (params, _) = history_of(make(others=others, weight_decay=0.1), start, grads, 4)
    alone = others or optax.adamw(RATE, weight_decay=0.1)
    wanted, state = start, alone.init(start)
    for grad in grads:
        mean = jax.tree.map(lambda x: x.mean(axis=0), grad)
        updates, state = alone.update(mean, state, wanted)
        wanted = optax.apply_updates(wanted, updates)
    np.testing.assert_allclose(one_value(params["bias"]), wanted["bias"], atol=1e-6)


def test_a_step_of_the_highest_rank_goes_along_all_directions():
    start, grads = random_tree(0), [random_tree(1, 2)]
    params, state = history_of(make(rank=50), start, grads, 2)[-1]
    assert state.right["a"].shape == (20, 12)
    step = (start["a"] - one_value(params["a"])) / RATE
    lengths = np.linalg.svd(step, compute_uv=False)
    assert lengths.min() > 0.2


@pytest.mark.parametrize("scale", [1.0, 1e30])
@pytest.mark.parametrize("rank", [RANK, 50])
@pytest.mark.parametrize("kind", ["rank one", "one row"])
def test_a_momentum_of_low_rank_moves_the_parameters_along_itself_alone(kind, rank, scale):
    """The columns that it does not fill hold rounding errors, which must not be steps."""
    zero = jax.tree.map(np.zeros_like, random_tree(0, 2))
    left, right = random_tree(3)["a"][:, :1], random_tree(4)["a"][:1]
    left = left if kind == "rank one" else np.eye(12, 1)
    low = (scale * left @ right).astype(np.float32)
    start, grad = random_tree(0), zero | {"a": np.stack([low, 3 * low])}
    history = history_of(make(rank=rank), start, [grad, grad], 2)
    (before, first), *_, (params, state) = history
    step = (one_value(before["a"]) - one_value(params["a"])) / (2 * RATE)
    u, v = left / np.linalg.norm(left), right / np.linalg.norm(right)
    np.testing.assert_allclose(step, np.sqrt(20 / 12) * u @ v, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(state.right["a"], axis=0), 1, atol=1e-5)
    # The others did not move, and keep their factor.
    np.testing.assert_array_equal(one_value(params["b"]), start["b"])
    np.testing.assert_array_equal(state.right["b"], first.right["b"])
