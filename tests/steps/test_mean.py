"""The mean of the replicas' own parameters: what a float32 synchronization would make."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report, schedules
from jaxcomp.replicas import protocol
from tests.helpers import replicas
from tests.helpers.replicas import mesh_of, one_value, random_tree

EXACT, STEPS = jaxcomp.identity(), 3
PARAMS = {"bias": np.ones(7, np.float32), "kernel": np.ones((6, 8), np.float32)}
# Each synchronizes all replicas, without compression, in steps `every`, 2 `every` and so on.
METHODS = {
    "cocktail_sgd": lambda every: jaxcomp.cocktail_sgd(
        optax.adam(0.1), "replica", compressor=EXACT, sync_every=every, delayed=False
    ),
    "local_steps": lambda every: jaxcomp.local_steps(
        optax.adam(0.1), "replica", every=every, code=EXACT, outer=optax.sgd(1.0)
    ),
    "slamb": lambda every: jaxcomp.slamb(0.1, "replica", sync_every=every, exact_numel=0),
    "zero_one_adam": lambda every: jaxcomp.zero_one_adam(
        0.1,
        "replica",
        compressor=EXACT,
        sync_at=lambda count: (count == 0) | (count % every == every - 1),
        variance_at=schedules.until(1),
        # A bounded synchronization leaves a rest in the residual.
        deviations=jaxcomp.Deviations(step_bound=None),
    ),
}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["kernel"])
    return jnp.mean((hidden - batch["y"]) ** 2) + jnp.mean(params["bias"] ** 2 * batch["x"][0, 0])


def trained(tx, mesh, params=PARAMS, steps=STEPS, **options):
    """Parameters and state after some steps, in which replicas see other examples."""
    batches = [random_tree(step, 8, shapes={"x": (6,), "y": (8,)}) for step in range(steps)]
    return replicas.trained(loss_fn, tx, mesh, params, batches, **options)[:2]


def sent(mesh, params, state, **options):
    mean = functools.partial(jaxcomp.mean_params, mesh=mesh, axis_name="replica", **options)
    program = jax.jit(mean).lower(params, state).compile()
    parts = report.sent_bytes_by_part(program, mesh, "replica")
    return {part: count for part, count in parts.items() if count}


@pytest.mark.parametrize("name", METHODS)
def test_is_what_an_exact_synchronization_makes(name):
    mesh = jax.make_mesh((2,), ("replica",))
    met, _ = trained(METHODS[name](STEPS), mesh)
    params, state = trained(METHODS[name](100), mesh)
    mean = jaxcomp.mean_params(params, state, mesh, "replica")
    (drift,) = protocol.drifts(state)
    assert not np.array_equal(*np.asarray(drift["kernel"]))
    for leaf, x in mean.items():
        rows = np.asarray(drift[leaf])
        expected = np.asarray(params[leaf]) + (rows[0] + rows[1]) / 2  # in float32, both exact
        np.testing.assert_array_equal(one_value(x), expected)
        np.testing.assert_array_equal(x, met[leaf])
    # Each of two sends a half in a ring's scatter and a half in its gather; buckets are even.
    assert sent(mesh, params, state) == {"mean_params": 4 * (6 * 8 + 8)}


def test_shares_of_a_fast_axis_and_leaves_without_drift():
    """A bias of 7 is filled up over two devices; `frozen` has no drift."""
    mesh = mesh_of(2, 2, second="fast")
    still = optax.chain(jaxcomp.compressed_mean(EXACT, "replica"), optax.set_to_zero())
    tx = optax.partition(
        {"train": METHODS["slamb"](100), "freeze": still},
        {"bias": "train", "frozen": "freeze", "kernel": "train"},
    )
    frozen = dict.fromkeys(("a", "b"), np.ones(4, np.float32))
    params, state = trained(tx, mesh, PARAMS | {"frozen": frozen}, fast_axis="fast")
    mean = jaxcomp.mean_params(params, state, mesh, "replica", fast_axis="fast")
    (drift,) = protocol.drifts(state)
    assert drift["bias"].shape == (2, 8)
    for leaf in PARAMS:
        rows = np.asarray(drift[leaf])[:, : PARAMS[leaf].shape[0]]
        expected = np.asarray(params[leaf]) + (rows[0] + rows[1]) / 2
        np.testing.assert_array_equal(one_value(mean[leaf]), expected)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(one_value, mean["frozen"]), frozen)
    # A device sends its shares alone: half of the kernel, and 4 of the bias.
    assert sent(mesh, params, state, fast_axis="fast") == {"mean_params": 4 * (6 * 8 / 2 + 4)}
    with pytest.raises(ValueError, match="Write the mesh and the fast_axis"):
        jaxcomp.mean_params(params, state, mesh, "replica")


def test_shards_and_narrow_parameters():
    mesh, specs = mesh_of(2, 2), {"bias": P(), "kernel": P("fsdp")}
    place = lambda x, spec: jax.device_put(x.astype(jnp.bfloat16), NamedSharding(mesh, spec))
    params = jax.tree.map(place, PARAMS, specs)
    state = jaxcomp.train_step(
        loss_fn, METHODS["slamb"](100), mesh, "replica", param_specs=specs
    ).init(params)
    drift = jax.tree.map(
        lambda x: jax.device_put(
            np.stack([np.full(x.shape[1:], 2.0**-7), np.full(x.shape[1:], 2.0**-6)]), x.sharding
        ),
        state.drift,
    )
    state = state._replace(drift=drift)
    mean = jaxcomp.mean_params(params, state, mesh, "replica", param_specs=specs)
    for leaf, x in mean.items():
        assert x.dtype == jnp.bfloat16
        assert x.sharding.is_equivalent_to(params[leaf].sharding, x.ndim)
        assert np.unique(x.astype(np.float32)).tolist() == [1 + 2.0**-6]  # to even, from 1.5 bits
    assert sent(mesh, params, state, param_specs=specs) == {"mean_params": 4 * (6 * 8 / 2 + 8)}


def test_without_drift_nothing_changes():
    mesh = mesh_of(2)
    tx = optax.chain(jaxcomp.compressed_mean(EXACT, "replica"), optax.sgd(0.1))
    params, state = trained(tx, mesh, steps=1)
    assert jaxcomp.mean_params(params, state, mesh, "replica") is params
