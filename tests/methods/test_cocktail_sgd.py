"""CocktailSGD: its invariants, what it reduces to, what it sends, and the authors' own steps."""

import dataclasses
import functools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.exchange.messages import message_bytes
from tests.helpers import replay, replicas
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows, state_of, transform

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "cocktail_sgd.npz"
SHAPES = {"bias": (7,), "kernel": (33, 40)}
RATE = 0.125

CODES = {
    "cocktail": jaxcomp.cocktail(0.5, 0.5),
    "cocktail, gathered": jaxcomp.gathered(jaxcomp.cocktail(0.5, 0.5)),
    "groups": jaxcomp.compose(jaxcomp.random_k(0.25), jaxcomp.group_top_1(8), jaxcomp.quantize(4)),
    "quantize": jaxcomp.quantize(2, rounding="stochastic"),
    "identity": jaxcomp.identity(),
}


def make(inner=None, **options):
    return jaxcomp.cocktail_sgd(inner or optax.sgd(RATE), "replica", **options)


random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def flat(tree):
    """The leaves behind each other, behind the leading axes that they have in common."""
    leaves = [np.asarray(tree[name], np.float64) for name in SHAPES]
    lead = [
        x.shape[: x.ndim - len(shape)] for x, shape in zip(leaves, SHAPES.values(), strict=True)
    ]
    return np.concatenate([x.reshape(*n, -1) for x, n in zip(leaves, lead, strict=True)], axis=-1)


def mean_parameters(params, state):
    """The mean over replicas of their parameters, plus what owners still hold: z of (I2)."""
    z = flat(params) + flat(state.drift).mean(axis=0)
    held = [np.asarray(e, np.float64).reshape(-1) for e in state.owner_residual if e is not None]
    return z + np.concatenate(held)[: z.size] if held else z


class Run:
    """Steps of a transformation, and the parameters that they lead to."""

    def __init__(self, tx, num_replicas=4, dtype=np.float32):
        self.mesh = mesh_of(num_replicas)
        self.params = everywhere(self.mesh, random_tree(0, dtype=dtype))
        self.init, self.update = transform(tx, self.mesh, self.params)
        self.state = self.init(self.params)

    def step(self, grads):
        updates, self.state = self.update(rows(self.mesh, grads), self.state, self.params)
        self.params = optax.apply_updates(self.params, updates)
        for x in jax.tree.leaves(self.params):
            one_value(x)
        return updates

    def local(self, name="kernel"):
        return np.asarray(self.params[name]) + np.asarray(self.state.drift[name])


@pytest.mark.parametrize(
    ("name", "options", "num_replicas"),
    [
        *((name, {}, 3) for name in CODES),
        ("cocktail", {}, 1),
        ("groups", {"sync_every": 3}, 4),
        ("cocktail", {"warmup_steps": 2, "sync_every": 2}, 4),
        ("cocktail", {"delayed": False}, 3),
        ("groups", {"delayed": False, "sync_every": 3}, 4),
        ("cocktail", {"delayed": False, "warmup_steps": 2, "sync_every": 2}, 4),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_the_mean_of_replicas_follows_plain_sgd_whatever_is_sent(name, options, num_replicas):
    with jax.enable_x64(True):
        run = Run(make(compressor=CODES[name], **options), num_replicas, np.float64)
        for step in range(6):
            grads = random_tree(step, num_replicas, dtype=np.float64)
            wanted = mean_parameters(run.params, run.state) - RATE * flat(grads).mean(axis=0)
            run.step(grads)
            np.testing.assert_allclose(
                mean_parameters(run.params, run.state), wanted, rtol=0, atol=1e-14
            )


def test_the_inner_optimizer_sees_the_parameters_of_its_own_replica():
    run = Run(make(optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0)), sync_every=9))
    run.step(random_tree(1, 4))
    before = run.local()
    run.step(jax.tree.map(np.zeros_like, random_tree(1, 4)))
    np.testing.assert_allclose(run.local(), 0.5 * before, rtol=0, atol=1e-6)


