"""Replicas of several devices: they send, update and keep a share each, and together all of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.replicas import fast
from tests.helpers import layered
from tests.helpers.every_method import METHODS
from tests.helpers.replicas import everywhere, mesh_of, one_value, state_of

WIDTH, HIDDEN = 16, 128
# Axes that divide evenly, that are filled up, and that there are none of.
PARAMS = {
    "bias": np.zeros(HIDDEN, np.float32),
    "down": np.random.default_rng(1).normal(size=(HIDDEN, WIDTH)).astype(np.float32) / 11,
    "gain": np.float32(1.5),
    "last": np.random.default_rng(2).normal(size=(WIDTH, 77)).astype(np.float32) / 4,
    "up": np.random.default_rng(3).normal(size=(WIDTH, HIDDEN)).astype(np.float32) / 4,
}
EXACT = optax.chain(
    jaxcomp.compressed_mean(jaxcomp.identity(), "replica"),
    jaxcomp.clip_by_global_norm(0.5),
    optax.adamw(1e-2),
)
DELAYED = jaxcomp.cocktail_sgd(optax.sgd(0.1), "replica", compressor=jaxcomp.quantize(8))
RARELY = {
    "sync_at": jaxcomp.schedules.every(4, 10, after=1),
    "variance_at": jaxcomp.schedules.until(1),
}
fast_mesh = functools.partial(mesh_of, second="fast")


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    out = params["gain"] * hidden @ params["down"]
    return jnp.mean((out - batch["y"]) ** 2) + 0.1 * jnp.mean((out @ params["last"]) ** 2)


def make_batch(step, bad=None):
    """24 rows, as many for each device; one of step `bad` is not finite."""
    batch = layered.make_batch(step)
    if step == bad:
        batch["x"][0] = np.nan
    return batch


def rows_of(mesh):
    """Where the rows of a batch lie."""
    return NamedSharding(mesh, P(mesh.axis_names))


@functools.cache
def compiled(mesh, tx, make=jaxcomp.train_step, **options):
    """A step's `init`, and its program: compiled once for all tests."""
    made = make(loss_fn, tx, mesh, "replica", **options)
    params = everywhere(mesh, PARAMS)
    args = params, made.init(params), jax.device_put(make_batch(0), rows_of(mesh))
    overlapped = isinstance(made.step, jaxcomp.OverlappedStep)
    return made.init, made.step.compile(*args) if overlapped else made.step.lower(*args).compile()


def train(
    mesh, tx, steps=3, *, make=jaxcomp.train_step, bad=None, params=PARAMS, state=None, **options
):
    """Parameters, state, metrics of each step, and bytes that a device sends to other replicas."""
    init, step = compiled(mesh, tx, make, **options)
    params = everywhere(mesh, params)
    state, seen = init(params) if state is None else state, []
    for number in range(steps):
        batch = jax.device_put(make_batch(number, bad), rows_of(mesh))
        params, state, metrics = step(params, state, batch)
        seen.append(jax.device_get(metrics))
    return params, state, seen, report.sent_bytes(getattr(step, "programs", step), mesh, "replica")


def test_the_mean_is_that_of_one_device_a_replica():
    one, _, plain, sent = train(mesh_of(4), EXACT)
    params, state, seen, half = train(fast_mesh(2, 2), EXACT, fast_axis="fast")
    for name, x in one.items():
        np.testing.assert_allclose(one_value(params[name]), x, rtol=1e-5, atol=1e-6)
    losses = lambda metrics: [row["loss"] for row in metrics]
    np.testing.assert_allclose(losses(seen), losses(plain), rtol=1e-5)
    # 2 replicas send 2 (2 - 1) / 2 of all, 4 send 2 (4 - 1) / 4; then of two devices each a half.
    assert half == pytest.approx(sent / 3, rel=0.05)
    # Of the moments a device holds a half, filled up where that is needed.
    moments = state_of(state, "mu")
    shapes = {name: x.addressable_shards[0].data.shape for name, x in moments.items()}
    assert shapes == {
        "bias": (64,),
        "down": (HIDDEN, 8),
        "gain": (),
        "last": (WIDTH, 39),
        "up": (WIDTH, 64),
    }


@pytest.mark.parametrize("tx", [EXACT, METHODS["one_bit_lamb"].tx], ids=["mean", "1-bit LAMB"])
def test_all_devices_leave_a_step_out_where_one_has_a_bad_gradient(tx):
    params, _, seen, _ = train(fast_mesh(2, 2), tx, 3, bad=1, fast_axis="fast")
    assert [bool(row["skipped"]) for row in seen] == [False, True, False]
    assert all(np.all(np.isfinite(one_value(x))) for x in params.values())


def test_the_devices_of_one_replica_stand_still_together_and_the_others_go_on():
    params, state, seen, _ = train(fast_mesh(2, 2), DELAYED, 4, bad=1, fast_axis="fast")
    assert not any(row["skipped"] for row in seen)
    assert np.asarray(state.skipped).tolist() == [1, 0]
    assert all(np.all(np.isfinite(one_value(x))) for x in params.values())


