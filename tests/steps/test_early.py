"""A step whose messages leave in the backward pass: equal results, in the order that hides them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp.exchange import journeys
from jaxcomp.steps import early
from jaxcomp.steps import train as plain
from tests.helpers import replicas
from tests.helpers.every_method import METHODS
from tests.helpers.replicas import everywhere, mesh_of, rows

LAYERS, WIDTH = 4, 16
PARAMS = {
    f"layer_{i}": {
        "bias": np.zeros(WIDTH, np.float32),
        "kernel": np.random.default_rng(i).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4,
    }
    for i in range(LAYERS)
}


def loss(params, batch):
    x = batch
    for i in range(LAYERS):
        x = jnp.tanh(x @ params[f"layer_{i}"]["kernel"] + params[f"layer_{i}"]["bias"][None])
    return jnp.mean((x - 0.5) ** 2)


@pytest.fixture(autouse=True)
def small_messages_count(monkeypatch):
    monkeypatch.setattr(early, "_SMALL", 16)


def as_on_gpus(monkeypatch):
    monkeypatch.setattr(plain, "is_of_gpus", lambda mesh: True)
    monkeypatch.setattr(journeys, "platform", lambda: "gpu")


def trained(tx, mesh, **options):
    """Trains some steps, one of them with an infinite row."""
    draw = lambda number: np.random.default_rng(number).normal(size=(8, WIDTH))
    batches = [draw(number).astype(np.float32) for number in range(4)]
    batches[2][1] = np.inf
    return jax.device_get(replicas.trained(loss, tx, mesh, PARAMS, batches, **options))


CODE = jaxcomp.quantize(8, block=16)


def mean(code=CODE):
    """A mean with a bucket for each kernel."""
    code = jaxcomp.two_shot(code, bucket_numel=WIDTH**2)
    return jaxcomp.compressed_mean(code, "replica", exact=lambda path, leaf: leaf.ndim < 2)


CLIPPED = optax.chain(mean(), jaxcomp.clip_by_global_norm(0.1), optax.adam(1e-2))


@pytest.mark.parametrize(
    ("tx", "sizes", "options"),
    [
        (CLIPPED, (2,), {}),
        (optax.chain(mean(jaxcomp.identity()), optax.adam(1e-2)), (2,), {"accumulate": 2}),
        (METHODS["sharded_optimizer"].tx, (2,), {}),
        (METHODS["slamb"].tx, (2, 2), {"fast_axis": "fast"}),
    ],
    ids=["clipped", "dense, microbatches", "sharded", "drifts, fast axis"],
)
def test_it_trains_as_a_step_that_does_one_after_the_other(tx, sizes, options, monkeypatch):
    mesh = mesh_of(*sizes, second="fast")
    wanted = trained(tx, mesh, **options)
    as_on_gpus(monkeypatch)
    found = trained(tx, mesh, **options)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, found, wanted)


def order_of(tx, loss=loss):
    mesh = mesh_of(2)
    init, step = jaxcomp.train_step(loss, tx, mesh, "replica")
    params = everywhere(mesh, PARAMS)
    batch = rows(mesh, np.zeros((8, WIDTH), np.float32))
    text = str(step.trace(params, init(params), batch).jaxpr)
    return re.findall(
        r"\b(all_to_all|all_gather_invariant|psum_invariant|dot_general|optimization_barrier)\b",
        text,
    )


def test_a_message_leaves_before_the_products_of_the_layers_below(monkeypatch):
    tx = optax.chain(mean(), optax.sgd(0.1))
    products = 3 * LAYERS - 1  # the inputs have no gradient
    in_plain_order = order_of(tx)
    assert in_plain_order[:products] == ["dot_general"] * products
    as_on_gpus(monkeypatch)
    order = order_of(tx)
    assert order.count("dot_general") == products
    made = lambda name, nth: positions(order, name)[nth]
    between = lambda start, stop: order[start:stop].count("dot_general")
    # The top layer's kernel is known after the forward pass and its two products. One layer later
    # come the first hop of the layer below, and its own second hop.
    assert between(0, made("all_to_all", 0)) <= LAYERS + 2
    # Two barriers are the code's own; for the third the products of the layers below wait.
    sent = made("all_to_all", 0)
    assert order[sent - 4 : sent] == ["dot_general", *["optimization_barrier"] * 3]
    for layer in range(LAYERS - 2):
        assert between(made("all_to_all", layer), made("all_to_all", layer + 1)) == 2
        assert between(made("all_to_all", layer), made("all_gather_invariant", layer)) == 2


def test_the_first_bucket_of_a_dense_mean_does_not_wait_for_what_is_not_finite(monkeypatch):
    whole = WIDTH * (WIDTH + 1)
    code = jaxcomp.two_shot(jaxcomp.identity(), bucket_numel=whole)
    as_on_gpus(monkeypatch)
    order = order_of(optax.chain(jaxcomp.compressed_mean(code, "replica"), optax.sgd(0.1)))
    first = order[: order.index("psum_invariant")]
    assert 0 < first.count("dot_general") <= LAYERS + 2


def test_products_of_a_jitted_loss_are_seen(monkeypatch):
    as_on_gpus(monkeypatch)
    assert order_of(CLIPPED, jax.jit(loss)) == order_of(CLIPPED)


def positions(order, name):
    return [i for i, other in enumerate(order) if other == name]


def test_what_a_loss_prints_is_printed(monkeypatch, capfd):
    def talking(params, batch):
        jax.debug.callback(lambda: print("seen", flush=True))
        return loss(params, batch)

    as_on_gpus(monkeypatch)
    mesh = mesh_of(2)
    init, step = jaxcomp.train_step(talking, CLIPPED, mesh, "replica")
    params = everywhere(mesh, PARAMS)
    step(params, init(params), rows(mesh, np.zeros((8, WIDTH), np.float32)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 2
