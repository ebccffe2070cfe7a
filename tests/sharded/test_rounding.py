"""The weights to deploy: those that layers computed with, wherever they are the same each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.sharded.rounding import draws
from tests.helpers import layered
from tests.helpers.replicas import one_value

MINMAX = {"block": 1024, "range": "minmax"}
NEAREST = [
    jaxcomp.quantize(4, **MINMAX),
    jaxcomp.learned_levels(3),
    jaxcomp.cast("bfloat16"),
    jaxcomp.sign(),
    jaxcomp.group_top_1(8),
    jaxcomp.compose(jaxcomp.group_top_1(8), jaxcomp.quantize(4)),
    jaxcomp.identity(),
]
DRAWN = [
    jaxcomp.quantize(4, rounding="stochastic"),
    jaxcomp.quantize(4, rounding="shift", **MINMAX),
    jaxcomp.learned_levels(3, rounding="stochastic"),
    jaxcomp.rotated(jaxcomp.learned_levels(4)),
    jaxcomp.random_k(0.5),
    jaxcomp.random_k(0.5, pattern="strided"),  # by the step's number alone
    jaxcomp.cocktail(),
    jaxcomp.compose(jaxcomp.group_top_1(8), jaxcomp.quantize(4, rounding="stochastic")),
]


@pytest.mark.parametrize("code", NEAREST + DRAWN, ids=lambda code: code.name)
def test_whether_a_code_draws_is_read_from_the_code(code):
    assert draws(code) == (code in DRAWN)
    assert draws(jaxcomp.Compressor("own", code.encode, code.decode, 1.0)) == (code in DRAWN)


def fsdp_of(code, **options):
    return jaxcomp.qsdp("replica", code, exact=lambda path, leaf: leaf.ndim < 2, **options)


def computed_with(fsdp, mesh, shards, state):
    """What the layers of the next step would get."""

    def own(shards, state):
        tree = fsdp.gather(fsdp.local(shards, state.count, 0, levels=state.levels))
        return jax.tree.map(lambda x: x[None], tree)

    levels = state._replace(inner=(), rounds=())
    rows = jax.shard_map(own, mesh=mesh, in_specs=(P(fsdp.axes), P()), out_specs=P(fsdp.axes))
    return jax.tree.map(lambda x: np.asarray(x)[0], jax.jit(rows)(shards, levels))


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
@pytest.mark.parametrize("code", NEAREST[:3], ids=lambda code: code.name)
def test_what_layers_compute_with_is_deployed(code, sizes):
    fsdp = fsdp_of(code, fast_axis="fast" if len(sizes) > 1 else None)
    mesh, made, shards, state = layered.start(fsdp, optax.adam(1e-2), *sizes)
    for step in range(3):
        shards, state, _ = made.step(shards, state, layered.on(mesh, layered.make_batch(step)))
    found = jax.tree.map(one_value, fsdp.deployed(shards, state, mesh))
    wanted = computed_with(fsdp, mesh, shards, state)
    # The programs may fuse a level's product and sum, or not.
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-23)
    jax.tree.map(close, found, wanted)
    whole = jax.tree.map(one_value, fsdp.unshard(shards, mesh))
    assert np.abs(found["first"] - whole["first"]).max() > 2.0**-12
    np.testing.assert_array_equal(found["layers"][0]["bias"], whole["layers"][0]["bias"])


@pytest.mark.parametrize("code", DRAWN[1:4], ids=lambda code: code.name)
def test_shards_are_deployed_where_each_step_draws(code):
    mesh, _, shards, state = layered.start(fsdp_of(code), optax.sgd(1e-2), 4)
    found = fsdp_of(code).deployed(shards, state, mesh)
    jax.tree.map(np.testing.assert_array_equal, found, layered.make_params())


def test_each_parameter_is_deployed_by_its_own_code():
    codes = jaxcomp.by_path(("up", DRAWN[1]), (".*", NEAREST[0]))
    fsdp = fsdp_of(codes)
    mesh, _, shards, state = layered.start(fsdp, optax.sgd(1e-2), 4)
    found, start = fsdp.deployed(shards, state, mesh), layered.make_params()
    same = jax.tree.map(np.array_equal, found, start)
    layer = {"up": True, "bias": True, "gain": True, "down": False}
    assert same == {"first": False, "layers": [layer] * 2}


def test_layers_of_a_stack_have_levels_of_their_own():
    fsdp = fsdp_of(jaxcomp.learned_levels(2))
    mesh = layered.mesh_of(2)
    stack = {"w": jnp.stack([jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)] * 2)}
    shards = fsdp.shard(stack, mesh, lambda *_: True)
    state = jaxcomp.qsdp_train_step(lambda *_: 0.0, optax.sgd(1.0), mesh, fsdp).init(shards)
    tables = jnp.array([[0.0, 0.25, 0.75, 1.0], [0.0, 0.5, 0.5, 1.0]])
    levels = {"w": state.levels["w"]._replace(weights=tables)}
    found = one_value(fsdp.deployed(shards, state._replace(levels=levels), mesh)["w"])
    # Each shard is a block, from its least to its greatest value.
    assert [len(np.unique(layer)) for layer in found] == [8, 6]