def test_microbatches_come_to_the_same():
    whole, _, _, sent = train(fast_mesh(2, 2), EXACT, fast_axis="fast")
    parts, _, _, again = train(fast_mesh(2, 2), EXACT, fast_axis="fast", accumulate=3)
    assert sent == again
    for name, x in whole.items():
        np.testing.assert_allclose(one_value(parts[name]), x, rtol=1e-5, atol=1e-6)


def test_gradients_are_taken_where_the_drift_of_all_devices_is():
    tx = jaxcomp.zero_one_adam(1e-2, "replica", **RARELY)
    params, state, seen, _ = train(fast_mesh(2, 2), tx, 2, fast_axis="fast")
    drifts, own = jax.device_get(state.drift), []
    for number in range(2):
        cut = lambda x, of_all, n=number: x + of_all[n][tuple(slice(s) for s in x.shape)]
        own.append(jax.tree.map(cut, jax.device_get(params), drifts))
    # One step without a gradient to speak of tells the losses at these places.
    _, _, [metrics], _ = train(
        fast_mesh(2, 2), tx, 1, params=jax.device_get(params), state=state, fast_axis="fast"
    )
    batch = make_batch(0)
    for device in range(4):
        part = {name: x[6 * device : 6 * device + 6] for name, x in batch.items()}
        expected = loss_fn(own[device // 2], part)
        np.testing.assert_allclose(metrics["loss"][device], expected, rtol=1e-5)
    assert np.any(drifts["up"][0] != drifts["up"][1]) and np.any(drifts["last"])


def test_an_overlapped_step_is_that_of_one_program():
    mesh = fast_mesh(2, 2)
    whole = train(mesh, DELAYED, 4, bad=2, fast_axis="fast")
    split = train(mesh, DELAYED, 4, bad=2, fast_axis="fast", make=jaxcomp.overlapped_train_step)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.device_get(whole), jax.device_get(split))
    _, step = compiled(mesh, DELAYED, jaxcomp.overlapped_train_step, fast_axis="fast")
    assert report.collectives(step.gradient, mesh) == []
    assert {row.axes for row in report.collectives(step.gather, mesh)} == {("fast",)}


def test_a_tensor_axis_beside_it_shards_as_before():
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = Mesh(devices, ("replica", "fast", "tensor"))
    specs = {
        "bias": P("tensor"),
        "down": P("tensor"),
        "gain": P(),
        "last": P(None, None),
        "up": P(None, "tensor"),
    }
    made = jaxcomp.train_step(loss_fn, EXACT, mesh, "replica", param_specs=specs, fast_axis="fast")
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = jax.device_put(PARAMS, shardings)
    state = made.init(params)
    for number in range(3):
        batch = jax.device_put(make_batch(number), NamedSharding(mesh, P(("replica", "fast"))))
        params, state, _ = made.step(params, state, batch)
    plain = train(mesh_of(4), EXACT)[0]
    for name, x in plain.items():
        np.testing.assert_allclose(params[name], x, rtol=1e-5, atol=1e-6)
    shards = {k: x.addressable_shards[0].data.shape for k, x in state_of(state, "mu").items()}
    assert shards["up"] == (WIDTH, 32) and shards["bias"] == (32,) and shards["down"] == (64, 8)


@pytest.mark.parametrize(
    ("shape", "spec", "axis", "filled"),
    [
        ((6,), P(), 0, (8,)),
        ((12, 64), P(), 1, (12, 64)),
        ((3, 3, 16, 6), P(), 2, (3, 3, 16, 6)),
        ((3, 3, 5, 7), P(), 3, (3, 3, 5, 8)),
        ((12, 64), P(None, "tensor"), 1, (12, 64)),
        ((12, 12), P(None, "tensor"), None, (12, 12)),
        ((), P(), None, ()),
        ((0, 8), P(), None, (0, 8)),
    ],
)
def test_a_share_is_cut_along_the_axis_that_leaves_least_to_fill_up(shape, spec, axis, filled):
    devices = np.array(jax.devices()[:8]).reshape(1, 4, 2)
    mesh = Mesh(devices, ("replica", "fast", "tensor"))
    share = fast.shares_of(jax.ShapeDtypeStruct(shape, np.float32), spec, mesh, "fast")
    assert (share.axis, share.shape) == (axis, filled)
    assert ("fast" in jax.tree.leaves(tuple(share.spec))) == (axis is not None)


@pytest.mark.parametrize(
    ("specs", "fast_axis", "message"),
    [
        (None, "host", "no axis 'host' for fast_axis"),
        ({name: P("fast") if name == "up" else P() for name in PARAMS}, "fast", "leave fast_axis"),
    ],
)
def test_what_does_not_fit_is_said(specs, fast_axis, message):
    make = functools.partial(jaxcomp.train_step, param_specs=specs)
    with pytest.raises(ValueError, match=message):
        made = make(loss_fn, EXACT, fast_mesh(2, 2), "replica", fast_axis=fast_axis)
        made.init(PARAMS)


@pytest.mark.parametrize("local", [optax.clip_by_global_norm(1.0), optax.centralize()])
def test_norms_and_means_of_single_shares_are_refused(local):
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    tx = optax.chain(mean, local, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"jaxcomp\.clip_by_global_norm"):
        train(fast_mesh(2, 2), tx, 1, fast_axis="fast")
