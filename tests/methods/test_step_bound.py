"""No coordinate moves farther in a step than Adam could move it, and rare tokens do no harm."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxcomp
from jaxcomp import schedules
from jaxcomp.methods import moments, step_bound
from jaxcomp.methods.moments import NONE
from tests.helpers import replicas

RATE, STEPS, REPLICAS = 2.0**-6, 24, 4
FROZEN = 6
ROWS, WIDTH = 12, 16


def most_rates(b1, b2, n, corrected=True):
    """How many rates Adam can move a coordinate in step n, in float64."""
    powers = lambda ratio: np.sum(ratio ** np.arange(n))
    if not corrected:
        return (1 - b1) * np.sqrt(powers(b1**2 / b2) / (1 - b2))
    return np.sqrt(powers(b1**2 / b2) * powers(b2)) / powers(b1)


def adams_step(b1, b2, gradients):
    """The last step of Adam after these gradients, in rates."""
    m, v = 0.0, 0.0
    for g in gradients:
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    n = len(gradients)
    return abs(m / (1 - b1**n)) / np.sqrt(v / (1 - b2**n)) if v else 0.0


@settings(deadline=None)
@given(
    st.sampled_from([0.0, 0.5, 0.9, 0.95]),
    st.sampled_from([0.8, 0.9, 0.95, 0.99, 0.999]),
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=60),
)
def test_no_gradients_move_adam_farther_and_some_move_it_just_so_far(b1, b2, gradients):
    n = len(gradients)
    assert adams_step(b1, b2, gradients) <= most_rates(b1, b2, n) * (1 + 1e-9)
    worst = (b1 / b2) ** np.arange(n)[::-1]
    assert adams_step(b1, b2, worst) == pytest.approx(most_rates(b1, b2, n), rel=1e-9)
    for corrected in (True, False):
        of_paper = NONE._replace(bias_correction=corrected)
        adam = moments.adam("adam", 1.0, b1, b2, 1e-8, deviations=of_paper)
        got = step_bound.largest_momentum(adam, jnp.int32(n), jnp.float32(0))
        wanted = most_rates(b1, b2, n, corrected) * ((1 - b1**n) if corrected else 1)
        assert float(got) == pytest.approx(wanted, rel=1e-5)


def gradients():
    """The gradients of all replicas in each step, whose rows differ in when they come.

    Rows 0 to 2 have them always, 3 and 4 large ones that nearly cancel in the mean, 5 to 7 now and
    then on one replica, 8 and 9 spikes of any size, 10 large ones after the freeze only, and row 11
    huge ones in the last steps.
    """
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        g = rng.standard_normal((REPLICAS, ROWS, WIDTH)).astype(np.float32)
        g[:, 3:5] -= g[:, 3:5].mean(axis=0) * (1 - 1e-4)
        g[:, 5:8] *= (rng.random((REPLICAS, 3, 1)) < 0.3) & (step % 5 == 4)
        g[:, 8:10] *= 10.0 ** rng.integers(-4, 5, (REPLICAS, 2, 1))
        g[:, 10] *= 100.0 * (step > FROZEN + 2)
        g[:, 11] *= 1e6 * (step > STEPS - 4)
        yield {"bias": g[:, 0, :7] * (step != 3), "rows": g}


START = {"bias": np.zeros(7, np.float32), "rows": np.zeros((ROWS, WIDTH), np.float32)}
METHODS = {
    "zero_one_adam": {},
    "zero_one_adam as the paper sends": {
        "deviations": jaxcomp.Deviations(precondition=False, fresh_variance=False)
    },
    "zero_one_adam by local steps": {"sync_at": schedules.every(3, STEPS, after=4)},
    "zero_one_adam frozen": {"variance_at": schedules.until(FROZEN)},
    "one_bit_adam": {"freeze_step": FROZEN},
    "one_bit_adam as the paper sends": {
        "freeze_step": FROZEN,
        "deviations": jaxcomp.Deviations(precondition=False),
    },
}


def since(start, n, corrected):
    """How many steps like the last one are those since the replicas met, by bias corrections."""
    of = lambda k: 1 - 0.9**k if corrected else 1.0
    return sum(of(n) / of(k) for k in range(start + 1, n + 1))


def farthest(history, b2, corrected):
    """The largest step of the consensus or of a replica's own parameters, over Adam's largest."""
    found, start = 0.0, 0
    drift_of = lambda state: optax.tree_utils.tree_get(state, "drift")
    for n, ((old, before), (new, after)) in enumerate(itertools.pairwise(history), 1):
        most = RATE * most_rates(0.9, b2, n, corrected)
        apart = any(map(np.any, jax.tree.leaves(drift_of(after))))
        for k in START:
            move = np.asarray(new[k], np.float64) - np.asarray(old[k], np.float64)
            if apart:
                assert not np.any(move)
                was, now = (np.asarray(drift_of(s)[k], np.float64) for s in (before, after))
                found = max(found, np.abs(now - was).max() / most)
            else:
                found = max(found, np.abs(move).max() / (most * since(start, n, corrected)))
        start = start if apart else n
    return found


CASES = [(0.95, jaxcomp.identity()), (0.999, None)]


@pytest.mark.parametrize(("b2", "code"), CASES, ids=["0.95 exact", "0.999"])
@pytest.mark.parametrize("name", METHODS)
def test_no_coordinate_moves_farther_in_a_step_than_adam_could_move_it(name, b2, code):
    make = getattr(jaxcomp, name.split()[0])
    tx = make(RATE, "replica", b2=b2, compressor=code, **METHODS[name])
    history = replicas.history_of(tx, START, list(gradients()), REPLICAS)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(history[-1]))
    # Rates are summed, and bounds computed, in float32.
    assert farthest(history, b2, True) <= 1 + 1e-4


def test_a_layer_of_one_bit_lamb_moves_no_farther_than_its_ratio_times_adam():
    tx = jaxcomp.one_bit_lamb(
        *(RATE, "replica"), b2=0.95, freeze_step=FROZEN, trust=jaxcomp.TrustRatio((1.0, 1.0))
    )
    history = replicas.history_of(tx, START, list(gradients()), REPLICAS)
    for n, ((old, _), (new, state)) in enumerate(itertools.pairwise(history), 1):
        for k in START:
            move = np.abs(np.asarray(new[k]) - np.asarray(old[k])).max()
            ratio = float(state.layers[k].factor)
            assert move <= RATE * ratio * most_rates(0.9, 0.95, n) * (1 + 1e-4)


def test_a_matrix_of_slamb_moves_no_farther_than_its_ratio_times_adam():
    options = {"b2": 0.95, "sync_every": 1, "density": 0.5, "exact_numel": 0}

    def largest(bound):
        how = jaxcomp.Rescaling(b3=1.0, trust_bounds=(1.0, 1.0), step_bound=bound)
        tx = jaxcomp.slamb(RATE, "replica", rescaling=how, **options)
        history = replicas.history_of(tx, START, list(gradients()), REPLICAS)
        moves = [new["rows"] - old["rows"] for (old, _), (new, _) in itertools.pairwise(history)]
        most = [RATE * most_rates(0.9, 0.95, n) for n in range(1, STEPS + 1)]
        return max(np.abs(move).max() / m for move, m in zip(moves, most, strict=True))

    assert largest(1.0) <= 1 + 1e-4
    assert largest(None) > 10  # momenta of others, and a variance that has not seen their token


VOCAB, FEATURES, TOKENS, RUN = 4096, 16, 64, 200


def rare_tokens(seed):
    """Pairs of tokens, whose frequencies are Zipf's: half of the vocabulary is seen once or never.

    Returns pairs of each step, and pairs to validate with.
    """
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, VOCAB + 1)
    drawn = lambda *shape: rng.choice(VOCAB, shape, p=shares / shares.sum())
    first = drawn(RUN + 16, TOKENS)
    follows = rng.permutation(VOCAB)[first]
    second = np.where(rng.random(first.shape) < 0.7, follows, drawn(*first.shape))
    pairs = np.stack([first, second], -1).astype(np.int32)
    return pairs[:RUN], pairs[RUN:].reshape(-1, 2)


def loss_of(params, pairs):
    hidden = params["embed"][pairs[:, 0]]
    hidden += jax.nn.gelu(hidden @ params["up"]) @ params["down"]
    hidden *= jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)
    logits = hidden @ params.get("head", params["embed"].T)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, pairs[:, 1]).mean()


OPTIONS = {"zero_one_adam": {}, "slamb": {"sync_every": RUN // 8, "exact_numel": 2000}}


@functools.cache
def ends_at(name, b2, tied, *, rate=3e-2, seed=0, **options):
    """The validation loss after `RUN` steps on rare tokens."""
    rate = optax.warmup_cosine_decay_schedule(0.0, rate, RUN // 10, RUN)
    if name.startswith("dense"):
        mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
        tx = optax.chain(mean, getattr(optax, name.split()[1])(rate, b2=b2, **options))
    else:
        options = {"b2": b2} | OPTIONS.get(name, {"freeze_step": 3 * RUN // 20}) | options
        tx = getattr(jaxcomp, name)(rate, "replica", **options)
    init, step = jaxcomp.simulated_train_step(loss_of, tx, REPLICAS, "replica")
    pairs, held = rare_tokens(seed)
    shapes = {"embed": (VOCAB, FEATURES), "up": (FEATURES, 64), "down": (64, FEATURES)}
    shapes |= {} if tied else {"head": (FEATURES, VOCAB)}
    start = replicas.random_tree(seed, shapes=shapes)
    sizes = {"embed": 0.02, "up": 0.25, "down": 0.125, "head": 0.02}

    @jax.jit
    def run(params):
        body = lambda carry, batch: (step(*carry, batch)[:2], None)
        (params, _), _ = jax.lax.scan(body, (params, init(params)), pairs)
        return loss_of(params, held)

    return float(run({k: jnp.asarray(x * sizes[k]) for k, x in start.items()}))


@pytest.mark.parametrize("name", ["zero_one_adam", "one_bit_adam"])
def test_rare_tokens_do_not_make_it_diverge(name):
    assert ends_at(name, 0.95, True) < ends_at("dense adam", 0.95, True) + 0.4


def test_rare_tokens_do_not_make_layers_diverge():
    assert ends_at("one_bit_lamb", 0.999, False) < ends_at("dense lamb", 0.999, False) + 0.4


def test_without_the_bound_and_the_floor_it_does():
    wild = jaxcomp.Deviations(step_bound=None, variance_floor=0.0)
    end = ends_at("zero_one_adam", 0.95, True, deviations=wild)
    assert not end < 9, "it need not be finite"
