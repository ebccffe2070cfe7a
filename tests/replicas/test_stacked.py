"""A model whose layers are stacked trains as the same model unstacked, by every method."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import schedules
from jaxcomp.replicas.protocol import drifts as drifts_of
from tests.helpers import replicas
from tests.helpers.replicas import history_of, mesh_of

LAYERS, WIDTH, REPLICAS, STEPS = 3, 40, 2, 6
STACKED = jaxcomp.by_path(("^blocks/", True), (".*", False))
EIGHT = jaxcomp.quantize(8)
# Matrices above 1,024 elements, vectors and scalars below, and layers of very different scale.
SHAPES = {"kernel": (WIDTH, WIDTH), "norm": (WIDTH,), "gain": ()}


def unstacked_params():
    rng = np.random.default_rng(0)
    layer = lambda scale: {
        name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()
    }
    blocks = {f"blocks_{i}": layer(10.0**i) for i in range(LAYERS)}
    return blocks | {"head": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)}


def stack(tree):
    layers = [tree[f"blocks_{i}"] for i in range(LAYERS)]
    return {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *layers), "head": tree["head"]}


def layers_of(params):
    if "blocks" in params:
        return [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(LAYERS)]
    return [params[f"blocks_{i}"] for i in range(LAYERS)]


def loss_fn(params, batch):
    """Of linear functions, so that gradients do not depend on rounding."""
    coefficients, head = batch
    of_leaf = lambda x, c: jnp.sum(x * jnp.mean(c, axis=0))
    blocks = [
        sum(jax.tree.leaves(jax.tree.map(of_leaf, layer, c)))
        for layer, c in zip(layers_of(params), coefficients, strict=True)
    ]
    return sum(blocks) + of_leaf(params["head"], head)


def batch_of(step):
    rng = np.random.default_rng(step + 1)
    draw = lambda shape: rng.normal(size=(REPLICAS, *shape)).astype(np.float32)
    return [{k: draw(s) for k, s in SHAPES.items()} for _ in range(LAYERS)], draw((WIDTH, WIDTH))


def decayed(optimizer):
    """Decay of what has two axes: the usual mask, which looks at shapes."""
    return optimizer(
        1e-2, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
    )


def behind(compressor, optimizer):
    return optax.chain(jaxcomp.compressed_mean(compressor, "replica"), optimizer)


# Layers are in another order in the buckets, but no block has values of two of them.
WHOLE_BLOCKS = jaxcomp.by_path(("kernel|head", jaxcomp.sign(block=32)), (".*", jaxcomp.identity()))
EVERY_3 = schedules.every(3, STEPS, after=2)
METHODS = {
    "lamb": lambda: behind(EIGHT, decayed(optax.lamb)),
    "by path": lambda: behind(
        jaxcomp.by_path((r"blocks.0/", jaxcomp.quantize(2)), (".*", jaxcomp.sign())), optax.sgd(0.1)
    ),
    "cocktail_sgd": lambda: jaxcomp.cocktail_sgd(decayed(optax.adamw), "replica"),
    "one_bit_adam": lambda: decayed(
        functools.partial(jaxcomp.one_bit_adam, axis_name="replica", freeze_step=3)
    ),
    "zero_one_adam": lambda: jaxcomp.zero_one_adam(
        *(1e-2, "replica"),
        sync_at=EVERY_3,
        variance_at=schedules.until(2),
        deviations=jaxcomp.Deviations(variance_floor=0.1),
    ),
    "slamb": lambda: jaxcomp.slamb(
        1e-2, "replica", density=0.25, sync_every=4, exact_numel=1024, weight_decay=0.01
    ),
    "slamb, coded": lambda: jaxcomp.slamb(
        *(1e-2, "replica"),
        sync_every=4,
        exact_numel=1024,
        variance="mean",
        # Layers follow each other as in a stack, so that they share blocks.
        compressor=jaxcomp.two_shot(jaxcomp.compose(jaxcomp.random_k(0.25), EIGHT), order=None),
        drift_compressor=jaxcomp.two_shot(EIGHT, order=None),
    ),
    "slamb, by path": lambda: jaxcomp.slamb(
        *(1e-2, "replica"),
        sync_every=4,
        exact_numel=1024,
        compressor=jaxcomp.by_path(
            (r"blocks.0/", jaxcomp.random_k(0.25)), (".*", jaxcomp.random_k(0.5))
        ),
        weight_decay=0.1,
        mask=functools.partial(jax.tree.map_with_path, lambda path, _: "0" in str(path)),
    ),
    "one_bit_lamb": lambda: decayed(
        functools.partial(
            jaxcomp.one_bit_lamb, axis_name="replica", freeze_step=3, compressor=WHOLE_BLOCKS
        )
    ),
    "one_bit_lamb, scaled": lambda: jaxcomp.one_bit_lamb(
        *(1e-2, "replica"),
        freeze_step=3,
        compressor=WHOLE_BLOCKS,
        deviations=jaxcomp.Deviations(precondition=False, variance_floor=1e-4),
    ),
    "local_steps, fragments by path": lambda: jaxcomp.local_steps(
        optax.sgd(0.1),
        "replica",
        every=2,
        code=WHOLE_BLOCKS,
        # After one step only the first layer has met.
        fragments=jaxcomp.by_path((r"blocks.0/", 1), (".*", 0)),
    ),
    "sharded_optimizer": lambda: jaxcomp.sharded_optimizer(optax.adamw(1e-2), "replica"),
    "power_sgd": lambda: optax.chain(
        jaxcomp.power_sgd(2, "replica", warmup_steps=2), optax.sgd(0.1, momentum=0.9)
    ),
    "dion": lambda: jaxcomp.dion(1e-2, "replica", rank=2, weight_decay=0.1),
    "dion, by path": lambda: jaxcomp.dion(
        1e-2,
        "replica",
        rank=2,
        exact=jaxcomp.by_path(("blocks.0", True), (".*", False)),
        others=optax.lamb(0.1),
    ),
    "muon": lambda: jaxcomp.local_steps(
        jaxcomp.muon(1e-2, others=decayed(optax.lamb)), "replica", every=2, code=WHOLE_BLOCKS
    ),
    "local_steps": lambda: jaxcomp.local_steps(
        *(decayed(optax.lamb), "replica"),
        every=2,
        code=EIGHT,
        outer=decayed(optax.lamb),
        error_decay=0.9,
    ),
    "local_steps, by path": lambda: jaxcomp.local_steps(
        *(optax.adamw(1e-2), "replica"),
        every=2,
        code=jaxcomp.by_path((r"blocks.0/", jaxcomp.quantize(2)), (".*", jaxcomp.sign())),
        error_decay=0.9,
    ),
}


def distance(x, y):
    """The largest difference of two arrays, as a share of the largest entry."""
    x, y = np.asarray(x), np.asarray(y)
    return np.abs(x - y).max() / np.abs(y).max()


def trained(tx, params, mesh=None, **options):
    """Parameters and state after a few steps."""
    mesh = mesh or mesh_of(REPLICAS)
    made = jaxcomp.train_step(loss_fn, tx, mesh, "replica", **options)
    batches, make = map(batch_of, range(STEPS)), lambda *args, **options: made
    params, state, seen = replicas.trained(loss_fn, tx, mesh, params, batches, make, **options)
    assert made.step._cache_size() == 1
    assert not any(metrics["skipped"] for metrics in seen)
    return params, state


@functools.cache
def unstacked(name):
    """Parameters and state of a method's row, with layers that are leaves of their own."""
    return trained(METHODS[name](), unstacked_params())


