"""Residuals in fewer bits: what is lost, and that the rest of the state goes on as before."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas.compact import decode, encode, is_compact
from tests.helpers.every_method import METHODS
from tests.helpers.replicas import (
    everywhere,
    history_of,
    mesh_of,
    random_tree,
    rows,
    state_of,
    transform,
)

SHAPES = {"kernel": (40, 32), "bias": (7,)}


def compressed(bits=None):
    tx = jaxcomp.compressed_mean(jaxcomp.sign(block=64), "replica")
    return tx if bits is None else jaxcomp.compact(tx, bits)


def gradients(steps, num_replicas):
    return [random_tree(step, num_replicas, shapes=SHAPES) for step in range(steps)]


@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (16, 2**8)])
def test_a_row_loses_at_most_half_a_step(bits, steps):
    x = np.random.default_rng(0).normal(size=(5, 64)) * np.array([[1e-20], [1e-3], [1], [0], [1e9]])
    x = np.concatenate([x, -x])  # so that the largest of a row has either sign
    kept = encode(jnp.float32(x), bits)
    largest = np.abs(x).max(1, keepdims=True)
    # bfloat16 has 8 bits behind the first one, relative to each value.
    bound = largest / steps if bits == 8 else np.abs(x) / steps
    assert np.all(np.abs(decode(kept) - x) <= bound * (1 + 1e-5))
    assert decode(kept).dtype == jnp.float32


@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_not_finite_does_not_come_back_as_a_number(bits):
    x = jnp.array([[1.0, jnp.nan], [jnp.inf, 1.0], [1.0, 2.0]])
    back = np.asarray(decode(encode(x, bits)))
    assert not np.isfinite(back[0, 1]) and not np.isfinite(back[1, 0])
    np.testing.assert_allclose(back[2], [1.0, 2.0], rtol=1e-2)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), ()])
def test_arrays_may_be_empty_or_scalars(bits, shape):
    x = jnp.ones(shape)
    np.testing.assert_array_equal(decode(encode(x, bits)), x)


@pytest.mark.parametrize("bits", [8, 16])
def test_error_feedback_adds_up_to_the_rounding(bits):
    """The sum of what comes out, and of what is kept, is the sum of what went in."""
    steps, num_replicas = 12, 4
    into = gradients(steps, num_replicas)
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    params_after, state = history_of(compressed(bits), params, into, num_replicas)[-1]
    _, exact = history_of(compressed(), params, into, num_replicas)[-1]
    residual = decode(state_of(state, "residual")["kernel"])
    owned = np.concatenate(
        [np.ravel(x) for x in state_of(state, "owner_residual") if x is not None]
    )
    total = params_after["kernel"] + np.mean(residual, 0) + owned[: 40 * 32].reshape(40, 32)
    lost = np.abs(total - np.sum([g["kernel"].mean(0) for g in into], 0))
    largest = np.abs(state_of(exact, "residual")["kernel"]).max()
    step = largest / (127 if bits == 8 else 2**8)
    assert 1e-6 < lost.max() < steps * step
    assert state_of(state, "residual")["bias"] is None


def test_a_moment_that_its_optimizer_makes_wider_keeps_its_type():
    """The numbers of optax.inject_hyperparams are float32 beside any float32 parameter."""
    params = {"a": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(3)}
    inside = optax.inject_hyperparams(optax.adamw)(optax.constant_schedule(0.1))
    tx = jaxcomp.compact(inside, 16, fields=("mu",))
    state = tx.init(params)
    _, new = tx.update(params, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_the_state_is_a_quarter_or_half_as_large():
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def size(tx):
        state = transform(tx, mesh_of(2), params)[0](params)
        return sum(x.nbytes for x in jax.tree.leaves(state_of(state, "residual")))

    assert size(compressed(16)) == size(compressed()) // 2
    assert size(compressed(8)) == size(compressed()) // 4 + 2 * 4 * SHAPES["kernel"][0]


def test_another_number_of_replicas_keeps_the_mean():
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    _, state = history_of(compressed(8), params, gradients(3, 4), 4)[-1]
    like = jax.eval_shape(transform(compressed(8), mesh_of(2), params)[0], params)
    small = jaxcomp.resize(state, like)
    before, after = (np.mean(decode(state_of(s, "residual")["kernel"]), 0) for s in (state, small))
    assert 0 < np.abs(after - before).max() <= np.abs(before).max() / 254 * (1 + 1e-5)
    assert jax.tree.map(jnp.shape, small) == jax.tree.map(jnp.shape, like)


def test_it_trains_where_parameters_are_sharded():
    """The codes of a shard's rows are those of its own, on every device of a 2 x 2 mesh."""
    mesh = mesh_of(2, 2)
    params = {"kernel": jnp.ones((40, 64))}
    loss = lambda params, batch: jnp.mean((batch @ params["kernel"]) ** 2)
    tx = optax.chain(compressed(8), optax.sgd(0.3))
    init, step = jaxcomp.train_step(loss, tx, mesh, "replica", param_specs={"kernel": P("fsdp")})
    state = init(params)
    assert any(map(is_compact, jax.tree.leaves(state, is_leaf=is_compact)))
    batch = rows(mesh, np.random.default_rng(0).normal(size=(8, 40)).astype(np.float32))
    losses = []
    params = everywhere(mesh, params)
    for _ in range(5):
        params, state, metrics = step(params, state, batch)
        losses.append(float(np.mean(metrics["loss"])))
    assert losses[-1] < 0.9 * losses[0]


