"""What a step hands a loss and takes from it, by all four steps: aux, keys, whole leaves, state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.steps import loss as losses
from tests.helpers.replicas import everywhere, mesh_of, one_value

REPLICAS, PARTS = 2, 2
MEAN = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
SGD = optax.sgd(0.5)
COCKTAIL = jaxcomp.cocktail_sgd(SGD, "replica")
FSDP = jaxcomp.qsdp("replica", jaxcomp.identity(), jaxcomp.identity())
SPECS = {"x": P("replica"), "scale": P()}
STATE = {"mean": np.zeros(4, np.float32), "count": np.int32(0)}


def loss_fn(params, batch, *, rng, model_state):
    x, w = batch["x"], params["w"].T
    state = {
        "mean": 0.5 * model_state["mean"] + 0.5 * x.mean(0),
        "count": model_state["count"] + 1,
    }
    aux = {"noise": jax.random.normal(rng, (3,)), "scale": batch["scale"]}
    return jnp.mean((x @ w - batch["scale"][None] * x) ** 2), aux, state


def sharded_loss(params, batch, **given):
    return loss_fn(FSDP.gather(params), batch, **given)


def make_batch(step=0, bad=False):
    x = np.random.default_rng(step).normal(size=(REPLICAS * PARTS * 3, 4)).astype(np.float32)
    x[0] = np.nan if bad else x[0]
    return {"x": x, "scale": np.arange(4, dtype=np.float32)}


OPTIONS = {"accumulate": PARTS, "has_aux": True, "batch_specs": SPECS}


def on_a_mesh(make=jaxcomp.train_step, tx=None, **options):
    mesh = mesh_of(REPLICAS)
    tx = optax.chain(MEAN, SGD) if tx is None else tx
    made = make(loss_fn, tx, mesh, "replica", **OPTIONS | options)
    params = everywhere(mesh, {"w": np.eye(4, dtype=np.float32)})
    return made, params, lambda params: one_value(params["w"])


def simulated():
    made = jaxcomp.simulated_train_step(
        loss_fn, optax.chain(MEAN, SGD), REPLICAS, "replica", **OPTIONS
    )
    return made, {"w": jnp.eye(4)}, lambda params: params["w"]


def in_shards():
    mesh = mesh_of(REPLICAS)
    made = jaxcomp.qsdp_train_step(sharded_loss, SGD, mesh, FSDP, **OPTIONS)
    shards = FSDP.shard(everywhere(mesh, {"w": np.eye(4, dtype=np.float32)}), mesh)
    return made, shards, lambda shards: one_value(FSDP.unshard(shards, mesh)["w"])


STEPS = {
    "mesh": on_a_mesh,
    "interleaved": functools.partial(on_a_mesh, tx=COCKTAIL),
    "overlapped": functools.partial(on_a_mesh, jaxcomp.overlapped_train_step, COCKTAIL),
    "simulated": simulated,
    "shards": in_shards,
}


def dense(steps):
    """The state, and the weights of plain SGD, of all microbatches of all replicas."""
    w, mean = np.eye(4, dtype=np.float64), np.zeros(4)
    for step in range(steps):
        batch = make_batch(step)
        x, scale = batch["x"].astype(np.float64), batch["scale"]
        parts = x.reshape(REPLICAS, PARTS, 3, 4)
        for part in range(PARTS):  # the replicas' means, microbatch after microbatch
            mean = 0.5 * mean + 0.5 * parts[:, part].mean((0, 1))
        error = x @ w.T - scale * x
        w = w - 0.5 * 2 / error.size * error.T @ x
    return w, mean


@pytest.mark.parametrize("kind", STEPS)
def test_the_loss_gets_and_returns_the_same_by_all_steps(kind):
    (init, step), params, weights = STEPS[kind]()
    state, model_state, key = init(params), STATE, jax.random.key(5)
    for i in range(2):
        params, state, metrics = step(
            params, state, make_batch(i), rng=jax.random.fold_in(key, i), model_state=model_state
        )
        model_state = metrics["model_state"]
    w, mean = dense(2)
    np.testing.assert_allclose(model_state["mean"], mean, rtol=0, atol=2e-6)
    assert int(model_state["count"]) == 2 * PARTS
    if "cocktail" not in str(type(state)).lower():
        np.testing.assert_allclose(weights(params), w, rtol=0, atol=1e-5)
    step_key = jax.random.fold_in(key, 1)
    keys = [jax.random.fold_in(step_key, replica) for replica in range(REPLICAS)]
    keys = [jax.random.fold_in(own, part) for own in keys for part in range(PARTS)]
    noise = np.stack([jax.random.normal(own, (3,)) for own in keys])
    np.testing.assert_array_equal(metrics["aux"]["noise"], noise)
    np.testing.assert_array_equal(metrics["aux"]["scale"], [np.arange(4)] * REPLICAS * PARTS)
    assert metrics["loss"].shape == (REPLICAS,)


def test_the_mean_of_a_model_state_is_one_exact_message():
    (init, step), params, _ = on_a_mesh(tx=COCKTAIL)  # XLA merges it with a dense mean's
    args = params, init(params), make_batch()
    program = step.lower(*args, rng=jax.random.key(0), model_state=STATE).compile()
    rows = report.collectives(program, mesh_of(REPLICAS))
    (own,) = [row for row in rows if row.part == "model_state"]
    assert (own.op, own.operand_bytes, own.axes) == ("all-reduce", 16, ("replica",))


def test_the_mean_of_a_narrow_model_state_is_taken_in_float32():
    own = jnp.asarray([[1], [1 / 256], [1 / 256], [1 / 256]], jnp.bfloat16)
    skipped = jnp.bool_(False)
    mean = jax.vmap(lambda x: losses.averaged(x, x, skipped, "replica"), axis_name="replica")(own)
    assert mean.dtype == jnp.bfloat16
    want = jnp.bfloat16((1 + 3 / 256) / 4)  # 0.25, if the sum were in bfloat16
    np.testing.assert_array_equal(np.float32(mean), np.full((4, 1), np.float32(want)))


def test_a_replica_whose_state_is_not_finite_counts_by_its_old_one():
    (init, step), params, _ = on_a_mesh(tx=COCKTAIL)  # where the other replica goes on
    args = params, init(params), make_batch(bad=True)
    _, _, metrics = step(*args, rng=jax.random.key(0), model_state=STATE)
    own = make_batch()["x"].reshape(REPLICAS, PARTS, 3, 4)[1].mean(1)
    want = (0.25 * own[0] + 0.5 * own[1]) / 2
    np.testing.assert_allclose(metrics["model_state"]["mean"], want, rtol=0, atol=1e-6)


def test_a_step_that_is_left_out_leaves_the_model_state():
    (init, step), params, _ = on_a_mesh()
    args = params, init(params), make_batch(bad=True)
    _, _, metrics = step(*args, rng=jax.random.key(0), model_state=STATE)
    assert metrics["skipped"]
    np.testing.assert_array_equal(metrics["model_state"]["mean"], 0)
    assert metrics["model_state"]["count"] == 0


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda loss, aux, state: (loss, state), "returned 2 values, and must return loss, aux, m"),
        (lambda loss, aux, state: (loss, aux, {"mean": state["mean"]}), "of the same tree"),
        (
            lambda loss, aux, state: (loss, aux, state | {"count": loss.astype("int32")}),
            "'count'.* differs between replicas, and only floats have a mean",
        ),
    ],
    ids=["less", "other", "count"],
)
def test_what_the_loss_must_return_is_said(returned, message):
    wrong = lambda *args, **given: returned(*loss_fn(*args, **given))
    init, step = jaxcomp.train_step(
        wrong, optax.chain(MEAN, SGD), mesh_of(2), "replica", has_aux=True, batch_specs=SPECS
    )
    params = {"w": jnp.eye(4)}
    with pytest.raises(ValueError, match=message):
        step.trace(params, init(params), make_batch(), jax.random.key(0), STATE)


def test_a_model_state_may_be_a_number_that_the_loss_writes_down():
    def times_traced(state):
        seen = []

        def constant(params, batch, *, model_state):
            seen.append(model_state)
            return jnp.mean(batch @ params["w"]), state

        init, step = jaxcomp.train_step(constant, optax.chain(MEAN, SGD), mesh_of(2), "replica")
        params = {"w": jnp.eye(4)}
        metrics = step(params, init(params), make_batch()["x"], model_state=0.0)[2]
        assert metrics["model_state"] == 0.5
        return len(seen)

    # With an error the loss would be traced again, without types, and that hides it.
    assert times_traced(0.5) == times_traced(jnp.float32(0.5))


def test_extra_arguments_reach_the_update_and_a_value_may_be_given():
    def update(updates, state, params=None, *, value, rate=1.0, **_):
        return jax.tree.map(lambda u: -rate * value * jnp.ones_like(u), updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    (init, step), params, weights = on_a_mesh(tx=optax.chain(MEAN, tx))
    args = params, init(params), make_batch(), jax.random.key(0), STATE
    params, _, _ = step(*args, extra_args={"value": 2.0, "rate": 0.25})
    np.testing.assert_array_equal(weights(params), np.eye(4) - 0.5)
