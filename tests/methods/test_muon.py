"""Muon on blocks and Adam on the rest: references leaf by leaf, what it computes, and shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas.elementwise import innermost
from tests.helpers import replicas
from tests.helpers.replicas import mesh_of

RATE, VOCABULARY = 0.125, 4096
# What Flax's attention, a stack of nothing, and a GPT have.
SHAPES = {
    "block_0/norm/scale": (8,),
    "block_0/out/kernel": (2, 4, 8),
    "block_0/query/bias": (2, 4),
    "block_0/query/kernel": (8, 2, 4),
    "block_0/up/kernel": (8, 32),
    "embed": (VOCABULARY, 8),
    "lm_head/kernel": (8, VOCABULARY),
    "position": (16, 8),
}
MATRICES = [name for name in SHAPES if "block" in name and "kernel" in name]


random_tree = functools.partial(replicas.random_tree, shapes=SHAPES)


def steps(tx, params, trees):
    """The updates of some steps."""
    state, update, found = tx.init(params), jax.jit(tx.update), []
    for grads in trees:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(updates)
    return found


def test_blocks_take_muons_steps_and_all_else_adams():
    params, trees = random_tree(0), [random_tree(1 + t) for t in range(3)]
    found = steps(jaxcomp.muon(RATE, weight_decay=0.1), params, trees)
    adam = steps(optax.adam(RATE), params, trees)
    cut = {k: (-1, x.shape[-1]) if "out" in k else (x.shape[0], -1) for k, x in params.items()}
    as_matrices = lambda tree: {k: tree[k].reshape(cut[k]) for k in MATRICES}
    reference = optax.contrib.muon(RATE, weight_decay=0.1, consistent_rms=0.2)
    wanted = steps(reference, as_matrices(params), list(map(as_matrices, trees)))
    for mine, of_muon, of_adam in zip(found, wanted, adam, strict=True):
        for name in SHAPES:
            right = of_muon[name].reshape(SHAPES[name]) if name in MATRICES else of_adam[name]
            np.testing.assert_allclose(mine[name], right, rtol=1e-6, atol=2e-6)


def test_steps_of_both_are_of_adams_size_and_those_of_matrices_equal_in_all_directions():
    (found,) = steps(jaxcomp.muon(RATE), random_tree(0), [random_tree(1)])
    for name in MATRICES:
        step = np.asarray(found[name])
        assert np.sqrt(np.mean(step**2)) == pytest.approx(0.2 * RATE, rel=0.3)
    lengths = np.linalg.svd(found["block_0/up/kernel"], compute_uv=False)
    assert lengths.min() > 0.5 * lengths.max()


def sizes(jaxpr):
    """The operands' shapes of all products in a program."""
    every = [each for eqn in jaxpr.eqns for each in innermost(eqn)]
    products = [each for each in every if each.primitive.name == "dot_general"]
    return {x.aval.shape for each in products for x in each.invars}


INSIDE = {
    "muon": lambda: optax.chain(
        jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), jaxcomp.muon(RATE)
    ),
    "muloco": lambda: jaxcomp.muloco(RATE, "replica", every=2),
    "dion": lambda: jaxcomp.dion(RATE, "replica", rank=4),
}


def loss_fn(params, batch):
    return sum(jnp.vdot(x, x) for x in jax.tree.leaves(params)) * jnp.mean(batch)


@pytest.mark.parametrize("name", INSIDE)
def test_no_method_multiplies_a_table_of_tokens(name):
    params = jax.tree.map(jnp.asarray, random_tree(0))
    init, step = jaxcomp.simulated_train_step(loss_fn, INSIDE[name](), 2, "replica")
    program = jax.make_jaxpr(step)(params, init(params), jnp.ones(4))
    found = sizes(program.jaxpr)
    assert any(shape[-2:] == (8, 32) for shape in found)
    gradient = {(VOCABULARY * 8,), (8 * VOCABULARY,)}  # of the loss, by vdot
    assert not [shape for shape in found - gradient if VOCABULARY in shape]


def test_other_leaves_may_have_a_rate_of_their_own():
    params, trees = random_tree(0), [random_tree(1)]
    (slow,) = steps(jaxcomp.muon(RATE, others=optax.sgd(0.5)), params, trees)
    (same,) = steps(jaxcomp.muon(RATE), params, trees)
    np.testing.assert_array_equal(slow["embed"], -0.5 * trees[0]["embed"])
    np.testing.assert_array_equal(slow["block_0/up/kernel"], same["block_0/up/kernel"])


# Blocks of a code lie otherwise in shards.
EXACT = {"every": 2, "code": jaxcomp.identity(), "error_decay": None}


def trained(specs, method=lambda: jaxcomp.muloco(RATE, "replica", **EXACT), **options):
    batches = [np.float32([1, 2]) + number for number in range(4)]
    options |= {"param_specs": specs}
    found = replicas.trained(loss_fn, method(), mesh_of(2, 2), random_tree(0), batches, **options)
    return jax.device_get(found[0]), found[1]


def test_tables_may_be_in_shards_and_matrices_may_not():
    specs = dict.fromkeys(SHAPES, P()) | {"embed": P("fsdp"), "lm_head/kernel": P(None, "fsdp")}
    whole, _ = trained(None)
    found, state = trained(specs)
    assert state.inner.inner_states["others"].inner_state.inner[0].mu["embed"].shape == (2, 4096, 8)
    for name, x in whole.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="block_0/up/kernel.*a norm of local shards.*muloco"):
        trained(specs | {"block_0/up/kernel": P("fsdp")})


@pytest.mark.parametrize("momentum_code", [None, jaxcomp.quantize(3, block=64)])
@pytest.mark.parametrize("b2", [None, 0.95])
def test_muloco_is_local_steps_with_muon_and_rare_rows(momentum_code, b2):
    adam = jaxcomp.rare_rows(optax.adam(RATE, b2=0.999 if b2 is None else b2), "replica")
    inner = jaxcomp.muon(RATE, weight_decay=0.1, others=adam)
    if momentum_code is not None:
        inner = jaxcomp.mean_momentum(inner, "replica", code=momentum_code)
    written = jaxcomp.local_steps(
        inner,
        "replica",
        every=2,
        code=jaxcomp.bin_means(2, block=1024),
        outer=optax.sgd(0.6, 0.6, nesterov=True),
        error_decay=0.9,
    )
    preset = {"every": 2, "weight_decay": 0.1, "momentum_code": momentum_code}
    preset |= {} if b2 is None else {"others": adam}
    found, _ = trained(None, lambda: jaxcomp.muloco(RATE, "replica", **preset))
    wanted, _ = trained(None, lambda: written)
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x)
