"""1-bit LAMB: LAMB until the freeze, bounded factors after it, and the authors' own steps."""

import functools

import jax
import numpy as np
import pytest

import jaxcomp
from jaxcomp.methods.one_bit_lamb import Trust
from tests.helpers import replicas

DEVIATIONS = jaxcomp.Deviations(variance_floor=1e-4)  # the default of `one_bit_lamb`
SHAPES = {"bias": (7,), "kernel": (20, 40)}
RATE = 2.0**-7  # exact in float32


random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def trained(tx, gradients, num_replicas=2, params=None, dtype=np.float32):
    """Parameters and states before the first and after each step."""
    params = random_tree(0, dtype=dtype) if params is None else params
    return replicas.history_of(tx, params, gradients, num_replicas)


def of_layers(state, field):
    is_layer = lambda x: isinstance(x, Trust)
    layers = jax.tree.leaves(state.layers, is_leaf=is_layer)
    return np.array([float(getattr(layer, field)) for layer in layers])


def by_numpy(gradients, freeze_step, decay, eps=1e-6, b1=0.9, b2=0.999):
    """Parameters after each step with exact mean momenta, in float64, and all factors."""
    x = random_tree(0, dtype=np.float64)
    zeros = lambda: jax.tree.map(np.zeros_like, x)
    m, v, fresh = zeros(), zeros(), zeros()
    ratio, weight, factor = ({k: start for k in x} for start in (0.0, 0.0, 1.0))
    norm = np.linalg.norm
    for step, grads in enumerate(gradients):
        for k in x:
            g = grads[k].mean(axis=0)
            old, m[k] = m[k], b1 * m[k] + (1 - b1) * g
            if step < freeze_step:
                v[k] = b2 * v[k] + (1 - b2) * g * g
                fresh[k], updates = v[k], step + 1
            else:
                estimate = (m[k] - b1 * old) / (1 - b1)
                fresh[k], updates = b2 * fresh[k] + (1 - b2) * estimate**2, freeze_step
            root = np.sqrt(v[k] / (1 - b2**updates)) + eps
            plain = m[k] / (1 - b1 ** (step + 1)) / root
            u = plain + decay * x[k]
            if step < freeze_step:
                trust = np.clip(norm(x[k]) / norm(u), 0.01, 10)
                ratio[k] = 0.9 * ratio[k] + 0.1 * trust
                weight[k] = 0.9 * weight[k] + 0.1
            else:
                root_now = np.sqrt(fresh[k] / (1 - b2 ** (step + 1))) + eps
                share = min(1, norm(plain) / norm(u))
                new = np.clip(np.max(root / root_now) * share + 1 - share, 0.5, 4)
                factor[k] = np.clip(new, 0.9 * factor[k], 1.1 * factor[k])
                trust = ratio[k] / weight[k] * factor[k]
            x[k] = x[k] - RATE * trust * u
        yield jax.tree.map(np.copy, x), [factor[k] for k in sorted(factor)]


@pytest.mark.parametrize("precondition", [True, False])
def test_with_identity_it_is_what_the_formulas_say(precondition):
    with jax.enable_x64(True):
        tx = jaxcomp.one_bit_lamb(
            RATE,
            "replica",
            freeze_step=4,
            compressor=jaxcomp.identity(),
            deviations=jaxcomp.Deviations(
                precondition=precondition, variance_floor=0.0, step_bound=None
            ),
            weight_decay=0.25,
        )
        scale = [1, 1, 1, 1, 0.1, 0.1, 30, 1]
        gradients = [
            jax.tree.map(lambda g, s=s: s * g, random_tree(i, 2, dtype=np.float64))
            for i, s in enumerate(scale, 1)
        ]
        history = trained(tx, gradients, dtype=np.float64)
        factors = []
        for (params, state), (wanted, factor) in zip(
            history[1:], by_numpy(gradients, 4, decay=0.25), strict=True
        ):
            for k in SHAPES:
                np.testing.assert_allclose(params[k], wanted[k], rtol=0, atol=1e-6)
            np.testing.assert_allclose(of_layers(state, "factor"), factor, rtol=1e-5)
            factors.append(factor)
    # It moves to both sides, at most by a tenth of itself.
    change = np.array(factors[1:]) / np.array(factors[:-1])
    assert change.min() == pytest.approx(0.9) and change.max() > 1.01
    np.testing.assert_array_equal(history[4][1].variance["kernel"], state.variance["kernel"])
    assert int(state.rounds["synchronize"]) == 4 and int(state.rounds["variance"]) == 4


@pytest.mark.parametrize("precondition", [True, False])
def test_of_one_bit_nothing_is_lost_and_factors_stay_in_their_bounds(precondition):
    # With b1 = 0 what travels is the gradient over D, or scaled, and all of it arrives or is held.
    tx = jaxcomp.one_bit_lamb(
        *(RATE, "replica"),
        b1=0.0,
        freeze_step=2,
        deviations=DEVIATIONS._replace(precondition=precondition),
        compressor=jaxcomp.sign(block=64),
        trust=jaxcomp.TrustRatio((0.25, 0.25), factor_bounds=(0.75, 1.2), factor_change=0.2),
        eps=1.0,
    )
    gradients = [random_tree(i, 4) for i in range(1, 12)]
    history = trained(tx, gradients, num_replicas=4)
    (_, frozen), (_, state) = history[2], history[-1]
    arrived = {k: np.zeros(shape) for k, shape in SHAPES.items()}
    for _, after in history[3:]:
        for k in SHAPES:
            arrived[k] += np.asarray(after.momentum[k])
    flat = lambda tree: np.concatenate(
        [np.asarray(tree[k]).reshape(*np.shape(tree[k])[: -len(SHAPES[k])], -1) for k in SHAPES], -1
    )
    wanted = {k: np.sum([g[k].mean(axis=0) for g in gradients[2:]], axis=0) for k in SHAPES}
    if precondition:
        v = {k: np.asarray(x) for k, x in frozen.variance.items()}
        unit = {k: np.sqrt(np.maximum(v[k], 1e-4 * v[k].mean()) / (1 - 0.999**2)) + 1 for k in v}
    else:
        scale = of_layers(frozen, "scale")
        rms = [np.sqrt(np.mean(np.asarray(frozen.momentum[k]) ** 2)) for k in SHAPES]
        np.testing.assert_allclose(scale, np.mean(rms) / rms, rtol=1e-6)
        unit = {k: np.full(SHAPES[k], 1 / s) for k, s in zip(SHAPES, scale, strict=True)}
    owned = np.concatenate([np.asarray(e).reshape(-1) for e in state.owner_residual])
    held = flat(state.residual).mean(axis=0) + owned[: flat(wanted).size]
    np.testing.assert_allclose(
        flat(arrived) / flat(unit) + held, flat(wanted) / flat(unit), rtol=0, atol=1e-4
    )
    factors = np.array([of_layers(s, "factor") for _, s in history])
    assert np.all(factors[:3] == 1) and factors.min() >= 0.75 and factors.max() == np.float32(1.2)
    np.testing.assert_allclose(of_layers(state, "ratio") / of_layers(state, "weight"), 0.25)
