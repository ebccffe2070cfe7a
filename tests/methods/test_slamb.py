"""SLAMB: its formulas, its masks and freshness, and where replicas meet."""

import functools

import jax
import numpy as np
import pytest

import jaxcomp
from tests.helpers import replicas
from tests.helpers.replicas import Run, everywhere

SHAPES = {"bias": (7,), "kernel": (20, 40), "small": (3, 3)}
RATE = 2.0**-7  # exact in float32
DENSITY = 0.25


random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def slamb(**options):
    return jaxcomp.slamb(RATE, "replica", **{"density": DENSITY, "exact_numel": 64} | options)


def started(tx, num_replicas=4, params=None, dtype=np.float32):
    return Run(tx, random_tree(0, dtype=dtype) if params is None else params, num_replicas)


def authors(rescaling, gradients, decay, variance="own"):
    """Parameters of all replicas after each step, by the formulas of the authors' code.

    Beyond it, a variance of the mean learns from what the mean momentum gained since its last
    exchange.

    Every fourth run is on the mask: a leaf as small as these is cut into as many runs of
    neighbours.
    """
    b1, b2, eps, b3, sync_every = 0.9, 0.999, 1e-6, 0.75, 3
    bounds = 0.5, 1.25  # narrow, so that they are met
    num_replicas = gradients[0]["bias"].shape[0]
    x = {k: np.stack([v] * num_replicas) for k, v in random_tree(0, dtype=np.float64).items()}
    m, v = ({k: np.zeros_like(y) for k, y in x.items()} for _ in range(2))
    c = {k: np.zeros(shape) for k, shape in SHAPES.items()}
    gained, weight = ({k: np.zeros(shape) for k, shape in SHAPES.items()} for _ in range(2))
    norm = np.linalg.norm
    stride = round(1 / DENSITY)
    for step, grads in enumerate(gradients):
        for k, g in grads.items():
            m[k] = b1 * m[k] + (1 - b1) * g
            gained[k] = b1 * gained[k] + (1 - b1) * g.mean(axis=0)
            weight[k] = b1**2 * weight[k] + (1 - b1) ** 2
            on = np.ones(SHAPES[k], bool)
            if k == "kernel":
                runs = np.arange(on.size) // -(-on.size // stride)
                on = (runs == step % stride).reshape(on.shape)
            m[k][:, on] = m[k][:, on].mean(axis=0)
            kept = b2 ** (c[k] + 1)
            c[k] = np.where(on, 0, c[k] + 1)
            if variance == "own":
                v[k], steps = b2 * v[k] + (1 - b2) * g * g, step + 1
            else:
                new = kept * v[k] + (1 - kept) * gained[k] ** 2 / weight[k]
                v[k] = np.where(on, new, v[k])
                steps = step + 1 - c[k]
                gained[k], weight[k] = np.where(on, 0, gained[k]), np.where(on, 0, weight[k])
            # An entry that was never exchanged does not move.
            unbiased = np.where(steps, v[k] / np.maximum(1 - b2**steps, 1e-9), np.inf)
            r, root = b3 ** c[k], 1 / np.sqrt(num_replicas)
            if rescaling == "masked":  # the first form, but what is stale stands still
                r, root = on.astype(float), 0.0
            for i in range(num_replicas):
                y = x[k][i]
                u = m[k][i] / (1 - b1 ** (step + 1))
                u = u / (np.sqrt(unbiased[i]) + eps)
                if rescaling != "linear":
                    u = u + decay * y
                    large = norm(y[on]) / norm(u[on])
                    own = norm(y[~on]) / norm(u[~on]) if np.any(~on) else 1.0
                    ratio = r * large + (1 - r) * own
                    ratio = ratio if y.ndim == 1 else np.clip(ratio, *bounds)
                    x[k][i] = y - ratio * (r * RATE + (1 - r) * RATE * root) * u
                else:
                    large = np.clip(norm(y[on]) / norm(u[on]), *bounds)
                    own = norm(y[~on]) / norm(u[~on]) if np.any(u[~on]) else 0.0
                    own = np.clip(own, 0, bounds[1])
                    u = u + decay * y
                    x[k][i] = y - RATE * large * u * r - RATE * root * own * u * (1 - r)
        if step % sync_every == sync_every - 1:
            x = {k: np.stack([y.mean(axis=0)] * num_replicas) for k, y in x.items()}
        yield jax.tree.map(np.copy, x)


