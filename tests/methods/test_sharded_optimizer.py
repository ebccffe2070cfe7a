"""The sharded optimizer: what it computes, what of it is lost, what it sends and keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from tests.helpers.replicas import everywhere, history_of, mesh_of, random_tree, transform

# An odd matrix, vectors shorter and longer than the axis, one number, and nothing.
SHAPES = {"kernel": (33, 40), "bias": (7,), "scale": (2,), "one": (), "none": (0, 4)}
EXACT = {"gradients": jaxcomp.identity(), "differences": jaxcomp.identity()}
NOISY = jaxcomp.quantize(4, rounding="stochastic", range="minmax")
RATE = 0.125


def make(inner=None, **codes):
    return jaxcomp.sharded_optimizer(inner or optax.sgd(RATE), "replica", **codes)


def gradients(steps, num_replicas, dtype=np.float32):
    return [
        random_tree(1 + step, num_replicas, shapes=SHAPES, dtype=dtype) for step in range(steps)
    ]


def whole(pieces, shape):
    """Owners' rows `[R, n]` as the parameter that they are cut from; what is behind its end."""
    flat, numel = np.ravel(pieces), int(np.prod(shape))
    return flat[:numel].reshape(shape), flat[numel:]


@pytest.mark.parametrize("code", [jaxcomp.sign(), jaxcomp.top_k(0.1)])
def test_no_error_of_a_difference_is_lost(code):
    """What all hold, plus what their owners hold back, is where exact codes would have led."""
    with jax.enable_x64(True):
        params = random_tree(0, shapes=SHAPES, dtype=np.float64)
        grads = gradients(6, 3, np.float64)
        inner = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(RATE))
        codes = {"gradients": jaxcomp.identity(), "differences": code}
        found, state = history_of(make(inner, **codes, exact=lambda *_: False), params, grads, 3)[
            -1
        ]
        wanted = params
        for grad in grads:
            step = lambda p, g: p - RATE * (g.mean(0) + 0.5 * p)
            wanted = jax.tree.map(step, wanted, grad)
        for name, shape in SHAPES.items():
            held, _ = whole(state.owner_residual[name], shape)
            np.testing.assert_allclose(found[name] + held, wanted[name], rtol=0, atol=1e-13)
        assert np.abs(whole(state.owner_residual["kernel"], (33, 40))[0]).max() > 1e-3


def test_many_small_buckets_are_one_large_one():
    """Of a code that takes each value for itself; many alike are sent in a loop."""
    params, grads = random_tree(0, shapes=SHAPES), gradients(3, 4)
    ends = []
    for numel in (64, 2**22):
        code = jaxcomp.two_shot(jaxcomp.cast("bfloat16"), bucket_numel=numel)
        tx = make(gradients=code, differences=code, exact=lambda *_: False)
        ends.append(history_of(tx, params, grads, 4)[-1])
    few, many = (jax.device_get(end) for end in ends)
    jax.tree.map(np.testing.assert_array_equal, few, many)
    assert not np.array_equal(few[0]["kernel"], params["kernel"])