KEPT = {
    "mu": lambda: optax.chain(compressed(), optax.adam(1e-2)),
    "momentum": lambda: jaxcomp.one_bit_adam(1e-2, "replica", freeze_step=1),
    "remainder": lambda: jaxcomp.master_weights(optax.chain(compressed(), optax.adam(1e-2))),
}


@pytest.mark.parametrize("name", KEPT)
def test_moments_and_masters_are_kept_in_fewer_bits(name):
    """Their own field and the residual, also where a state is in a state."""
    dtype = jnp.bfloat16 if name == "remainder" else np.float32
    params = {name: np.ones(shape, dtype) for name, shape in SHAPES.items()}
    into = [jax.tree.map(lambda g: g.astype(dtype), grads) for grads in gradients(2, 2)]
    tx = jaxcomp.compact(KEPT[name](), 16, fields=("residual", name))
    _, (_, first), (later, state) = history_of(tx, params, into, 2)
    _, exact = history_of(KEPT[name](), params, into[:1], 2)[-1]
    for field in ("residual", name):
        kept, wanted = (state_of(s, field)["kernel"] for s in (first, exact))
        assert kept.data.dtype == jnp.bfloat16
        assert np.any(wanted) or field == "residual"  # a warm-up leaves none
        np.testing.assert_array_equal(decode(kept), decode(encode(wanted, 16)))
    assert np.all(np.isfinite(np.float32(later["kernel"])))
    like = jax.eval_shape(transform(tx, mesh_of(4), params)[0], params)
    assert jax.tree.map(jnp.shape, jaxcomp.resize(state, like)) == jax.tree.map(jnp.shape, like)


def test_pieces_of_owners_are_laid_out_anew():
    tx = jaxcomp.compact(METHODS["sharded_optimizer"].tx, 16, fields=("mu",))
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    _, state = history_of(tx, params, gradients(1, 4), 4)[-1]
    like = jax.eval_shape(transform(tx, mesh_of(2), params)[0], params)
    resized = jaxcomp.resize(state, like)
    for name, shape in SHAPES.items():
        kept, found = (np.ravel(decode(state_of(s, "mu")[name])) for s in (state, resized))
        size = int(np.prod(shape))
        assert np.any(kept[:size])
        np.testing.assert_array_equal(found[:size], kept[:size])
    assert jax.tree.map(jnp.shape, resized) == jax.tree.map(jnp.shape, like)


def test_errors_say_what_to_write():
    with pytest.raises(ValueError, match=r"\['nu'\] must stay in float32.*fields=\('residual',"):
        jaxcomp.compact(compressed(), fields=("nu",))
    with pytest.raises(ValueError, match="has no momentum to keep; leave it out"):
        tx = jaxcomp.compact(optax.adam(1e-3), 16, fields=("momentum",))
        tx.init({"kernel": jnp.zeros(3)})
    with pytest.raises(ValueError, match="bits=8.*only a residual may be so coarse.*write bits=16"):
        jaxcomp.compact(optax.adam(1e-3), 8, fields=("residual", "mu"))
    with pytest.raises(ValueError, match="bits=4; write 8, or 16"):
        jaxcomp.compact(compressed(), 4)
    with pytest.raises(ValueError, match="no residual to keep; leave it out"):
        jaxcomp.compact(optax.adam(1e-3)).init({"kernel": jnp.zeros(3)})