@pytest.mark.parametrize(
    ("rescaling", "variance"),
    [("quadratic", "own"), ("linear", "own"), ("masked", "own"), ("quadratic", "mean")],
)
def test_the_updates_are_those_of_their_formulas(rescaling, variance):
    with jax.enable_x64(True):
        how = jaxcomp.Rescaling(rescaling, b3=0.75, trust_bounds=(0.5, 1.25), step_bound=None)
        options = {"rescaling": how, "weight_decay": 0.25, "sync_every": 3}
        options["variance"] = variance
        run = started(slamb(**options), 3, dtype=np.float64)
        gradients = [random_tree(step, 3, dtype=np.float64) for step in range(1, 8)]
        wanted = list(authors(rescaling, gradients, 0.25, variance))
        for step, grads in enumerate(gradients):
            run.step(grads)
            for name in SHAPES:
                np.testing.assert_allclose(run.local(name), wanted[step][name], rtol=0, atol=1e-12)
            apart = np.abs(np.asarray(run.state.drift["kernel"])).max() > 1e-9
            assert apart != (step in (2, 5))
    # What is above holds for different updates.
    swapped = "linear" if rescaling == "quadratic" else "quadratic"
    other = list(authors(swapped, gradients, 0.25, variance))
    assert np.abs(other[-1]["kernel"] - wanted[-1]["kernel"]).max() > 1e-4


@pytest.mark.parametrize("pattern", ["runs", "strided", "random"])
def test_momenta_are_averaged_where_the_mask_says_and_nowhere_else(pattern):
    code = jaxcomp.random_k(DENSITY, pattern=pattern)
    run = started(slamb(b1=0.5, compressor=code, density=None))
    visits, since = [], np.zeros(SHAPES["kernel"], int)
    for step in range(8):
        before = np.asarray(run.state.momentum["kernel"])
        grads = random_tree(step, 4)
        run.step(grads)
        local = 0.5 * before + 0.5 * grads["kernel"]
        momentum = np.asarray(run.state.momentum["kernel"])
        stale = np.asarray(run.state.stale["kernel"])
        on = stale == 0
        since = np.where(on, 0, since + 1)
        np.testing.assert_array_equal(stale, since)
        assert on.sum() == on.size * DENSITY
        assert np.all(momentum[:, on] == momentum[:1, on])
        np.testing.assert_allclose(momentum[0, on], local[:, on].mean(axis=0), atol=1e-6)
        np.testing.assert_array_equal(momentum[:, ~on], local[:, ~on])
        bias = np.asarray(run.state.momentum["bias"])
        assert np.all(bias == bias[:1])
        visits.append(on)
    assert run.state.stale["bias"] is None and run.state.stale["small"] is None
    if pattern != "random":
        for first in range(5):
            np.testing.assert_array_equal(np.sum(visits[first : first + 4], axis=0), 1)
    else:
        assert np.any(visits[0] & visits[1]) and np.any(np.sum(visits[:4], axis=0) == 0)
    # A count of 16 bits stays at its end.
    longest = everywhere(run.mesh, np.full(SHAPES["kernel"], 65535, np.uint16))
    run.state = run.state._replace(stale=run.state.stale | {"kernel": longest})
    run.step(random_tree(8, 4))
    assert set(np.unique(run.state.stale["kernel"])) == {0, 65535}


def test_values_on_the_mask_may_be_coded():
    code = jaxcomp.compose(jaxcomp.random_k(DENSITY), jaxcomp.quantize(8, block=32))
    run, exact = started(slamb(b1=0.0, compressor=code, density=None)), started(slamb(b1=0.0))
    for step in range(2):
        grads = random_tree(step, 4)
        run.step(grads)
        exact.step(grads)
        on = np.asarray(run.state.stale["kernel"]) == 0
        np.testing.assert_array_equal(on, np.asarray(exact.state.stale["kernel"]) == 0)
        got, want = (np.asarray(r.state.momentum["kernel"]) for r in (run, exact))
        assert np.all(got[:, on] == got[:1, on])
        error = np.abs(got - want)[:, on].max()
        # Half a step of 254 between plus and minus the largest value, on both ways.
        assert 0 < error < 2.02 * np.abs(grads["kernel"]).max() / 254
        np.testing.assert_array_equal(got[:, ~on], want[:, ~on])


