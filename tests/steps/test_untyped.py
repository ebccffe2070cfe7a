"""A loss whose loops JAX cannot type over the replicas trains as one whose loops it can."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.steps import untyped
from jaxcomp.steps.gradient import Gradient
from tests.helpers import replicas
from tests.helpers.layered import EXACT, assert_close, make_batch, make_params
from tests.helpers.replicas import mesh_of

DENSE = optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), "replica"), optax.sgd(0.5))
# In three steps each entry is among those that are sent.
COCKTAIL = jaxcomp.cocktail_sgd(
    optax.sgd(0.5), "replica", compressor=jaxcomp.cocktail(random=0.5, top=0.5)
)


def zeros_alike(x):
    """Zeros that are equal on all replicas."""
    return jnp.zeros(jnp.shape(x))


def looped(params, batch, zeros=zeros_alike, gather=lambda w: w):
    """A recurrence, a sum and a branch, which begin at zeros."""
    cell = lambda carry, x: (jnp.tanh(carry @ gather(params["first"]) + x), None)
    last, _ = lax.scan(cell, zeros(batch["x"]), jnp.stack([batch["x"], batch["y"]]))
    add = lambda i, total: total + jnp.mean(last[:, i])
    total = lax.fori_loop(0, 3, add, zeros(last[0, 0]))
    return jnp.mean(last**2) + lax.cond(total > 0, lambda: total, lambda: zeros(total))


def trained(make, loss_fn, tx=DENSE, sizes=(2,), **options):
    given = make_params(), map(make_batch, range(3)), make
    params, _, seen = replicas.trained(loss_fn, tx, mesh_of(*sizes), *given, **options)
    return params, seen[-1]


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(trained, jaxcomp.train_step),
        functools.partial(trained, jaxcomp.train_step, accumulate=3),
        functools.partial(trained, jaxcomp.train_step, tx=COCKTAIL),
        functools.partial(trained, jaxcomp.overlapped_train_step, tx=COCKTAIL),
        functools.partial(trained, jaxcomp.train_step, sizes=(2, 2), param_specs=P()),
    ],
)
def test_it_trains_as_with_types(make):
    """Most parameters are not in it: their gradients are zeros on all replicas."""
    found, expected = make(looped), make(functools.partial(looped, zeros=jnp.zeros_like))
    assert_close(found, expected, 1e-6)
    assert np.abs(found[0]["first"] - make_params()["first"]).max() > 0.01


def test_it_compiles_to_a_program_of_the_same_cost(optimized):
    params, batch, costs = make_params(), make_batch(), []
    for zeros in (zeros_alike, jnp.zeros_like):
        loss_fn = functools.partial(looped, zeros=zeros)
        init, step = jaxcomp.train_step(loss_fn, DENSE, mesh_of(2), "replica")
        program = step.lower(params, init(params), batch).compile()
        kernels = [program.as_text().count(f" {name}(") for name in ("fusion", "dot", "while")]
        memory, flops = program.memory_analysis(), program.cost_analysis()["flops"]
        sent = report.sent_bytes(program, mesh_of(2))
        costs.append((kernels, memory.temp_size_in_bytes, flops, sent))
    assert costs[0] == costs[1] and min(costs[0][0]) > 0


def test_what_else_it_returns_has_its_types():
    """A count of the model state is still equal on all replicas, and a mean is averaged."""

    def loss_fn(params, batch, *, rng, model_state):
        noise = jax.random.normal(rng)
        new = {"count": model_state["count"] + 1, "mean": jnp.mean(batch["x"])}
        return looped(params, batch) + 0 * noise, {"noise": noise, "one": 1}, new

    init, step = jaxcomp.train_step(loss_fn, DENSE, mesh_of(2), "replica", has_aux=True)
    params, batch = make_params(), make_batch()
    given = {
        "rng": jax.random.key(0),
        "model_state": {"count": jnp.int32(4), "mean": jnp.zeros([])},
    }
    *_, metrics = step(params, init(params), batch, **given)
    assert metrics["model_state"]["count"] == 5 and list(metrics["aux"]["one"]) == [1, 1]
    assert_close(metrics["model_state"]["mean"], batch["x"].mean(), 1e-6)
    assert len(set(np.asarray(metrics["aux"]["noise"]).tolist())) == 2


def test_so_does_an_evaluation():
    step = jaxcomp.eval_step(lambda *of: {"loss": looped(*of)}, mesh_of(2), "replica")
    init, _ = jaxcomp.train_step(looped, DENSE, mesh_of(2), "replica")
    params, batch = make_params(), make_batch()
    found = step(params, init(params), batch)["loss"]
    halves = [
        looped(params, {k: x[own] for k, x in batch.items()})
        for own in np.arange(24).reshape(2, -1)
    ]
    assert_close(found, sum(halves) / 2, 1e-6)


def test_a_loop_of_a_library_trains():
    def loss_fn(params, batch):
        logits, none = batch["x"].reshape(-1, 4, 4) @ params["first"][:4, :4], jnp.zeros
        shape = logits.shape[:1] + (2,)
        losses = optax.ctc_loss(logits, none(logits.shape[:2]), jnp.ones(shape, int), none(shape))
        return jnp.mean(losses)

    init, step = jaxcomp.train_step(loss_fn, DENSE, mesh_of(2), "replica")
    params, batch = make_params(), make_batch()
    gradient = jax.grad(loss_fn)(params, batch)["first"]
    found = step(params, init(params), batch)[0]["first"]
    assert_close(found, params["first"] - 0.5 * gradient, 1e-6)


@jax.custom_vjp
def scaled(x, scale):
    return x * scale


def scaled_backward(saved, gradient):
    x, scale = saved
    return gradient * scale, gradient * x


scaled.defvjp(lambda x, scale: (x * scale, (x, scale)), scaled_backward)


@jax.custom_vjp
def weighed(x, weights):
    """Nobody differentiates at the weights, so their gradients are zeros of any type."""
    return x * weights


def weighed_backward(weights, gradient):
    return gradient * weights, jnp.zeros(weights.shape)


weighed.defvjp(lambda x, weights: (x * weights, weights), weighed_backward)


@jax.custom_jvp
def rounded(x):
    return jnp.round(x)


rounded.defjvp(lambda given, tangents: (rounded(*given), jnp.zeros(given[0].shape)))


def as_one_device(x):
    """As Lineax, which compares the structures of operators and vectors."""
    shape = jax.eval_shape(lambda x: x, x)
    if shape.sharding is not None:
        raise ValueError(f"got {shape}")
    return x


CUSTOM = {
    "a gradient of what is equal": lambda y, x: scaled(y, 2 * jnp.ones(y.shape)),
    "a gradient of zeros": lambda y, x: weighed(y, x),
    "a tangent of zeros": lambda y, x: y + rounded(y),
    "a comparison of types": lambda y, x: as_one_device(y),
}


@pytest.mark.parametrize(
    ("name", "make"),
    [(name, functools.partial(trained, jaxcomp.train_step)) for name in CUSTOM]
    + [
        ("a gradient of zeros", functools.partial(trained, step, **options))
        for step, options in [
            (jaxcomp.train_step, {"accumulate": 3}),
            (jaxcomp.train_step, {"tx": COCKTAIL}),
            (jaxcomp.overlapped_train_step, {"tx": COCKTAIL}),
        ]
    ],
)
def test_custom_derivatives_train_as_on_one_device(name, make):
    """The reference is the plain formula, which JAX differentiates by itself."""
    plain = {
        "a gradient of what is equal": lambda y, x: 2 * y,
        "a gradient of zeros": lambda y, x: y * x,
        "a tangent of zeros": lambda y, x: y + lax.stop_gradient(jnp.round(y)),
        "a comparison of types": lambda y, x: y,
    }

    def loss_of(custom):
        return lambda params, batch: jnp.mean(
            (custom(batch["x"] @ params["first"], batch["x"]) - batch["y"]) ** 2
        )

    found, expected = make(loss_of(CUSTOM[name])), make(loss_of(plain[name]))
    assert_close(found, expected, 1e-6)


def test_a_callback_of_a_loss_that_is_traced_twice_runs_once():
    seen = []

    def loss_fn(params, batch):
        jax.debug.callback(seen.append, batch["x"][0, 0])
        return looped(params, batch)

    trained(jaxcomp.train_step, loss_fn)
    jax.effects_barrier()
    assert len(seen) == 3 * 2  # steps, replicas


def test_an_error_of_the_loss_is_raised_as_it_is():
    def loss_fn(params, batch):
        return looped(params, batch) + batch["z"]

    with pytest.raises(KeyError, match="z"):
        trained(jaxcomp.train_step, loss_fn)


def shifted(params, batch):
    """What needs types to be differentiated."""
    return looped(params, batch | {"x": batch["x"] - lax.pmean(batch["x"], "replica")})


def numbered(params, batch):
    return looped(params, batch) * (1 + lax.axis_index("replica"))


@pytest.mark.parametrize("loss_fn", [shifted, numbered])
def test_with_a_collective_it_is_refused_with_what_to_write(loss_fn):
    with pytest.raises(ValueError, match=r"a loop, a branch .* jnp.zeros_like\(x\) of a part x"):
        trained(jaxcomp.train_step, loss_fn)


def test_so_it_is_in_shards():
    init, step = jaxcomp.qsdp_train_step(
        functools.partial(looped, gather=EXACT.gather), optax.sgd(0.5), mesh_of(2), EXACT
    )
    shards = EXACT.shard(make_params(), mesh_of(2))
    with pytest.raises(ValueError, match="a loop, a branch"):
        step(shards, init(shards), make_batch())


@pytest.mark.parametrize("specs", [(P("fsdp"), P("replica")), (P(), P("replica"))])
def test_so_it_is_where_the_batch_differs_over_other_axes_than_parameters(specs):
    def loss_fn(params, batch):
        return lax.fori_loop(0, 3, lambda i, total: total + jnp.sum(params * batch[i]), 0.0)

    call = lambda gradient, *args: gradient.loss_fn(*args)[None]
    local = untyped.as_needed(call, Gradient(loss_fn, mesh_of(2, 2), "replica"))
    mapped = jax.shard_map(local, mesh=mesh_of(2, 2), in_specs=specs, out_specs=P("replica"))
    with pytest.raises(ValueError, match="a loop, a branch"):
        jax.jit(mapped)(jnp.ones(2), jnp.ones(6))