def test_what_a_narrow_consensus_rounds_off_is_not_lost():
    run = Run(make(compressor=CODES["cocktail"]), dtype=jnp.bfloat16)
    for step in range(8):
        grads = random_tree(step, 4)
        wanted = mean_parameters(run.params, run.state) - RATE * flat(grads).mean(axis=0)
        run.step(grads)
        # float32 rounding of sums; what bfloat16 rounds off is 2**-9 of a parameter.
        np.testing.assert_allclose(
            mean_parameters(run.params, run.state), wanted, rtol=0, atol=1e-6
        )


def test_with_identity_it_is_averaging_one_step_late():
    # Quarters and integers: every sum is exact.
    run = Run(make(optax.sgd(0.25), compressor=jaxcomp.identity()))
    run.params = jax.tree.map(jnp.round, run.params)
    for step in range(5):
        grads = jax.tree.map(np.round, random_tree(step, 4))
        local = run.local()
        mean = local.mean(axis=0)
        run.step(grads)
        np.testing.assert_array_equal(run.params["kernel"], mean)
        np.testing.assert_array_equal(run.local(), mean - 0.25 * grads["kernel"])


@pytest.mark.parametrize("every", [1, 2])
def test_without_delay_replicas_meet_after_the_step_that_ends_an_interval(every):
    run = Run(make(optax.sgd(0.25), compressor=jaxcomp.identity(), delayed=False, sync_every=every))
    run.params = jax.tree.map(jnp.round, run.params)
    for step in range(4):
        grads = jax.tree.map(np.round, random_tree(step, 4))
        moved = run.local() - 0.25 * grads["kernel"]
        run.step(grads)
        meets = step % every == every - 1
        wanted = np.broadcast_to(moved.mean(axis=0), moved.shape) if meets else moved
        np.testing.assert_array_equal(run.local(), wanted)