@pytest.mark.parametrize("sync_every", [1, 2])
def test_replicas_meet_at_the_mean_of_their_parameters(sync_every):
    run = started(slamb(sync_every=sync_every))
    for step in range(1, 4):
        start = np.asarray(run.params["kernel"])
        run.step(random_tree(step, 4))
        drift = np.asarray(run.state.drift["kernel"])
        if step % sync_every:
            np.testing.assert_array_equal(run.params["kernel"], start)
            assert np.all(np.abs(drift).max(axis=(1, 2)) > RATE / 4)
            assert np.any(drift[0] != drift[1])
        else:
            # No more than what the consensus rounds off, the same everywhere.
            assert np.all(drift == drift[:1]) and np.abs(drift).max() < 1e-6
            assert np.any(np.asarray(run.params["kernel"]) != start)


@pytest.mark.parametrize(
    ("code", "num_replicas"),
    [(jaxcomp.quantize(4), 1), (jaxcomp.quantize(4), 3), (jaxcomp.random_k(0.25), 4)],
)
def test_what_coded_drifts_leave_stays_with_replicas_and_owners(code, num_replicas):
    with jax.enable_x64(True):
        options = {"sync_every": 2, "rescaling": jaxcomp.Rescaling(b3=1.0)}
        run = started(slamb(**options, drift_compressor=code), num_replicas, dtype=np.float64)
        exact = started(slamb(**options), num_replicas, dtype=np.float64)
        for step in range(2):
            grads = random_tree(step, num_replicas, dtype=np.float64)
            run.step(grads)
            exact.step(grads)
        for name in ("bias", "small"):  # too small for a code
            np.testing.assert_array_equal(run.params[name], exact.params[name])
            assert np.abs(np.asarray(run.state.drift[name])).max() < 1e-12
        owned = [np.asarray(x) for x in run.state.owner_residual if x is not None]
        rest = sum(x.reshape(-1)[:800].reshape(20, 40) for x in owned)
        met = np.asarray(run.params["kernel"])
        mean = met + np.asarray(run.state.drift["kernel"]).mean(axis=0) + rest
        np.testing.assert_allclose(mean, exact.params["kernel"], rtol=0, atol=1e-14)
        assert np.abs(met - np.asarray(exact.params["kernel"])).max() > 1e-4


def test_sparse_codes_send_all_drifts_in_turn():
    # The entries roll once for each synchronization. By step they would be the same ones each time.
    run = started(slamb(sync_every=4, drift_compressor=jaxcomp.random_k(0.25)), 2)
    first = np.asarray(run.params["kernel"])
    for step in range(16):
        run.step(random_tree(step, 2))
    assert np.all(np.asarray(run.params["kernel"]) != first)


APART = slamb(sync_every=9)


def test_a_gradient_whose_square_is_not_finite_stays_at_home():
    run = started(APART)
    run.step(random_tree(1, 4))
    before, grads = run.state, random_tree(2, 4)
    grads["kernel"][2, 5, 5] = 1e30  # NaN: tests/methods/test_every_method.py
    run.step(grads)
    assert np.asarray(run.state.skipped).tolist() == [0, 0, 1, 0]
    for name in SHAPES:
        old, new = (np.asarray(s.drift[name]) for s in (before, run.state))
        moved = np.abs(new - old).max(axis=tuple(range(1, old.ndim))) > 0
        # The replica stands still in the leaf that fails, and goes on in the others.
        assert moved.tolist() == [True, True, name != "kernel", True]
    held = [np.asarray(s.variance["kernel"])[2] for s in (before, run.state)]
    np.testing.assert_array_equal(*held)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(run.state.momentum))


@pytest.mark.parametrize("rescaling", ["quadratic", "linear"])
def test_layers_of_zeros_and_of_nothing_are_no_trouble(rescaling):
    shapes = {"empty": (0, 5), "frozen": (9, 9), "zero": (9, 9)}
    params = random_tree(0, shapes=shapes) | {"zero": np.zeros((9, 9), np.float32)}
    run = started(slamb(sync_every=2, rescaling=jaxcomp.Rescaling(rescaling, b3=0.0)), 2, params)
    for step in range(4):
        grads = random_tree(step, 2, shapes=shapes)
        run.step(grads | {"frozen": np.zeros((2, 9, 9), np.float32)})
        if step == 0:
            # Of a layer of zeros what is not exchanged has ratio 1 in the one form, 0 in the other.
            moved = np.abs(run.local("zero"))
            stale = np.asarray(run.state.stale["zero"]) > 0
            assert np.all(moved[:, ~stale] > 1e-9)
            assert np.any(moved[:, stale] > 1e-9) == (rescaling == "quadratic")
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((run.params, run.state.drift)))
    np.testing.assert_array_equal(run.params["frozen"], params["frozen"])
    assert np.any(np.asarray(run.params["zero"]))
