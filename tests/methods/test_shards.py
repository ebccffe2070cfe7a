"""Every method whose sums cross shards trains parameters in shards as it trains whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas import protocol
from tests.helpers import replicas
from tests.helpers.replicas import mesh_of, random_tree

SHAPES = {"bias": (64,), "down": (64, 32), "up": (32, 64)}
SPECS = {"bias": P(), "down": P(None, "fsdp"), "up": P("fsdp")}
EXACT = jaxcomp.identity()
METHODS = {
    "cocktail_sgd": jaxcomp.cocktail_sgd(
        optax.adam(1e-2, eps=1e-3), "replica", compressor=EXACT, warmup_steps=2
    ),
    "local_steps": jaxcomp.local_steps(
        optax.sgd(0.1),
        "replica",
        every=2,
        code=EXACT,
        fragments=2,
        delay=1,
        keep=0.25,
    ),
    "one_bit_adam": jaxcomp.one_bit_adam(1e-2, "replica", freeze_step=2, compressor=EXACT),
    "one_bit_lamb": jaxcomp.one_bit_lamb(1e-2, "replica", freeze_step=2, compressor=EXACT),
    "one_bit_lamb, scaled": jaxcomp.one_bit_lamb(
        *(1e-2, "replica"),
        freeze_step=2,
        compressor=EXACT,
        deviations=jaxcomp.Deviations(precondition=False, variance_floor=1e-4),
        eps=1e-3,
        weight_decay=0.1,
    ),
    "sharded_optimizer": jaxcomp.sharded_optimizer(
        optax.chain(jaxcomp.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3)),
        "replica",
        gradients=EXACT,
        differences=EXACT,
    ),
    # A shard of "up" has fewer elements than exact_numel, and "down" is whole by the policy.
    "slamb": jaxcomp.slamb(
        *(1e-2, "replica"),
        compressor=jaxcomp.by_path(("down", EXACT), (".*", jaxcomp.random_k(0.25, "strided"))),
        exact_numel=1500,
        sync_every=3,
        weight_decay=0.1,
        rescaling=jaxcomp.Rescaling(b3=0.5),
    ),
    "zero_one_adam": jaxcomp.zero_one_adam(
        *(1e-2, "replica"),
        sync_at=lambda count: count % 2 == 0,
        variance_at=lambda count: count % 4 == 0,
        compressor=EXACT,
    ),
}


def loss_fn(params, batch):
    x, pull = batch["x"], batch["pull"]
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - x) ** 2) + jnp.mean(pull) * params["up"][0, 0]


def trained(tx, mesh, specs, pull=0.0):
    """Each replica's own parameters after a few steps, where all shards are put together.

    `pull` is what the first replica's gradient of one entry of "up" gets more in step 1.
    """
    params = jax.tree.map(lambda x: x / 4, random_tree(0, shapes=SHAPES))
    batches = [random_tree(number, shapes={"x": (8, 32)}) for number in range(5)]
    batches = [batch | {"pull": np.zeros(8, np.float32)} for batch in batches]
    batches[1]["pull"][:4] = pull
    options = {"param_specs": specs}
    params, state, seen = replicas.trained(loss_fn, tx, mesh, params, batches, **options)
    assert not any(metrics["skipped"] for metrics in seen)
    assert {name: x.sharding.spec for name, x in params.items()} == specs
    assert int(jaxcomp.replica_spread(params, mesh, "replica")) == 0
    drift = next(iter(protocol.drifts(state)), dict.fromkeys(SHAPES, 0))
    return {name: np.asarray(params[name])[None] + np.asarray(drift[name]) for name in SHAPES}


@pytest.mark.parametrize("method", METHODS)
def test_shards_train_as_whole_parameters(method):
    whole = trained(METHODS[method], mesh_of(2), dict.fromkeys(SHAPES, P()))
    found = trained(METHODS[method], mesh_of(2, 2), SPECS)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], whole[name], rtol=0, atol=1e-5)
    if method == "slamb":  # between two synchronizations
        assert np.abs(whole["up"][0] - whole["up"][1]).max() > 1e-3


@pytest.mark.parametrize("method", ["slamb", "zero_one_adam"])
def test_shards_of_a_leaf_whose_gradient_is_not_finite_stand_still_together(method):
    whole = trained(METHODS[method], mesh_of(2), dict.fromkeys(SHAPES, P()), pull=np.inf)
    found = trained(METHODS[method], mesh_of(2, 2), SPECS, pull=np.inf)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], whole[name], rtol=0, atol=1e-5)


def test_a_shard_without_a_mean_gradient_moves_with_its_leaf():
    # In the first step the replicas' gradients of the first two rows cancel.
    gradients = np.ones((2, 2, 4, 3), np.float32)
    gradients[0, 1, :2] = -1
    tx = jaxcomp.zero_one_adam(
        *(1e-2, "replica"),
        compressor=EXACT,
        deviations=jaxcomp.Deviations(mean_momentum=False),
        sync_at=lambda count: count == 0,
        variance_at=lambda count: count == 0,
    )
    loss = lambda params, batch: jnp.sum(params["kernel"] * batch[0])

    def stepped(mesh, spec):
        start = {"kernel": np.zeros((4, 3), np.float32)}
        specs = {"param_specs": {"kernel": spec}}
        _, state, _ = replicas.trained(loss, tx, mesh, start, gradients, **specs)
        return np.asarray(state.drift["kernel"])

    whole = stepped(mesh_of(2), P())
    assert np.all(whole < 0)
    np.testing.assert_allclose(stepped(mesh_of(2, 2), P("fsdp")), whole, rtol=1e-6)


@pytest.mark.parametrize("method", ["cocktail_sgd", "zero_one_adam"])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_a_leaf_without_elements_may_be_sharded(method, shape):
    params = {"empty": np.zeros(shape, np.float32), "up": np.zeros((32, 64), np.float32)}
    specs = {"empty": P(*("fsdp" if size else None for size in shape)), "up": P("fsdp")}
    tx = jaxcomp.per_replica(METHODS[method], "replica")
    found = jaxcomp.state_specs(tx, params, mesh_of(2, 2), "replica", specs)
    (drift,) = protocol.drifts(found)
    assert drift["empty"] == P("replica", *specs["empty"])
