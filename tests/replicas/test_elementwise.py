"""Optimizers of parameters in pieces: they do what they do with whole ones, or are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.replicas.elementwise import _is_norm, ranked
from tests.helpers import replicas
from tests.helpers.replicas import mesh_of, rows

REPLICAS = 3
# Of one axis as large as the matrices, so that sizes tell nothing; a size that 3 does not divide.
SHAPES = {"bias": (1600,), "kernel": (40, 40), "gain": (), "conv": (3, 5, 7)}


def parameters():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def loss_fn(params, batch):
    losses = jax.tree.map(lambda x, c: jnp.sum(x * jnp.mean(c, axis=0)), params, batch)
    return sum(jax.tree.leaves(losses))


def batches(mesh):
    for step in range(3):
        rng = np.random.default_rng(step + 1)
        draw = lambda shape, rng=rng: 10 * rng.normal(size=(REPLICAS, *shape)).astype(np.float32)
        yield rows(mesh, {name: draw(shape) for name, shape in SHAPES.items()})


def by_step(tx):
    mesh = mesh_of(REPLICAS)
    return replicas.trained(loss_fn, tx, mesh, parameters(), batches(mesh))[0]


@functools.cache
def by_mean(name):
    """One optimizer of whole parameters."""
    dense = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    return by_step(optax.chain(dense, OPTIMIZERS[name]()))


def by_sharded_optimizer(optimizer):
    exact = {"gradients": jaxcomp.identity(), "differences": jaxcomp.identity()}
    return by_step(jaxcomp.sharded_optimizer(optimizer, "replica", **exact))


def by_shards(optimizer, stacked):
    """Of parameters in shards, or of stacks of one layer."""
    mesh = mesh_of(REPLICAS)
    fsdp = jaxcomp.qsdp("replica", jaxcomp.identity(), jaxcomp.identity())
    first = lambda tree: jax.tree.map(lambda x: x[0], tree) if stacked else tree
    whole = lambda shards, batch: loss_fn(first(fsdp.gather(shards)), batch)
    init, step = jaxcomp.qsdp_train_step(whole, optimizer, mesh, fsdp)
    params = jax.tree.map(lambda x: x[None], parameters()) if stacked else parameters()
    shards = fsdp.shard(params, mesh, stacked=lambda path, leaf: stacked)
    state = init(shards)
    for batch in batches(mesh):
        shards, state, _ = step(shards, state, batch)
    return first(fsdp.unshard(shards, mesh))


by_qsdp = functools.partial(by_shards, stacked=False)
by_stacked_qsdp = functools.partial(by_shards, stacked=True)
WAYS = [by_sharded_optimizer, by_qsdp, by_stacked_qsdp]
matrices = lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
label = lambda tree: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", tree)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "partition": lambda: optax.partition(
        {"matrix": optax.adamw(1e-2), "other": optax.sgd(1e-2, momentum=0.9)}, label
    ),
    "clipped": lambda: optax.chain(
        jaxcomp.clip_by_global_norm(1.0), optax.clip(0.01), optax.sgd(1.0)
    ),
    "several": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), matrices), optax.lion(1e-2)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_with_pieces_what_it_does_with_parameters(name, way):
    wanted, found = by_mean(name), way(OPTIMIZERS[name]())
    for key, x in found.items():
        np.testing.assert_allclose(x, wanted[key], rtol=0, atol=2e-6)


BY_SHAPE = lambda tree: jax.tree.map(lambda x: x.shape == (40, 40), tree)


def of_leaves(change):
    """SGD on gradients that a function of whole arrays has changed."""
    every = optax.stateless(lambda grads, params: jax.tree.map(change, grads))
    return optax.chain(every, optax.sgd(0.1))


def halved_if_large(g):
    return jax.lax.cond(jnp.sum(g * g) > 1, lambda g: g / 2, lambda g: g, g)


def divided_in_turn(g):
    return jax.lax.fori_loop(0, 2, lambda _, x: x / (1 + jnp.sum(x * x)), g)


# Stacks are shards to the check.
@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: optax.adamw(1e-2, weight_decay=0.1, mask=BY_SHAPE), "looks at shapes"),
        (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), "looks at shapes"),
        (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "several entries"),
        (lambda: optax.lamb(1e-2), "several entries"),
        (lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "several entries"),
        (lambda: optax.apply_if_finite(optax.adam(1e-2), 3), "several entries"),
        (lambda: optax.noisy_sgd(0.1, key=0), "the same random numbers for every shard"),
        (lambda: of_leaves(halved_if_large), "several entries"),
        (lambda: of_leaves(divided_in_turn), "several entries"),
        (lambda: of_leaves(lambda g: jnp.cumsum(g).reshape(g.shape)), "several entries"),
    ],
    ids=[
        "mask",
        "adafactor",
        "clip",
        "lamb",
        "block rms",
        "finite",
        "noise",
        "cond",
        "loop",
        "cumsum",
    ],
)
def test_what_looks_at_shapes_or_mixes_entries_is_refused(make, text, way):
    with pytest.raises(ValueError, match=text):
        way(make())


def test_branches_by_shapes_are_refused():
    """JAX itself refuses them, with words about types."""
    with pytest.raises(ValueError, match="looks at shapes"):
        by_sharded_optimizer(optax.contrib.galore(1e-2, rank=2))


def test_a_rate_may_be_set_to_a_number_of_python():
    """Its type is weak, which makes another program, and no other optimizer."""
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx = jaxcomp.sharded_optimizer(tx, "replica")
    init, step = jaxcomp.train_step(
        lambda p, b: jnp.sum(p) * jnp.mean(b), tx, mesh_of(2), "replica"
    )
    start = np.ones((8, 8), np.float32)
    state = optax.tree.set(init(start), learning_rate=0.0)
    np.testing.assert_array_equal(step(start, state, np.ones(2, np.float32))[0], start)


@pytest.mark.parametrize(
    ("shape", "ndim", "wanted"),
    [
        ((6,), 0, (6,)),
        ((1,), 0, (1,)),
        ((6,), 1, (6,)),
        ((6,), 3, (1, 1, 6)),
        ((2, 6), 1, (12,)),
        ((2, 6), 2, (2, 6)),
        ((2, 6), 4, (1, 1, 2, 6)),
    ],
)
def test_a_piece_has_the_rank_of_its_parameter(shape, ndim, wanted):
    assert ranked(jnp.zeros(shape), ndim).shape == wanted


def test_the_bytes_of_one_scale_are_no_norm_but_a_sum_is():
    def made(function, x):
        return [_is_norm(eqn) for eqn in jax.make_jaxpr(function)(x).jaxpr.eqns]

    cast = lambda x: jax.lax.bitcast_convert_type(x, jnp.float32)
    assert made(cast, jnp.zeros((1, 4), jnp.uint8)) == [False]
    assert any(made(jnp.sum, jnp.zeros(4)))
