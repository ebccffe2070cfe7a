"""1-bit Adam: Adam until the variance is frozen, and when that is."""

import jax
import numpy as np
import pytest

import jaxcomp
from tests.helpers.adam import GRADIENTS, RATE, SHAPES, random_tree, trained


def test_one_bit_adam_with_identity_keeps_on_at_the_frozen_variance():
    with jax.enable_x64(True):
        tx = jaxcomp.one_bit_adam(
            RATE, "replica", freeze_step=3, compressor=jaxcomp.identity(), deviations=None
        )
        history = trained(tx, GRADIENTS, dtype=np.float64)
        (_, at_freeze), (params, state) = history[3], history[-1]
    np.testing.assert_array_equal(state.variance["kernel"], at_freeze.variance["kernel"])
    assert int(state.rounds["variance"]) == 3
    m, x = (jax.tree.map(np.zeros_like, random_tree(0, dtype=np.float64)), random_tree(0))
    v = jax.tree.map(np.zeros_like, m)
    for step, grads in enumerate(GRADIENTS):
        for k in SHAPES:
            g = grads[k].mean(axis=0)
            m[k] = 0.9 * m[k] + 0.1 * g
            v[k] = 0.999 * v[k] + 0.001 * g * g if step < 3 else v[k]
            x[k] = x[k] - RATE * m[k] / (np.sqrt(v[k]) + 1e-8)
    np.testing.assert_allclose(params["kernel"], x["kernel"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [jaxcomp.one_bit_adam, jaxcomp.one_bit_lamb])
def test_the_warm_up_ends_by_itself_when_the_variance_is_stable(make):
    tx = make(RATE, "replica", b2=0.8, freeze_ratio=0.5)
    same = jax.tree.map(np.ones_like, random_tree(0, 2))
    history = trained(tx, [same] * 12, num_replicas=2)
    frozen = [bool(state.frozen) for _, state in history]
    # v_t = 1 - 0.8^t; v_{t-5} >= v_t / 2 first at t = 8; not before five norms are known.
    assert frozen.index(True) == 8
    variances = [float(state.variance["kernel"][0, 0]) for _, state in history]
    assert variances[7] < variances[8] == variances[9] == variances[12]


def test_the_freeze_stands_in_the_state_of_the_step_before():
    tx = jaxcomp.one_bit_adam(RATE, "replica", freeze_step=2)
    history = trained(tx, GRADIENTS[:3])
    assert [bool(state.frozen) for _, state in history] == [False, False, True, True]


# A group's largest is sought with comparisons, which are false of NaN.
GROUPS = jaxcomp.one_bit_adam(
    *(RATE, "replica"),
    freeze_step=1,
    compressor=jaxcomp.two_shot(jaxcomp.group_top_1(8), bucket_numel=400),
    weight_decay=0.1,
)


@pytest.mark.parametrize("step", [0, 1])  # of the warm-up, and coded
def test_a_gradient_that_is_not_finite_makes_all_skip_whatever_its_bucket_hides(step):
    for value in (np.nan, 1e20):  # whose square is not finite
        bad = [random_tree(i, 2) for i in range(2)]
        bad[step]["kernel"][1, 20, 0] = value
        params, _ = trained(GROUPS, bad, num_replicas=2)[step + 1]
        assert all(np.all(np.isnan(np.asarray(x))) for x in params.values())