def test_alone_and_with_identity_a_replica_is_its_inner_optimizer():
    inner = optax.adam(RATE)
    run = Run(make(inner, compressor=jaxcomp.identity()), num_replicas=1)
    params = random_tree(0)
    state = inner.init(params)
    for step in range(5):
        grads = random_tree(step, 1)
        run.step(grads)
        updates, state = inner.update(jax.tree.map(lambda g: g[0], grads), state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(run.local()[0], params["kernel"], rtol=0, atol=1e-6)


def test_what_is_sent_does_not_depend_on_the_gradient_of_the_step():
    tx = make(compressor=CODES["cocktail"])
    first, second = Run(tx), Run(tx)
    for run in (first, second):
        run.step(random_tree(1, 4))
        run.step(random_tree(2, 4))
    updates = first.step(random_tree(3, 4)), second.step(random_tree(4, 4))
    assert any(np.any(np.asarray(u)) for u in jax.tree.leaves(updates[0]))
    for one, other in zip(*map(jax.tree.leaves, updates), strict=True):
        assert one_value(one).tobytes() == one_value(other).tobytes()


def test_warm_up_is_the_inner_optimizer_on_the_mean_gradient():
    inner = optax.adam(RATE)
    run = Run(make(inner, warmup_steps=3))
    params = random_tree(0)
    state = inner.init(params)
    for step in range(3):
        # Integers: their sum over four replicas is exact in any order.
        grads = jax.tree.map(lambda g: np.round(4 * g), random_tree(step, 4))
        run.step(grads)
        mean = jax.tree.map(lambda g: g.mean(axis=0), grads)
        updates, state = inner.update(mean, state, params)
        params = optax.apply_updates(params, updates)
        for name in SHAPES:
            for local in run.local(name):
                np.testing.assert_allclose(local, params[name], rtol=1e-6, atol=1e-6)
            drift = np.asarray(run.state.drift[name])
            # What 8 bits round off of a step of at most RATE, the same everywhere.
            assert np.all(drift == drift[:1]) and np.abs(drift).max() < RATE / 250
    run.step(random_tree(3, 4))
    assert np.abs(np.asarray(run.state.drift["kernel"])).max() > 1e-2


@pytest.mark.parametrize("delayed", [True, False])
def test_warm_up_neither_computes_nor_counts_the_coded_exchange(delayed):
    nan = lambda payload, shared: jnp.full(payload.numel, jnp.nan)
    code = dataclasses.replace(CODES["quantize"], decode=nan)
    run = Run(make(compressor=code, warmup_steps=2, delayed=delayed))
    for step in range(2):
        run.step(random_tree(step, 4))
        assert np.all(np.isfinite(flat(run.params)))
    assert {name: int(n) for name, n in run.state.rounds.items()} == {
        "all": 2,
        "synchronize": 0,
        "warmup": 2,
    }
    run.step(random_tree(2, 4))
    assert np.all(np.isnan(flat(run.params))) and int(run.state.rounds["synchronize"]) == 1


def test_a_method_without_warm_up_goes_on_from_its_end():
    tx = make(compressor=CODES["cocktail"], warmup_steps=2)
    whole, parts = Run(tx), Run(tx)
    for step in range(4):
        if step == 2:
            _, parts.update = transform(
                make(compressor=CODES["cocktail"]), parts.mesh, parts.params
            )
        for run in (whole, parts):
            run.step(random_tree(step, 4))
    for name in SHAPES:
        np.testing.assert_allclose(whole.local(name), parts.local(name), rtol=0, atol=1e-6)


def test_many_buckets_warm_up_as_one_does():
    inner = optax.adam(RATE)
    cut = lambda numel: jaxcomp.two_shot(jaxcomp.cocktail(), bucket_numel=numel)
    one, many = (Run(make(inner, warmup_steps=2, compressor=cut(n))) for n in (2**22, 512))
    for step in range(2):
        for run in (one, many):
            run.step(random_tree(step, 4))
    for name in SHAPES:
        np.testing.assert_allclose(one.params[name], many.params[name], rtol=0, atol=RATE / 100)


@pytest.mark.parametrize("sync_every", [1, 2, 10])
def test_every_entry_is_sent_within_the_promised_exchanges(sync_every):
    code = jaxcomp.random_k(0.1)
    run = Run(make(optax.sgd(1.0), compressor=code, sync_every=sync_every))
    run.step(jax.tree.map(np.ones_like, random_tree(0, 4)))
    start = flat(run.params)
    zero = jax.tree.map(np.zeros_like, random_tree(0, 4))
    for _ in range(10 * sync_every):
        run.step(zero)
    np.testing.assert_allclose(flat(run.params) - start, -1.0, rtol=0, atol=1e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_gradient_that_is_not_finite_stays_at_home(warmup_steps):
    run = Run(make(optax.adam(RATE), compressor=CODES["cocktail"], warmup_steps=warmup_steps))
    run.step(random_tree(1, 4))
    before = run.state
    bad = random_tree(2, 4)
    bad["kernel"][2, 5, 5] = np.nan
    run.step(bad)
    assert np.asarray(run.state.skipped).tolist() == [0, 0, 1, 0]
    moment, old = (state_of(state, "mu")["kernel"] for state in (run.state, before))
    np.testing.assert_array_equal(moment[2], old[2])
    assert np.all(np.asarray(moment[0]) != np.asarray(old[0]))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((run.params, run.state.drift)))


def test_a_gradient_that_is_not_finite_in_warm_up_is_left_out_by_all():
    run = Run(make(optax.adam(RATE), warmup_steps=2))
    start = flat(run.params)
    bad = random_tree(1, 4)
    bad["bias"][3, 0] = np.inf
    run.step(bad)
    assert np.asarray(run.state.skipped).tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(flat(run.params), start)


def compiled_step(mesh, **options):
    """The program of a step, and how many parameters it trains."""
    params = everywhere(mesh, {"kernel": jnp.zeros((512, 512)), "bias": jnp.zeros(512)})
    loss = lambda p, x: jnp.mean((x @ p["kernel"] + p["bias"][None]) ** 2)
    tx = jaxcomp.cocktail_sgd(optax.adam(1e-3), "replica", **options)
    functions = jaxcomp.train_step(loss, tx, mesh, "replica")
    state = functions.init(params)
    batch = rows(mesh, jnp.ones((16, 512)))
    compiled = functions.step.lower(params, state, batch).compile()
    return compiled, sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("delayed", [True, False])
def test_a_warm_up_step_sends_a_dense_mean_and_one_byte_a_parameter(delayed):
    mesh = mesh_of(4)
    compiled, numel = compiled_step(mesh, warmup_steps=5, delayed=delayed)
    sent = jaxcomp.report.sent_bytes_by_part(compiled, mesh, "replica")
    numel = math.ceil(numel / 1024) * 1024  # in chunks of whole blocks
    dense = 2 * 3 / 4 * 4 * numel
    chunk = message_bytes(jaxcomp.quantize(8), numel // 4)
    assert sent["warmup"] == dense + 3 * chunk < 1.13 * dense
    assert sent[""] == 0 < sent["synchronize"] < 0.01 * dense
    # A step takes one branch of a conditional: none of its collectives is outside of one.
    assert all(c.branch for c in jaxcomp.report.collectives(compiled, mesh))


def test_the_compiled_step_sends_what_the_compressor_promises():
    mesh = mesh_of(4)
    compiled, numel = compiled_step(mesh)
    kinds = {c.op for c in jaxcomp.report.collectives(compiled, mesh)}
    assert kinds == {"all-to-all", "all-gather"}
    sent = jaxcomp.report.sent_bytes(compiled, mesh, "replica")
    # Each chunk is of whole blocks of entries that are looked at, and of values that are kept.
    chunk = math.ceil(numel / 1024) * 1024 // 4
    num_blocks = math.ceil(math.ceil(chunk / 10) / 128)
    values = 26 * num_blocks
    # Each part in whole words, the message in whole units of 16 bytes.
    parts = 16 * num_blocks, values // 2, 2 * math.ceil(values / 128)
    words = sum(math.ceil(size / 4) for size in parts)
    assert sent == 2 * 3 * 16 * math.ceil(words / 4)
    assert sent * 8 / (2 * 3) < 0.1838 * chunk + 128 + 26 * 4 + 16


def test_the_authors_code_takes_the_same_steps(optimized):
    found = list(replay.errors(GOLDEN))
    assert len(found) == 10 and max(found) < 1e-6


def test_a_replay_of_wrong_settings_is_noticed(tmp_path):
    trace = dict(np.load(GOLDEN))
    trace["meta_json"] = np.array(str(trace["meta_json"]).replace('"lr": 0.02', '"lr": 0.021'))
    np.savez(tmp_path / "wrong.npz", **trace)
    assert replay.main([str(tmp_path / "wrong.npz")]) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [({"warmup_steps": -1}, "warmup_steps=-1"), ({"sync_every": 0}, "sync_every=0")],
)
def test_wrong_arguments_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        make(**options)


def test_an_inner_optimizer_that_averages_is_refused():
    averaging = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    with pytest.raises(ValueError, match="its inner optimizer must be local"):
        Run(make(optax.chain(averaging, optax.sgd(RATE))))


def test_parameters_are_needed():
    mesh = mesh_of(2)
    tx = make()

    def update(grads):
        params = jax.tree.map(lambda g: g[0] * 0, grads)
        return tx.update(grads, tx.init(params))

    with pytest.raises(ValueError, match="needs the parameters"):
        jax.shard_map(update, mesh=mesh, in_specs=P("replica"), out_specs=P())(random_tree(0, 2))
