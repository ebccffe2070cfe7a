"""Shards over a slow and a fast axis: equal weights, exact means, and what crosses which axis."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.replicas.resize import resize
from tests.helpers.layered import (
    ROUNDING,
    assert_close,
    gathered,
    odd_tree,
    on,
    sharded,
    stacked,
    start,
)
from tests.helpers.replicas import everywhere, mesh_of, one_value

hybrid = functools.partial(jaxcomp.qsdp, "replica", fast_axis="fast")
exact = functools.partial(hybrid, jaxcomp.identity(), jaxcomp.identity())
CUT = P(("fast", "replica"))
NEVER_EXACT = {"exact": lambda *_: False}


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 4), (4, 1)])
def test_shards_of_any_size_come_back_and_lie_fast_axis_first(sizes):
    params, fsdp = odd_tree(), exact()
    mesh, shards = sharded(fsdp, params, *sizes, stacked=stacked)
    jax.tree.map(np.testing.assert_array_equal, fsdp.unshard(shards, mesh), params)
    data = shards["matrix"].data
    flat = np.pad(params["matrix"].reshape(-1), (0, -params["matrix"].size % mesh.size))
    pieces = flat.reshape(sizes[1], sizes[0], -1)
    where = {device: place for place, device in np.ndenumerate(mesh.devices)}
    for piece in data.addressable_shards:
        slow, fast = where[piece.device]
        np.testing.assert_array_equal(piece.data[0], pieces[fast, slow])


def test_all_devices_compute_with_what_as_many_shards_of_one_axis_give():
    code = jaxcomp.quantize(4, block=64, range="minmax")
    params = {"a": odd_tree()["matrix"], "bias": odd_tree()["less than the axis"]}
    full = gathered(hybrid(code, code), params, 2, 3)
    want = gathered(jaxcomp.qsdp("replica", code, code), params, 6)
    for name, copies in full.items():
        for copy in copies:
            assert np.asarray(copy).tobytes() == np.asarray(want[name][0]).tobytes()


CODE = jaxcomp.quantize(2, block=8, range="minmax", rounding="stochastic", scale_dtype="float32")


@pytest.mark.parametrize(
    ("codes", "num_coins", "fast_bytes"),
    [
        # Each entry's mean inside the fast axis is sent by two; inside, two chunks of 16 floats.
        ({"gradients": CODE}, 2, 2 * 4 * 16),
        # Two chunks of 16 codes of 2 bits and two blocks' ranges, 20 bytes, to whole units of 16.
        ({"gradients": jaxcomp.identity(), "fast_gradients": CODE}, 4, 2 * 32),
    ],
)
def test_gradients_are_means_with_noise_of_every_devices_own(codes, num_coins, fast_bytes):
    num_draws, step = 512, 2 / 3
    slope = np.random.default_rng(0).uniform(-1, 1, 8).astype(np.float32)
    slope[:2] = 1.0, -1.0  # the range of every block
    fsdp = hybrid(jaxcomp.identity(), **codes, **NEVER_EXACT)
    mesh, shards = sharded(fsdp, np.zeros(32, np.float32), 2, 2)

    def grads(shards, counts):
        def draw(_, count):
            # All devices have the same gradient, and the same in every chunk.
            loss = lambda shards: jnp.vdot(
                fsdp.gather(fsdp.local(shards, count)), jnp.tile(slope, 4)
            )
            return _, jax.grad(loss)(shards).data[0]

        return lax.scan(draw, 0, counts)[1][None]

    grads = jax.shard_map(grads, mesh=mesh, in_specs=(CUT, P()), out_specs=CUT)
    inputs = shards, jnp.arange(num_draws)
    compiled = jax.jit(grads).lower(*inputs).compile()
    [scattered] = [
        row.operand_bytes
        for row in report.collectives(compiled, mesh)
        if (row.op, row.axes) == ("all-to-all", ("fast",))
    ]
    assert scattered == fast_bytes
    got = np.asarray(compiled(*inputs))  # [4, draws, 8]
    # A coin of probability p between neighbours: variance p (1 - p) in steps.
    share = (slope + 1) / step % 1
    variance = step**2 * share * (1 - share) / num_coins
    assert np.all(np.abs(got.mean(1) - slope) <= 5 * np.sqrt(variance / num_draws) + 1e-6)
    assert np.abs(got.var(axis=1).mean() / variance.mean() - 1) < 5 * np.sqrt(2 / num_draws / 20)
    # Chunks are alike, so that noise that two of them share would show.
    noise = (got - slope)[..., 2:].reshape(4, -1)
    others = np.corrcoef(noise)[~np.eye(4, dtype=bool)]
    assert np.abs(others).max() < 5 / np.sqrt(num_draws * 6 / 2)


def test_unbiased_codes_leave_the_padding_alone():
    # Five entries in four shards of two; a zero of one bit comes out as a coin.
    code = jaxcomp.quantize(1, rounding="stochastic")
    fsdp = hybrid(jaxcomp.identity(), code, **NEVER_EXACT)
    mesh, shards = sharded(fsdp, np.zeros(5, np.float32), 2, 2)

    def grad(shards, slope):
        loss = lambda shards: jnp.vdot(fsdp.gather(fsdp.local(shards, jnp.int32(0))), slope)
        return jax.grad(loss)(shards).data

    grad = jax.shard_map(grad, mesh=mesh, in_specs=(CUT, P()), out_specs=CUT)
    got = np.asarray(jax.jit(grad)(shards, jnp.ones(5))).reshape(-1)
    np.testing.assert_array_equal(got != 0, [True] * 5 + [False] * 3)


NUMEL, MESSAGE = 2 * 64 * 1024, (8 + 2 * 16 / 1024) / 8  # of a layer; bytes of a parameter


@functools.cache
def layers_grad(fsdp, *sizes, num_layers=2):
    """The compiled gradient of some layers of NUMEL parameters each, and its mesh."""
    layers = {"up": jnp.zeros((num_layers, 64, 1024)), "down": jnp.zeros((num_layers, 1024, 64))}
    mesh, shards = sharded(fsdp, layers, *sizes, stacked=lambda *_: True)

    def loss(shards, x_and_count):
        x, count = x_and_count
        block = fsdp.layer(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"])
        x = jaxcomp.replicas.types.to_varying(x, fsdp.axes)
        x, _ = lax.scan(lambda x, p: (block(p, x), None), x, fsdp.local(shards, count))
        return jnp.sum(x**2)

    cut = P(fsdp.axes)
    grad = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(cut, P()), out_specs=cut)
    return jax.jit(grad).lower(shards, (jnp.ones((1, 64)), jnp.int32(0))).compile(), mesh


def test_a_share_of_the_bytes_crosses_the_slow_axis_and_weights_cross_it_once_if_kept():
    slow, fast, num_layers = 2, 4, 2

    def sent(fsdp, *sizes):
        compiled, mesh = layers_grad(fsdp, *sizes, num_layers=num_layers)
        return {axis: report.sent_bytes(compiled, mesh, axis) for axis in mesh.axis_names}

    one = sent(jaxcomp.qsdp("replica"), slow)["replica"]
    two = sent(hybrid(), slow, fast)
    kept = sent(hybrid(secondary=True), slow, fast)
    message = NUMEL * MESSAGE / (slow * fast)  # of one shard of a layer
    assert one == num_layers * 3 * (slow - 1) * NUMEL * MESSAGE / slow
    assert two["replica"] == one / fast
    assert kept["replica"] == two["replica"] * 2 / 3
    # Inside: two gathers of the codes of `slow` shards, and the exact mean of the gradient.
    exact_bytes = 4 * NUMEL * (fast - 1) / fast
    codes = 2 * (fast - 1) * slow * message
    assert two["fast"] == kept["fast"] == num_layers * (codes + exact_bytes)


def test_a_secondary_shard_is_the_codes_that_crossed_the_slow_axis():
    num_layers, fast = 2, 4

    def planned(**options):
        compiled, _ = layers_grad(hybrid(**options), 2, fast, num_layers=num_layers)
        return compiled.memory_analysis().temp_size_in_bytes

    codes = num_layers * NUMEL * MESSAGE / fast
    assert 0.9 * codes < planned(secondary=True) - planned() < 1.1 * codes


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(64, name="down")(jnp.tanh(nn.Dense(128, name="up")(x))), None


@pytest.mark.parametrize("secondary", [False, True])
def test_remat_keeps_secondary_shards_of_scanned_layers_by_policy(secondary):
    slow, fast, length = 2, 2, 3
    fsdp = exact(secondary=secondary)
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": length}
    layer = nn.remat(nn.map_variables(Block, "params", fsdp.gather), policy=fsdp.remat_policy)
    model, plain = nn.scan(layer, **axes)(), nn.scan(Block, **axes)()
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    params = plain.init(jax.random.key(0), x, None)["params"]
    loss = lambda model, params, x: jnp.mean(model.apply({"params": params}, x, None)[0] ** 2)
    mesh = mesh_of(slow, fast, second="fast")
    step = jaxcomp.qsdp_train_step(functools.partial(loss, model), optax.sgd(0.5), mesh, fsdp)
    shards = fsdp.shard(everywhere(mesh, params), mesh, lambda *_: True)
    inputs = shards, step.init(shards), on(mesh, x)
    rows = report.collectives(step.step.lower(*inputs).compile(), mesh)
    gathers = lambda *axes: sum(r.count for r in rows if (r.op, r.axes) == ("all-gather", axes))
    assert gathers("replica") == (1 if secondary else 2) * length
    assert gathers("fast") == 2 * length
    shards, _, metrics = step.step(*inputs)
    value, grads = jax.jit(jax.value_and_grad(functools.partial(loss, plain)))(params, x)
    assert abs(metrics["loss"].mean() - value) < 1e-5 * value
    want = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    assert_close(fsdp.unshard(shards, mesh), want, ROUNDING)


def test_learned_levels_are_equal_on_all_devices_and_survive_another_mesh():
    codes = jaxcomp.learned_levels(3, 64), jaxcomp.learned_levels(2, 64, "stochastic")
    fsdp, params = hybrid(*codes), {"square": odd_tree()["matrix"][:, :33] / 6}

    def begin(fsdp, *sizes):
        loss = lambda shards, x: jnp.mean((jnp.tanh(x @ fsdp.gather(shards)["square"]) - x) ** 2)
        mesh, shards = sharded(fsdp, params, *sizes)
        made = jaxcomp.qsdp_train_step(loss, optax.sgd(0.1), mesh, fsdp)
        return mesh, made.step, shards, made.init(shards)

    mesh, step, shards, state = begin(fsdp, 2, 2)
    for seed in range(2):
        x = np.random.default_rng(seed).standard_t(3, size=(12, 33)).astype(np.float32)
        shards, state, _ = step(shards, state, on(mesh, x))
    tables = jax.tree.map(one_value, state.levels)
    assert all(np.abs(x - np.linspace(0, 1, x.size)).max() > 0.01 for x in tables["square"])
    assert state.rounds == {"all": 2, "levels": 2}
    whole = fsdp.unshard(shards, mesh)
    other = dataclasses.replace(fsdp, fast_axis=None)
    mesh, _, *like = begin(other, 3)
    shards, state = resize((shards, state), tuple(like))
    jax.tree.map(np.testing.assert_array_equal, other.unshard(shards, mesh), whole)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(one_value, state.levels), tables)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_gradients_are_counted_before_they_are_coded_and_as_much_as_all_replicas_send(sizes):
    (slow, fast), numel = (*sizes, 1)[:2], 512
    code = jaxcomp.learned_levels(2, 64, "stochastic")
    fast_axis = "fast" if fast > 1 else None
    fsdp = jaxcomp.qsdp("replica", jaxcomp.identity(), code, fast_axis=fast_axis, **NEVER_EXACT)
    slopes = np.random.default_rng(0).normal(size=(slow, fast, numel)).astype(np.float32)
    mesh, shards = sharded(fsdp, np.zeros(numel, np.float32), *sizes)

    def tally(shard, slope, ones):
        local = lambda counter: fsdp.local(shard, jnp.int32(0), counters=counter)
        loss = lambda counter: jnp.vdot(fsdp.gather(local(counter)), slope[0])
        counter = jaxcomp.replicas.types.to_varying(jnp.full(1024, ones), fsdp.axes)
        return jax.grad(loss)(counter)[None]

    rows = P(mesh.axis_names)
    specs = {"in_specs": (P(fsdp.axes), rows, P()), "out_specs": rows}
    count = jax.jit(jax.shard_map(tally, mesh=mesh, **specs))
    given = shards, on(mesh, slopes.reshape(-1, numel))
    np.testing.assert_array_equal(count(*given, 0.0), 0)
    # Of the means inside the fast axis, each device counts one of the chunks that it sends on.
    chunks = slopes.mean(axis=1).reshape(slow, fast, slow, -1)
    want = [code.levels.tally(chunks[i, j, i]) for i in range(slow) for j in range(fast)]
    np.testing.assert_array_equal(count(*given, 1.0), want)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jaxcomp.qsdp("fast", fast_axis="fast"), "both 'fast'; name two axes"),
        (lambda: sharded(exact(), odd_tree(), 2), "the mesh has no axis 'fast'"),
        (
            lambda: sharded(
                hybrid(fast_gradients=jaxcomp.learned_levels(2), **NEVER_EXACT), odd_tree(), 2, 2
            ),
            "levels are learned from what crosses the slow axis only",
        ),
        (lambda: start(exact(), optax.sgd(1), 2), r"\('replica',\), needs one of \('fast', 'rep"),
        (
            lambda: start(jaxcomp.qsdp("replica"), optax.sgd(1), 2, 2),
            r"\('replica', 'fast'\), needs one of \('replica',\) and no others.*fast_axis=fast",
        ),
    ],
)
def test_mistakes_are_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()
