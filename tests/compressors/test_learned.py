"""Learned levels: where they go, what they gain, and that all replicas have the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import learned_levels, quantize, rotated, schedules
from jaxcomp.compressors.base import Key
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows

DISTRIBUTIONS = ("normal", "uniform", "laplace")
PRIVATE = Key(jnp.int32(0), jnp.uint32(9))


def draws(name, size=2**16):
    """Values of a known distribution in [0, 1]: all but the ends of one block."""
    x = getattr(np.random.default_rng(0), name)(size=size).astype(np.float32)
    return (x - x.min()) / (x.max() - x.min())


def fitted(rounding, values, bits):
    # One block of exact ends: the code sees the values as they are.
    code = learned_levels(bits, values.size, rounding, "float32")
    fit = lambda x: code.levels.fit(jnp.asarray(code.levels.start), code.levels.tally(x))
    return np.asarray(jax.jit(fit)(values))


def lloyd(values, bits, steps=500):
    """Lloyd's iteration on the values themselves."""
    levels = np.linspace(0, 1, 2**bits)
    values = np.sort(values.astype(np.float64))
    sums = np.concatenate([[0], np.cumsum(values)])
    for _ in range(steps):
        edges = np.searchsorted(values, (levels[1:] + levels[:-1]) / 2)
        edges = np.concatenate([[0], edges, [values.size]])
        count = np.diff(edges)
        levels = np.where(count, np.diff(sums[edges]) / np.maximum(count, 1), levels)
    return levels


def nearest_error(values, levels):
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, values)
    return np.mean((values - levels[codes]) ** 2)


def variance(values, levels):
    """Of stochastic rounding, in the mean over the values."""
    below = np.clip(np.searchsorted(levels, values, side="right") - 1, 0, levels.size - 2)
    return np.mean((values - levels[below]) * (levels[below + 1] - values))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("bits", [2, 4])
def test_levels_to_nearest_converge_to_lloyds(name, bits):
    values = draws(name)
    got, want = fitted("nearest", values, bits), lloyd(values, bits)
    # Bins are 1/1024 wide; far out, where few values lie, the error hardly depends on the level.
    assert np.abs(got - want)[1:-1].max() < 4 / 1024
    assert nearest_error(values, got) < 1.005 * nearest_error(values, want)
    assert nearest_error(values, got) < 0.9 * nearest_error(values, np.linspace(0, 1, 2**bits))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_levels_of_stochastic_rounding_vary_least(name):
    values = draws(name)
    levels = fitted("stochastic", values, 3)
    assert levels[0] == 0 and levels[-1] == 1
    least = variance(values, levels)
    for index in range(1, 7):
        for step in (-0.02, 0.02):
            moved = levels.copy()
            moved[index] += step
            assert variance(values, np.sort(moved)) > least
    if name != "uniform":
        assert least < 0.8 * variance(values, np.linspace(0, 1, 8))


