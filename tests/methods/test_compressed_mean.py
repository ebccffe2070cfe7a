"""The mean through any compressor: every property for every compressor and number of replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.exchange import wire
from jaxcomp.exchange.buckets import make_plan
from jaxcomp.exchange.messages import message_bytes, payload_like
from tests.helpers.replicas import SIZES, everywhere, mesh_of, one_value, rows, state_of, transform

# A mean alone trains nothing.
pytestmark = pytest.mark.filterwarnings("ignore:parameters are")

COMPRESSORS = [
    jaxcomp.cast("bfloat16"),
    jaxcomp.quantize(4, block=16, rounding="stochastic"),
    jaxcomp.sign(),
    jaxcomp.random_k(1 / 4),
    jaxcomp.top_k(0.1),
    jaxcomp.group_top_1(4),
    jaxcomp.compose(jaxcomp.random_k(1 / 2), jaxcomp.top_k(0.25), jaxcomp.quantize(4)),
]
# What depends on the number of replicas is the exchange: all numbers of what is summed and coded.
SUMMED, CODED = jaxcomp.identity(), jaxcomp.quantize(8, block=16)
CASES = [(code, size) for code in (SUMMED, CODED) for size in SIZES]
CASES += [(code, size) for code in COMPRESSORS for size in (2, 3)]
SHAPES = {"bias": (7,), "kernel": (30, 20)}
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}


def is_bias(path, leaf):
    return path.endswith("bias")


def mean(compressor, **options):
    return jaxcomp.compressed_mean(compressor, "replica", **({"exact": is_bias} | options))


def gradients(num_replicas, step=0, params=PARAMS):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: rng.normal(size=(num_replicas, *p.shape)).astype(p.dtype), params)


def whole_gradients(num_replicas, step=0, params=PARAMS):
    """Integer values, whose sums over replicas are exact in any order."""
    rng = np.random.default_rng(step)
    return jax.tree.map(
        lambda p: rng.integers(-99, 100, (num_replicas, *p.shape)).astype(p.dtype), params
    )


def start(tx, mesh, params=PARAMS):
    """Compiles a transformation ahead of time: `(update, state, parameters on the mesh)`.

    A compiled function refuses arguments of other types or shardings, so feeding it the state
    that it returned proves that a step never compiles again.
    """
    init, update = transform(tx, mesh, params)
    params = everywhere(mesh, params)
    state = init(params)
    updates = rows(mesh, jax.tree.map(lambda p: np.zeros((mesh.size, *p.shape), p.dtype), params))
    return update.lower(updates, state, params).compile(), state, params


def expected_bytes(compressor, num_replicas, exchange):
    """What one replica sends, by the formulas of `wire`, for the tree PARAMS."""
    exact = jaxcomp.identity()
    label = lambda path, leaf: exact if is_bias(path, leaf) else compressor
    others, total = num_replicas - 1, 0.0
    for code, _, _, numel in make_plan(PARAMS, label, num_replicas).buckets:
        if code == exact:
            total += 2 * 4 * numel * others / num_replicas
        elif code.linear:
            leaves = jax.tree.leaves(payload_like(code, numel))  # summed as they are
            total += 2 * sum(x.size * x.dtype.itemsize for x in leaves) * others / num_replicas
        elif exchange is wire.gathered:
            total += message_bytes(code, numel) * others
        else:
            total += 2 * message_bytes(code, numel // num_replicas) * others
    return total


@pytest.mark.parametrize(
    ("compressor", "num_replicas"), CASES, ids=lambda value: getattr(value, "name", value)
)
def test_nothing_is_lost_replicas_agree_and_bytes_are_as_stated(compressor, num_replicas):
    exchange = wire.gathered if num_replicas == 2 else wire.two_shot
    mesh = mesh_of(num_replicas)
    update, state, params = start(mean(exchange(compressor)), mesh)

    sent = expected_bytes(compressor, num_replicas, exchange)
    assert report.sent_bytes(update, mesh) == pytest.approx(sent, rel=1e-12)
    messages = [row for row in report.collectives(update, mesh) if row.sent_bytes]
    ops = {f"{row.op} {row.shape.split('[')[0]}" for row in messages}
    lossy = set() if compressor.linear else {"all-gather u8", "all-to-all u8"}
    lossy -= {"all-to-all u8"} if exchange is wire.gathered else set()
    assert ops == (lossy | {"all-reduce f32"} if num_replicas > 1 else set())

    num_steps, peak = 3, 0.0
    went_in, came_out = ({k: 0.0 for k in SHAPES} for _ in range(2))
    for step in range(num_steps):
        grads = gradients(num_replicas, step)
        updates, state = update(rows(mesh, grads), state, params)
        for name, x in updates.items():
            value = one_value(x)
            assert value.shape == SHAPES[name] and value.dtype == np.float32
            went_in[name] += grads[name].mean(axis=0, dtype=np.float64)
            came_out[name] += np.float64(value)
            peak = max(peak, np.abs(grads[name]).max(), np.abs(value).max())
    residual = state_of(state, "residual")
    assert residual["bias"] is None
    kept = 0.0 if residual["kernel"] is None else np.float64(residual["kernel"]).mean(axis=0)
    if residual["kernel"] is not None:
        peak = max(peak, np.abs(np.asarray(residual["kernel"])).max())
    owned = [np.float64(x).reshape(-1) for x in state_of(state, "owner_residual") if x is not None]
    if owned:
        kept = kept + owned[0][:600].reshape(30, 20)
    assert int(state_of(state, "count")) == num_steps
    # A step rounds at most R + 6 times what is below twice the peak: in the sum over replicas and
    # its division, where residuals are added and subtracted, and in the codes' own products.
    atol = num_steps * (num_replicas + 6) * 2.0**-24 * 2 * peak
    np.testing.assert_allclose(came_out["bias"], went_in["bias"], rtol=0, atol=atol)
    np.testing.assert_allclose(came_out["kernel"] + kept, went_in["kernel"], rtol=0, atol=atol)


def pmean():
    """The uncompressed mean, as one would write it."""
    dense = lambda g: jax.lax.pmean(g.astype(jnp.float32), "replica").astype(g.dtype)
    return optax.stateless(lambda updates, params: jax.tree.map(dense, updates))


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_identity_is_the_uncompressed_mean_bit_for_bit(num_replicas):
    mesh = mesh_of(num_replicas)
    params = PARAMS | {"half": jnp.zeros((3, 5), "bfloat16")}
    update, state, replicated = start(mean(jaxcomp.identity()), mesh, params)
    plain, none, _ = start(pmean(), mesh, params)
    for step in range(2):
        grads = rows(mesh, whole_gradients(num_replicas, step, params))
        updates, state = update(grads, state, replicated)
        want, none = plain(grads, none, replicated)
        for name in params:
            assert updates[name].dtype == params[name].dtype
            assert one_value(updates[name]).tobytes() == one_value(want[name]).tobytes()


def test_a_bucket_has_neighbouring_layers_and_the_last_ones_come_first():
    mesh, layers = mesh_of(2), range(11, -1, -1)
    params = {f"layer_{i}": np.zeros((4, 16), np.float32) for i in layers}
    code = jaxcomp.two_shot(CODED, bucket_numel=128)
    update, state, replicated = start(mean(code, exact=lambda path, leaf: False), mesh, params)
    grads = gradients(2, 0, params)
    updates, state = update(rows(mesh, grads), state, replicated)
    [(name, owned)] = state_of(state, "owner_residual").items()
    assert name == "last_layers_first" and len(owned) == 6
    for i, owed in zip(layers, np.reshape(owned, (12, 4, 16)), strict=True):
        layer = f"layer_{i}"
        residual = np.asarray(state_of(state, "residual")[layer]).mean(axis=0)
        assert np.any(owed)
        np.testing.assert_allclose(
            one_value(updates[layer]) + residual + owed,
            grads[layer].mean(axis=0, dtype=np.float64),
            rtol=0,
            atol=9 * 2.0**-24 * 2 * np.abs(grads[layer]).max(),  # as above
        )


@pytest.mark.parametrize("exact", [True, False])
def test_a_scale_that_overflows_costs_a_step_and_not_the_residual(exact):
    mesh = mesh_of(2)
    code = jaxcomp.quantize(8, block=16, scale_dtype="float16")  # its scales end at 65,504
    tx = jaxcomp.compressed_mean(code, "replica", exact=lambda path, leaf: exact and path == "bias")
    update, state, params = start(tx, mesh)
    _, state = update(rows(mesh, gradients(2)), state, params)
    large = jax.tree.map(lambda g: 1e8 * g, gradients(2))
    updates, after = update(rows(mesh, large), state, params)
    assert np.all(np.isnan(one_value(updates["kernel"])))
    for old, new in zip(*map(jax.tree.leaves, (state[1:], after[1:])), strict=True):
        np.testing.assert_array_equal(old, new)


def test_policies_send_each_leaf_by_its_own_compressor():
    mesh = mesh_of(2)
    shapes = {"embed": (16, 16), "head": (16, 16), "up": (4, 64)}
    params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    policy = jaxcomp.by_path(
        ("embed", jaxcomp.quantize(8)), ("head", jaxcomp.identity()), (".*", jaxcomp.sign())
    )
    update, state, replicated = start(mean(policy), mesh, params)
    messages = {
        (row.op, row.operand_bytes)
        for row in report.collectives(update, mesh)
        if row.op != "all-to-all"
    }
    # Chunks of 128: 128 codes and a bfloat16; 16 bytes of signs and a float32, both to whole units
    # of 16 bytes; and 256 floats.
    assert messages == {("all-gather", 144), ("all-gather", 32), ("all-reduce", 4 * 256)}
    grads = whole_gradients(2, 0, params)
    updates, state = update(rows(mesh, grads), state, replicated)
    np.testing.assert_array_equal(one_value(updates["head"]), grads["head"].mean(axis=0))
    assert report.exact_leaves(params, state) == ["head"]
    signs = np.unique(np.abs(one_value(updates["up"])))
    assert len(signs) == 2  # one scale for each of two owners

    with pytest.raises(ValueError, match="no rule covers the leaf 'embed'"):
        start(mean(jaxcomp.by_path(("head|up", jaxcomp.sign()))), mesh, params)


@pytest.mark.parametrize("exchange", [wire.gathered, wire.two_shot])
def test_without_error_feedback_a_step_forgets_what_it_did_not_send(exchange):
    mesh = mesh_of(2)
    tx = mean(exchange(jaxcomp.quantize(4, block=16)), error_feedback=False)
    update, state, params = start(tx, mesh)
    assert sum(x.size for x in jax.tree.leaves(state)) == 1  # the counter alone
    grads = gradients(2)
    first, state = update(rows(mesh, grads), state, params)
    second, state = update(rows(mesh, grads), state, params)
    for name in SHAPES:
        np.testing.assert_array_equal(one_value(first[name]), one_value(second[name]))
    error = np.abs(one_value(first["kernel"]) - grads["kernel"].mean(axis=0)).max()
    # Half a step of each rounding: 7 steps from 0 to the block's maximum, at most the peak.
    assert 0 < error <= 2 * np.abs(grads["kernel"]).max() / 14 * 1.01


def test_seeds_and_steps_change_the_noise():
    mesh, grads = mesh_of(2), gradients(2)

    def first_two(seed):
        code = jaxcomp.quantize(2, rounding="stochastic")
        tx = mean(jaxcomp.two_shot(code, seed=seed), error_feedback=False)
        update, state, params = start(tx, mesh)
        first, state = update(rows(mesh, grads), state, params)
        second, state = update(rows(mesh, grads), state, params)
        return one_value(first["kernel"]), one_value(second["kernel"])

    (a, b), (c, _), (d, _) = first_two(0), first_two(1), first_two(0)
    np.testing.assert_array_equal(a, d)
    assert (a != b).mean() > 0.1 and (a != c).mean() > 0.1


BAD = [
    ("kernel", (0, 0), np.nan),
    ("kernel", (-1, -1), np.inf),
    ("bias", (0,), -np.inf),
    ("bias", (-1,), np.nan),
    ("half", (0, 0), np.inf),
    ("half", (-1, -1), np.nan),
]


def test_one_bad_value_on_one_replica_gives_nan_on_all_and_leaves_residuals():
    mesh = mesh_of(3)
    params = PARAMS | {"half": jnp.zeros((40, 40), "bfloat16")}
    update, state, replicated = start(mean(jaxcomp.quantize(4)), mesh, params)
    grads = gradients(3, 0, params)
    _, state = update(rows(mesh, grads), state, replicated)
    residuals = lambda state: jax.tree.leaves(
        jax.tree.map(np.asarray, (state_of(state, "residual"), state_of(state, "owner_residual")))
    )
    before = residuals(state)
    assert len(before) == 3 and all(np.any(x) for x in before)
    for i, (name, place, value) in enumerate(BAD):
        bad = jax.tree.map(np.array, grads)
        bad[name][(i % 3, *place)] = value
        updates, state = update(rows(mesh, bad), state, replicated)
        assert all(np.all(np.isnan(np.float32(one_value(x)))) for x in updates.values())
        for old, new in zip(before, residuals(state), strict=True):
            np.testing.assert_array_equal(old, new)
    updates, state = update(rows(mesh, grads), state, replicated)
    assert all(np.all(np.isfinite(np.float32(one_value(x)))) for x in updates.values())
    assert any(np.any(old != new) for old, new in zip(before, residuals(state), strict=True))


def test_an_infinity_that_its_code_makes_finite_is_seen_beside_exact_leaves():
    # One of three replicas: what tells the others is a third, beside the mean of the bias.
    mesh = mesh_of(3)
    update, state, params = start(mean(jaxcomp.cast("float16")), mesh)
    grads = gradients(3)
    grads["kernel"][1, 3, 3] = np.inf
    updates, state = update(rows(mesh, grads), state, params)
    assert all(np.all(np.isnan(one_value(x))) for x in updates.values())
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state_of(state, "residual")))


def test_apply_if_finite_inside_skips_a_bad_step_everywhere():
    mesh = mesh_of(2)
    tx = optax.chain(mean(jaxcomp.quantize(4)), optax.apply_if_finite(optax.adam(1e-2), 3))
    update, state, params = start(tx, mesh)
    grads = gradients(2)
    grads["kernel"][1, 0, 0] = np.nan
    updates, state = update(rows(mesh, grads), state, params)
    assert all(np.all(one_value(x) == 0) for x in updates.values())
    assert int(state_of(state, "total_notfinite")) == 1


def test_updates_that_are_reduced_already_are_refused():
    mesh = mesh_of(2)
    tx = jaxcomp.per_replica(mean(jaxcomp.sign()), "replica")
    params = everywhere(mesh, PARAMS)

    def step(params, x):
        loss = lambda p: jnp.sum(p["kernel"] * x["kernel"][0]) + jnp.sum(p["bias"])
        return tx.update(jax.grad(loss)(params), tx.init(params), params)[0]

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("replica")), out_specs=P()))
    with pytest.raises(ValueError, match=r"must vary over 'replica'.*local_params"):
        step(params, rows(mesh, gradients(2)))