@functools.cache
def stacked(name):
    """The same with the layers in stacks, and `per_layer` around the method."""
    return trained(jaxcomp.per_layer(METHODS[name](), STACKED), stack(unstacked_params()))


@pytest.mark.parametrize("name", METHODS)
def test_a_stacked_model_trains_as_the_same_model_unstacked(name):
    (wanted, wanted_state), (found, state) = unstacked(name), stacked(name)
    errors = jax.tree.map(distance, found, stack(wanted))
    assert max(jax.tree.leaves(errors)) < 1e-6
    shapes = jax.tree.map(jnp.shape, found)
    drifts = drifts_of(state)
    assert len(drifts) == len(drifts_of(wanted_state))
    assert all(jax.tree.map(lambda d: d.shape[1:], drift) == shapes for drift in drifts)


def slamb(code, **options):
    return jaxcomp.slamb(1e-2, "replica", sync_every=3, exact_numel=100, compressor=code, **options)


def one_bit_lamb(code, **options):
    return jaxcomp.one_bit_lamb(1e-2, "replica", freeze_step=2, compressor=code, **options)


def stepped(tx, failing=()):
    """Parameters and state after random gradients, of which one layer's fails in some steps."""
    like, rng = stack(unstacked_params()), np.random.default_rng(0)
    drawn = lambda *lead: jax.tree.map(
        lambda x: rng.normal(size=(*lead, *x.shape)).astype(np.float32), like
    )
    params, gradients = drawn(), [drawn(REPLICAS) for _ in range(4)]
    for step in failing:
        gradients[step]["blocks"]["kernel"][1, 2, 3] = np.nan
    return history_of(jaxcomp.per_layer(tx, STACKED), params, gradients, REPLICAS)[-1]


@pytest.mark.parametrize(
    ("method", "code", "failing", "exact"),
    [
        (slamb, jaxcomp.random_k(0.5), [1], "norm|gain|blocks.0"),
        (one_bit_lamb, jaxcomp.sign(block=32), [], "norm|gain"),
    ],
)
def test_methods_that_know_of_stacks_have_the_state_of_separate_layers(
    method, code, failing, exact
):
    policy = jaxcomp.by_path((exact, jaxcomp.identity()), (".*", code))
    tx = method(policy, weight_decay=0.01)
    # A plain transformation gets layers one by one.
    plain = optax.GradientTransformationExtraArgs(*tx)
    found, wanted = stepped(tx, failing), stepped(plain, failing)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