def test_levels_without_values_stay():
    for rounding in ("nearest", "stochastic"):
        levels = learned_levels(3, 8, rounding).levels
        table = np.float32([0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.9, 1])
        # Blocks of one value each have no range; what is not finite counts nowhere.
        nothing = np.repeat(np.float32([1, 2, np.nan, np.inf]), 8)
        tally = levels.tally(nothing)
        assert tally.sum() == 0
        np.testing.assert_allclose(levels.fit(table, tally), table, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_levels_are_float32_where_float64_is_enabled(rounding):
    code = learned_levels(3, 8, rounding)
    x = np.random.default_rng(0).normal(size=999)
    fitted = lambda x: code.levels.fit(jnp.asarray(code.levels.start), code.levels.tally(x))
    want = jax.jit(fitted)(x)
    with jax.enable_x64(True):
        got = jax.jit(fitted)(x)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_levels_of_rotated_values_lose_least():
    x = np.random.default_rng(0).standard_t(3, size=2**14).astype(np.float32)

    def error(code, tallied=None):
        shared = PRIVATE
        if code.levels is not None:
            tally = (tallied or code).levels.tally(x)
            levels = code.levels.fit(jnp.asarray(code.levels.start), tally)
            shared = shared._replace(levels=levels)
        return jnp.mean((code.decode(code.encode(x, shared, PRIVATE), shared) - x) ** 2)

    uniform, learned = quantize(4, 1024, "minmax"), learned_levels(4, 1024)
    codes = uniform, learned, rotated(uniform), rotated(learned)
    errors = [float(jax.jit(error, static_argnums=0)(code)) for code in codes]
    assert errors[3] < 0.8 * errors[2] and errors[2] < 0.5 * errors[1] < 0.5 * errors[0]
    assert errors[3] < 0.95 * error(codes[3], tallied=learned)


def test_stochastic_rounding_is_unbiased_at_any_levels():
    code = learned_levels(2, 16, "stochastic", "float32")
    shared = Key(jnp.int32(0), jnp.uint32(0), jnp.float32([0, 0.2, 0.3, 1]))
    x = np.random.default_rng(0).uniform(-1, 1, 16).astype(np.float32)

    def draw(seed):
        private = Key(jnp.int32(0), seed)
        return code.decode(code.encode(x, shared, private), shared)

    count = 4096
    got = np.asarray(jax.jit(jax.vmap(draw))(jnp.arange(count, dtype=jnp.uint32)))
    # No variance is above a quarter of the widest gap squared.
    deviation = (x.max() - x.min()) * 0.7 / 2
    assert np.abs(got.mean(axis=0) - x).max() < 5 * deviation / np.sqrt(count)
    assert len(np.unique(np.round(got, 5))) == 4


WIDTH = 64
CODES = learned_levels(3, 256), learned_levels(2, 256, "stochastic")


def make(fsdp, num_replicas, accumulate=1):
    """A step of a small network, and its shards and state before the first one."""
    rng = np.random.default_rng(0)
    kernel = lambda: (rng.laplace(size=(WIDTH, WIDTH)) / 8).astype(np.float32)
    params = {"first": kernel(), "last": kernel(), "bias": np.zeros(WIDTH, np.float32)}

    def loss(shards, x):
        p = fsdp.gather(shards)
        return jnp.mean((jnp.tanh(x @ p["first"]) @ p["last"] + p["bias"][None] - x) ** 2)

    mesh = mesh_of(num_replicas)
    made = jaxcomp.qsdp_train_step(loss, optax.sgd(0.5), mesh, fsdp, accumulate=accumulate)
    shards = fsdp.shard(everywhere(mesh, params), mesh)
    return mesh, made.step, shards, made.init(shards)


def batch(mesh, step):
    x = np.random.default_rng(step).standard_t(3, size=(24, WIDTH)).astype(np.float32)
    return rows(mesh, x)


def tables(state):
    return jax.tree.map(one_value, state.levels)


@pytest.fixture(scope="module")
def trained():
    """Tables, shards and states of four steps on two replicas, of which two fit levels."""
    fsdp = jaxcomp.qsdp("replica", *CODES, fit_at=schedules.every(2, steps=99))
    mesh, step, shards, state = make(fsdp, 2, accumulate=2)
    history = [jax.tree.map(np.asarray, (shards, state))]
    found = [tables(state)]
    for number in range(4):
        shards, state, _ = step(shards, state, batch(mesh, number))
        history.append(jax.tree.map(np.asarray, (shards, state)))
        found.append(tables(state))  # compares the replicas'
    return step, mesh, history, found


def test_levels_change_on_schedule_alone_for_each_parameter_and_direction(trained):
    _, _, history, found = trained
    assert found[0]["bias"] == (None, None)
    for name in ("first", "last"):
        for own in range(2):
            at = [step[name][own] for step in found]
            np.testing.assert_array_equal(at[0], np.linspace(0, 1, at[0].size, dtype=np.float32))
            np.testing.assert_array_equal(at[1], at[0])
            np.testing.assert_array_equal(at[3], at[2])
            assert np.abs(at[2] - at[1]).max() > 0.01 and np.any(at[4] != at[2])
    distinct = {np.asarray(x).tobytes() for x in jax.tree.leaves(found[2])}
    assert len(distinct) == 4
    assert history[4][1].rounds == {"all": 4, "levels": 2}


def test_what_was_learned_survives_and_the_run_goes_on_bit_for_bit(trained):
    step, mesh, history, _ = trained
    shards, state = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), history[2], step_inputs(trained)
    )
    for number in (2, 3):
        shards, state, _ = step(shards, state, batch(mesh, number))
    jax.tree.map(np.testing.assert_array_equal, (shards, state), history[4])


def step_inputs(trained):
    fsdp = jaxcomp.qsdp("replica", *CODES)
    _, _, shards, state = make(fsdp, trained[1].size)
    return shards, state


def test_learned_levels_lose_less_of_real_weights_and_gradients(trained):
    # Of a network that has trained: its weights, and the gradient of its loss.
    (shards, _), fsdp = trained[2][4], jaxcomp.qsdp("replica")
    whole = fsdp.unshard(jax.tree.map(jnp.asarray, shards), trained[1])
    x = np.asarray(batch(trained[1], 5))

    def loss(p):
        return jnp.mean((jnp.tanh(x @ p["first"]) @ p["last"] + p["bias"][None] - x) ** 2)

    gradient = jax.grad(loss)(whole)
    cases = (whole["first"], "nearest", (3, 5)), (gradient["last"], "stochastic", (2, 4))
    for values, rounding, widths in cases:
        values = np.asarray(values).reshape(-1)
        for bits in widths:
            code = learned_levels(bits, 256, rounding)
            uniform = quantize(bits, 256, "minmax", rounding)

            @jax.jit
            def errors(x, code=code, uniform=uniform):
                table = code.levels.fit(jnp.asarray(code.levels.start), code.levels.tally(x))
                error = lambda code, key: jnp.mean(
                    (code.decode(code.encode(x, key, PRIVATE), key) - x) ** 2
                )
                return error(code, PRIVATE._replace(levels=table)), error(uniform, PRIVATE)

            learned, even = errors(values)
            assert learned < 0.95 * even, (rounding, bits)


@pytest.mark.parametrize("code", [learned_levels(2, 64), rotated(learned_levels(2, 64), block=64)])
def test_layers_that_are_scanned_over_have_levels_of_their_own(code):
    fsdp = jaxcomp.qsdp("replica", code, code)
    rng = np.random.default_rng(0)
    pair = np.stack([rng.normal(size=(32, 32)), rng.laplace(size=(32, 32))]).astype(np.float32) / 6

    def loss(shards, x):
        layer = fsdp.layer(lambda w, x: jnp.tanh(x @ w))
        return jnp.mean(jax.lax.scan(lambda x, w: (layer(w, x), None), x, shards["pair"])[0] ** 2)

    mesh = mesh_of(2)
    made = jaxcomp.qsdp_train_step(loss, optax.sgd(0.1), mesh, fsdp)
    shards = fsdp.shard(everywhere(mesh, {"pair": pair}), mesh, lambda path, leaf: True)
    x = rows(mesh, rng.normal(size=(8, 32)).astype(np.float32))
    _, state, _ = made.step(shards, made.init(shards), x)
    for table in tables(state)["pair"]:
        assert table.shape == (2, 4)
        for layer in table:
            assert np.abs(layer - np.linspace(0, 1, 4)).max() > 0.01
        assert np.any(table[0] != table[1])
