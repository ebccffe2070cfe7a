"""Evaluation during a run: each replica at its own parameters, by a message of a few numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.replicas import protocol
from tests.helpers import replicas
from tests.helpers.replicas import everywhere, mesh_of, one_value

SHAPES = {"in": (8, 12), "bias": (12,), "out": (12, 4)}
SPARSE = jaxcomp.cocktail_sgd(optax.adam(0.1), "replica", compressor=jaxcomp.top_k(0.1))
SELDOM = jaxcomp.slamb(0.1, "replica", exact_numel=0)
LOCAL = jaxcomp.diloco(optax.adam(0.1), "replica", every=4)


def make_params():
    draw = np.random.default_rng(0).normal
    return {name: draw(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch @ params["in"] + params["bias"][None])
    return jnp.mean((hidden @ params["out"] - batch[:, :4]) ** 2)


def measure(params, batch):
    return {"loss": loss_fn(params, batch), "rows": jnp.float32(len(batch)), "two": jnp.ones(2)}


def batch_of(step):
    return np.random.default_rng([1, step]).normal(size=(8, 8)).astype(np.float32)


def trained(tx, mesh, num_steps=3, **options):
    batches = map(batch_of, range(num_steps))
    return replicas.trained(loss_fn, tx, mesh, make_params(), batches, **options)[:2]


def own_losses(params, state, batch, count):
    """Each replica's loss on its rows, one after the other, in NumPy's order."""
    params, (drift,) = jax.device_get((params, protocol.drifts(state)))
    # Shares of a fast axis may be padded; what a method does not see has no drift.
    inside = lambda x, p: x[tuple(map(slice, p.shape))]
    moved = lambda x, p, i: p if isinstance(x, optax.MaskedNode) else p + inside(x[i], p)
    own = lambda i: {name: moved(drift[name], p, i) for name, p in params.items()}
    return [float(loss_fn(own(i), part)) for i, part in enumerate(np.split(batch, count))]


MEAN = optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), optax.sgd(0.1))
SOME = optax.partition({"a": SPARSE, "b": MEAN}, {"in": "a", "bias": "b", "out": "a"})
SPECS = {"in": P("fsdp", None), "bias": P(), "out": P(None, "fsdp")}
BY_FSDP = {"param_specs": SPECS, "batch_specs": P(("replica", "fsdp"))}
MESHES = {
    kind: jax.make_mesh((2, 2), ("replica", "fsdp"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
}


@pytest.mark.parametrize(
    ("tx", "mesh", "options", "rows"),
    [
        (SPARSE, mesh_of(4), {}, 2),
        (SELDOM, mesh_of(4), {}, 2),
        (SOME, mesh_of(2), {}, 4),
        (SELDOM, mesh_of(2, 2, second="fast"), {"fast_axis": "fast"}, 2),
        (SPARSE, MESHES[AxisType.Auto], BY_FSDP, 4),
        (SPARSE, MESHES[AxisType.Explicit], BY_FSDP, 4),
    ],
    ids=["cocktail_sgd", "slamb", "some leaves", "fast axis", "shards", "shards, explicit axes"],
)
def test_each_replica_measures_its_rows_at_its_own_parameters(tx, mesh, options, rows):
    batch = batch_of(9)
    params, state = trained(tx, mesh, **options)
    found = jaxcomp.eval_step(measure, mesh, "replica", **options)(params, state, batch)
    wanted = np.mean(own_losses(params, state, batch, mesh.shape["replica"]))
    np.testing.assert_allclose(one_value(found["loss"]), wanted, rtol=1e-6)
    assert float(found["rows"]) == rows and found["two"].tolist() == [1, 1]
    if mesh.size == mesh.shape["replica"] == 4:
        assert abs(float(loss_fn(jax.device_get(params), batch)) / wanted - 1) > 0.01


@pytest.mark.parametrize("state", ["local steps", "none"])
def test_the_consensus_is_measured_where_it_is_the_model(state):
    mesh, batch = mesh_of(4), batch_of(9)
    params, after = trained(LOCAL, mesh)  # no outer step yet
    assert np.any(np.asarray(after.drift["in"]) != 0)
    after = after if state == "local steps" else ()
    found = jaxcomp.eval_step(measure, mesh, "replica")(params, after, batch)["loss"]
    wanted = float(loss_fn(make_params(), batch))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_few_numbers_are_sent_and_no_parameters():
    mesh = mesh_of(4)
    params, state = trained(SPARSE, mesh, 1)
    place = NamedSharding(mesh, P("replica"))
    batch = jax.device_put(batch_of(9), place)
    lowered = jaxcomp.eval_step(measure, mesh, "replica").lower(params, state, batch)
    sent = report.sent_bytes(lowered.compile(), mesh, "replica")
    assert sent <= 2 * 4 * 4  # loss, rows and two
    assert not any(x.donated for x in jax.tree.leaves(lowered.args_info))  # training goes on


def test_a_batch_that_cannot_be_divided_is_refused():
    mesh = mesh_of(3)
    params = everywhere(mesh, make_params())
    with pytest.raises(ValueError, match="must be divisible by 3"):
        jaxcomp.eval_step(measure, mesh, "replica")(params, (), batch_of(0))