def test_unbiased_codes_leave_the_padding_alone():
    """Noise behind a parameter's end would grow there, and in the scales of what is sent."""
    params = random_tree(0, shapes=SHAPES)
    tx = make(optax.adam(1e-2), gradients=NOISY, exact=lambda *_: False)
    _, state = history_of(tx, params, gradients(5, 8), 8)[-1]
    for tree in (state.owner_residual, *(state.owned[0][1:])):
        for name, shape in SHAPES.items():
            assert not whole(tree[name], shape)[1].any()


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1)])
def test_pieces_of_sharded_rows_move_to_and_from_one_replica(old, new):
    slopes = {"row": np.arange(8, dtype="f").reshape(1, 8), "bias": np.arange(4, dtype="f")}
    specs = {"row": P(None, "fsdp"), "bias": P("fsdp")}
    tx = make(optax.sgd(1.0, momentum=0.5), **EXACT)

    def loss_fn(params, batch):
        slope = lambda p, slope: jnp.sum(p * slope)
        return jnp.mean(batch) * sum(jax.tree.leaves(jax.tree.map(slope, params, slopes)))

    def on(num_replicas, params):
        mesh = mesh_of(num_replicas, 2)
        made = jaxcomp.train_step(loss_fn, tx, mesh, "replica", param_specs=specs)
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return made, jax.device_put(params, places)

    made, params = on(old, jax.tree.map(np.zeros_like, slopes))
    params, state, _ = made.step(params, made.init(params), np.ones(2, np.float32))
    made, params = on(new, jax.device_get(params))
    state = jaxcomp.resize(state, made.init(params))
    params, _, _ = made.step(params, state, np.ones(2, np.float32))
    jax.tree.map(lambda x, slope: np.testing.assert_array_equal(x, -2.5 * slope), params, slopes)


def test_narrow_parameters_have_a_wide_owner():
    """Steps below bfloat16's rounding add up."""
    params = {"kernel": np.ones((40, 40), jnp.bfloat16)}
    grads = [{"kernel": np.full((2, 40, 40), 2.0**-10, jnp.bfloat16)}] * 16
    found, state = history_of(make(optax.sgd(1.0), **EXACT), params, grads, 2)[-1]
    assert found["kernel"].dtype == jnp.bfloat16
    assert state.owner_residual["kernel"].dtype == jnp.float32
    held, _ = whole(state.owner_residual["kernel"], (40, 40))
    np.testing.assert_array_equal(np.float32(found["kernel"]) + held, 1 - 16 * 2.0**-10)


def test_quantized_steps_stay_near_exact_ones():
    params, grads = random_tree(0, shapes=SHAPES), gradients(30, 4)
    inner = optax.adam(1e-2)
    exact, _ = history_of(make(inner, **EXACT), params, grads, 4)[-1]
    coded, _ = history_of(make(inner), params, grads, 4)[-1]
    moved = np.linalg.norm(exact["kernel"] - params["kernel"])
    assert 1e-3 * moved < np.linalg.norm(exact["kernel"] - coded["kernel"]) < 0.2 * moved


def test_a_step_sends_two_messages_of_four_bits_and_keeps_its_share():
    mesh, shape = mesh_of(4), (512, 256)
    params = everywhere(mesh, {"kernel": np.zeros(shape, np.float32)})
    init, update = transform(make(optax.adam(1e-2)), mesh, params)
    state = jax.eval_shape(init, params)
    grads = {"kernel": jax.ShapeDtypeStruct((4, *shape), np.float32)}
    compiled = update.lower(grads, state, params).compile()
    chunk = 512 * 256 // 4 * (4 + 16 / 128) / 8
    flag = 2 * 4 * 3 // 4  # of one int32
    assert report.sent_bytes(compiled, mesh, "replica") == 2 * 3 * chunk + flag
    kinds = [row.op for row in report.collectives(compiled, mesh)]
    assert sorted(kinds) == ["all-gather", "all-reduce", "all-to-all"]
    kept = sum(x.size for x in jax.tree.leaves(state) if x.ndim) / 4
    assert kept == 3 * 512 * 256 / 4


def test_masks_and_policies_go_by_path():
    seen = []

    def policy(path, leaf):
        seen.append((path, leaf.shape))
        return jaxcomp.quantize(8)

    masked = optax.masked(optax.set_to_zero(), {name: name == "bias" for name in SHAPES})
    tx = make(optax.chain(masked, optax.sgd(RATE)), gradients=policy, differences=policy)
    params = random_tree(0, shapes=SHAPES)
    found, _ = history_of(tx, params, gradients(1, 2), 2)[-1]
    np.testing.assert_array_equal(found["bias"], params["bias"])
    assert not np.array_equal(found["kernel"], params["kernel"])
    assert set(seen) == {("kernel", (33, 40))}