def outside_branches(jaxpr):
    """The equations of a program, without those of its branches."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in (getattr(x, "jaxpr", x) for x in eqn.params.values()):
            if hasattr(inner, "eqns"):
                yield from outside_branches(inner)


def test_local_steps_leave_stacks_whole_between_exchanges():
    """A drift of separate layers would be cut and joined in every step: kernels for each layer."""
    params, mesh = stack(unstacked_params()), mesh_of(REPLICAS)
    local = jaxcomp.local_steps(jaxcomp.muon(1e-2), "replica", every=2)
    init, step = jaxcomp.train_step(loss_fn, jaxcomp.per_layer(local, STACKED), mesh, "replica")
    traced = step.trace(params, init(params), batch_of(0))
    joins = lambda eqn: eqn.primitive.name in ("stack", "concatenate") and eqn.outvars[0].aval.shape
    whole = (LAYERS, WIDTH, WIDTH)
    assert whole not in map(joins, outside_branches(traced.jaxpr.jaxpr))
    named = rf"f32\[{LAYERS},{WIDTH},{WIDTH}\]\S* = (stack|concatenate)"
    assert re.search(named, str(traced.jaxpr))  # in an exchange


def test_only_the_layer_that_fails_stands_still():
    params, state = stepped(slamb(jaxcomp.random_k(0.5)), failing=range(4))
    moved = [np.abs(np.asarray(state.variance["blocks"]["kernel"])[1, i]).max() for i in range(3)]
    assert [x > 0 for x in moved] == [True, True, False]
    assert np.asarray(state.skipped).tolist() == [0, 4]
    assert np.all(np.isfinite(np.asarray(params["blocks"]["kernel"])))


def test_without_it_a_stack_has_one_trust_ratio():
    params = stack(unstacked_params())
    (apart, _), (together, _) = stacked("slamb"), trained(METHODS["slamb"](), params)
    norms = lambda x: np.linalg.norm(np.asarray(x), axis=(1, 2))
    before = params["blocks"]["kernel"]
    moved = [norms(x["blocks"]["kernel"] - before) / norms(before) for x in (apart, together)]
    assert moved[0].max() < 2 * moved[0].min()
    assert moved[1].max() > 10 * moved[1].min()


def test_other_mesh_axes_may_shard_what_is_stacked():
    params = stack(unstacked_params())
    specs = jax.tree.map(lambda x: P(), params)
    specs["blocks"]["kernel"] = P(None, "fsdp")
    # Of a strided mask a shard's part is that of the whole; a run of neighbours may lie in two.
    options = {"compressor": jaxcomp.random_k(0.25, "strided"), "sync_every": 4}
    slamb = jaxcomp.slamb(1e-2, "replica", exact_numel=1024, weight_decay=0.01, **options)
    make = lambda: jaxcomp.per_layer(slamb, STACKED)
    wanted, _ = trained(make(), params, mesh_of(2, 2))
    found, _ = trained(make(), params, mesh_of(2, 2), param_specs=specs)
    assert not found["blocks"]["kernel"].is_fully_replicated
    assert max(jax.tree.leaves(jax.tree.map(distance, found, wanted))) < 1e-6


def test_rules_that_match_nothing_are_refused():
    nothing = jaxcomp.by_path(("^layers/", True), (".*", False))
    tx = jaxcomp.per_layer(optax.sgd(0.1), nothing)
    with pytest.raises(ValueError, match="no stacked leaf among .*blocks/kernel.*per_layer out"):
        tx.init(stack(unstacked_params()))


@pytest.mark.parametrize(("shape", "lack"), [((), "axes"), ((0, 3), "layers")])
def test_neither_a_scalar_nor_an_array_of_no_layers_is_a_stack(shape, lack):
    tx = jaxcomp.per_layer(optax.sgd(0.1), lambda path, leaf: True)
    with pytest.raises(ValueError, match=f"'scale' has no {lack} and cannot be stacked"):
        tx.init({"scale": jnp.zeros(shape), "w": jnp.zeros((2, 3))})


def test_what_owners_hold_of_stacked_layers_moves_to_other_numbers_of_replicas():
    def resized(tx, params, state):
        init, _ = jaxcomp.train_step(loss_fn, tx, mesh_of(3), "replica")
        return optax.tree_utils.tree_get(jaxcomp.resize(state, jax.eval_shape(init, params)), "mu")

    name, params = "sharded_optimizer", unstacked_params()
    layered = jaxcomp.per_layer(METHODS[name](), STACKED)
    found = resized(layered, stack(params), stacked(name)[1])
    wanted = resized(METHODS[name](), params, unstacked(name)[1])
    rows_of = lambda name: np.stack([wanted[f"blocks_{i}"][name] for i in range(LAYERS)], axis=1)
    for name in SHAPES:
        assert found["blocks"][name].shape[:2] == (3, LAYERS)
        np.testing.assert_allclose(found["blocks"][name], rows_of(name), rtol=0, atol=1e-6)
