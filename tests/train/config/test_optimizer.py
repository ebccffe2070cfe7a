"""The optimizer of a config: its fields, its schedule, and its update as text."""

import jax.numpy as jnp
import numpy as np
import pytest

from train.config import Optimizer
from train.config.optimizer import schedule, transformation

UPDATE = "chain(clip_by_global_norm(1.0), adamw(learning_rate))"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Optimizer(UPDATE, 0.0), "learning_rate=0.0 must be positive"),
        (lambda: Optimizer(UPDATE, float("nan")), "learning_rate=nan must be a finite number"),
        (lambda: Optimizer(UPDATE, float("inf")), "learning_rate=inf must be a finite number"),
        (lambda: Optimizer(UPDATE, 1.0, -1), "warmup_steps=-1 must be at least 0"),
        (lambda: Optimizer(UPDATE, 1.0, final_fraction=1.5), "final_fraction=1.5 must be in"),
        (lambda: Optimizer(UPDATE, 1.0, final_fraction=-0.5), "final_fraction=-0.5 must be in"),
        (lambda: Optimizer(UPDATE, 1.0, 1, "exponential", 0.0), "fraction=0 is never reached"),
        (lambda: Optimizer("adamw(", 1.0), r"optimizer.update: 'adamw\(' is not an expression"),
    ],
)
def test_wrong_value_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "middle", "last"),
    [
        *(("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)),
        ("exponential", 0.1**0.5, 0.1),
    ],
)
def test_schedule_warms_up_and_decays_to_the_last_step(kind, middle, last):
    assert schedule(Optimizer(UPDATE, 2.0, schedule=kind), 100)(0) == 2.0
    rate = schedule(Optimizer(UPDATE, 2.0, 10, schedule=kind), 110)
    got = [rate(step) for step in (0, 5, 10, 60, 110, 500)]
    # Six float32 operations of relative error 2^-24 each.
    np.testing.assert_allclose(got, [0, 1, 2, 2 * middle, 2 * last, 2 * last], rtol=6 * 2**-24)
    # A cosine falls slowly at first; a line is at 1.55.
    assert (rate(35) > 1.56) == (kind in ("cosine", "constant"))


def test_update_is_the_chain_that_its_text_says():
    optimizer = Optimizer("chain(clip(0.5), sgd(learning_rate))", 2.0, schedule="constant")
    made = transformation(optimizer, "replica", 100)
    grads = jnp.array([3.0, -0.25])
    updates, _ = made.update(grads, made.init(grads), grads)
    np.testing.assert_array_equal(updates, [-1.0, 0.5])


def test_update_that_is_no_transformation_is_refused():
    with pytest.raises(ValueError, match="is a function, not an optax transformation"):
        transformation(Optimizer("learning_rate", 1.0), "replica", 100)
