"""Sharded parameters: equal weights everywhere, in both passes; codes, draws and what is sent."""

import dataclasses
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
from jaxcomp.replicas.resize import resize
from jaxcomp.replicas.shards import Shard
from jaxcomp.sharded.qsdp import draws
from tests.helpers import layered
from tests.helpers.layered import EXACT, gathered, odd_tree, on_replicas, sharded, stacked
from tests.helpers.replicas import mesh_of, one_value


@pytest.mark.parametrize("num_replicas", [1, 3, 8])
def test_shards_of_any_size_come_back_as_they_were(num_replicas):
    params = odd_tree() | {"half": jnp.arange(11, dtype=jnp.bfloat16)}
    mesh, shards = sharded(EXACT, params, num_replicas, stacked=stacked)
    sizes = {name: shard.data.shape for name, shard in shards.items()}
    ceil = lambda size: max(1, -(-size // num_replicas))
    assert sizes == {
        "matrix": (num_replicas, ceil(33 * 37)),
        "less than the axis": (num_replicas, ceil(3)),
        "scalar": (num_replicas, 1),
        "nothing": (num_replicas, 1),
        "layers": (num_replicas, 2, ceil(35)),
        "half": (num_replicas, ceil(11)),
    }
    for shard in shards.values():
        assert all(part.data.shape[0] == 1 for part in shard.data.addressable_shards)
    back = EXACT.unshard(shards, mesh)
    for name, value in params.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)
    # What is behind a parameter's end are zeros.
    assert sum(float(jnp.sum(jnp.abs(x))) for x in jax.tree.leaves(shards)) == pytest.approx(
        sum(float(np.sum(np.abs(np.float32(x)))) for x in params.values()), rel=1e-4
    )


@pytest.mark.parametrize("sizes", [(3,), (2, 2)])
def test_shards_are_laid_out_anew_on_meshes_of_other_shapes(sizes):
    over = lambda sizes: dataclasses.replace(EXACT, fast_axis="fast" if len(sizes) > 1 else None)
    _, shards = sharded(over(sizes), odd_tree(), *sizes, stacked=stacked)
    for others in ((1,), (4,), (8,), (2, 3), (1, 4)):
        fsdp = over(others)
        mesh, like = sharded(fsdp, odd_tree(seed=1), *others, stacked=stacked)
        resized = resize(
            {"params": shards, "count": jnp.int32(3)}, {"params": like, "count": jnp.int32(0)}
        )
        assert resized["count"] == 3
        for name, shard in resized["params"].items():
            assert shard.data.shape == like[name].data.shape
            assert shard.data.sharding == like[name].data.sharding
        back = fsdp.unshard(resized["params"], mesh)
        jax.tree.map(np.testing.assert_array_equal, back, odd_tree())


def cgx(x, bits, block):
    """What Compressed Gradient eXchange's min-max quantizer decodes to, rounding to nearest."""
    decoded = np.empty_like(x)
    for start in range(0, x.size, block):
        values = x[start : start + block]
        low = values.min()
        unit = (values.max() - low) / np.float32(2**bits - 1)
        codes = np.minimum(np.floor((values - low) / unit + 0.5), 2**bits - 1)
        decoded[start : start + block] = low + unit * codes
    return decoded


def test_all_replicas_compute_with_what_the_owners_codes_decode_to():
    num_replicas, bits = 3, 4
    code = jaxcomp.quantize(bits, block=64, range="minmax", scale_dtype="float32")
    fsdp = jaxcomp.qsdp("replica", code, code)
    params = {"a": odd_tree()["matrix"], "bias": odd_tree()["less than the axis"]}
    full = gathered(fsdp, params, num_replicas)
    for copies in full.values():
        for copy in copies[1:]:
            assert np.asarray(copy).tobytes() == np.asarray(copies[0]).tobytes()
    np.testing.assert_array_equal(full["bias"][0], params["bias"])
    flat = params["a"].reshape(-1)
    want = np.concatenate([cgx(x, bits, 64) for x in np.split(flat, num_replicas)])
    unit = (flat.max() - flat.min()) / (2**bits - 1)
    # Roundings of the products and sums; no value of this tree lies that near to a tie.
    np.testing.assert_allclose(full["a"][0].reshape(-1), want, rtol=0, atol=unit * 2.0**-16)


SHIFT = jaxcomp.quantize(3, block=64, rounding="shift")
KEPT = {"secondary": True}


@pytest.mark.parametrize("options", [{}, {"fast_axis": "fast"}, {"fast_axis": "fast", **KEPT}])
def test_both_passes_see_one_draw_and_every_step_and_layer_another(options):
    width, sizes = 33, (2, 2) if options else (2,)
    fsdp = jaxcomp.qsdp("replica", SHIFT, jaxcomp.identity(), seed=5, **options)
    square = odd_tree()["matrix"][:, :width]
    params = {"layers": np.stack([square, square]), "last": square}
    mesh, shards = sharded(fsdp, params, *sizes, stacked=stacked)

    def passes(shards, count):
        """Each layer's weights in the forward pass, and in the backward pass."""
        local = fsdp.local(shards, count)
        layer = fsdp.layer(lambda w, x: x @ w)
        eye = jaxcomp.replicas.types.to_varying(jnp.eye(width), fsdp.axes)

        def both(shard):
            forward, vjp = jax.vjp(lambda x: layer(shard, x), eye)
            return forward, vjp(eye)[0].T

        _, pairs = lax.scan(lambda carry, shard: (carry, both(shard)), 0, local["layers"])
        last = both(local["last"])
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]])[None], pairs, last)

    run = on_replicas(passes, mesh)
    forward, backward = run(shards, jnp.int32(0))
    np.testing.assert_array_equal(forward, backward)
    for device in forward[1:]:
        np.testing.assert_array_equal(device, forward[0])
    again, _ = run(shards, jnp.int32(0))
    np.testing.assert_array_equal(forward, again)
    later, _ = run(shards, jnp.int32(1))
    draws = [np.asarray(x) for step in (forward, later) for x in step[0]]
    assert len({draw.tobytes() for draw in draws}) == 6
    step = np.abs(square).max() / 3
    assert max(np.abs(draw - square).max() for draw in draws) < 0.51 * step


def test_every_step_microbatch_layer_and_seed_has_a_key_of_its_own():
    mesh, shards = sharded(EXACT, odd_tree(), 2, stacked=stacked)

    def seeds(shards, counts):
        keys = [
            shard.key.seed.reshape(-1)
            for fsdp in (EXACT, jaxcomp.qsdp("replica", seed=1))
            for count in counts
            for draw in ((), (0,), (1,))
            for shard in fsdp.local(shards, count, *draw).values()
        ]
        return jnp.concatenate(keys)[None]

    got = np.asarray(on_replicas(seeds, mesh)(shards, jnp.arange(2)))
    np.testing.assert_array_equal(got[0], got[1])  # of replicas
    # Five parameters, of which one has two layers.
    assert len(set(got[0].tolist())) == got[0].size == 2 * 2 * 3 * 6


def test_the_random_shift_is_unbiased_and_of_variance_step_squared_over_12():
    num_replicas, num_draws = 2, 4096
    fsdp = jaxcomp.qsdp("replica", SHIFT, jaxcomp.identity(), exact=lambda *_: False)
    x = np.random.default_rng(0).uniform(-3, 3, 16).astype(np.float32)
    x[[0, 8]] = 3.0  # both shards' steps are 3 / 3 = 1
    mesh, shards = sharded(fsdp, x, num_replicas)

    def draws(shards, counts):
        draw = lambda _, count: (_, fsdp.gather(fsdp.local(shards, count)))
        return lax.scan(draw, 0, counts)[1][None]

    got = np.asarray(on_replicas(draws, mesh)(shards, jnp.arange(num_draws)))
    np.testing.assert_array_equal(got[0], got[1])
    errors = got[0] - x
    # One scalar for all coordinates: lattices of all of them are shifted alike, modulo the step.
    shifts = (got[0] - got[0][:, :1] + 0.5) % 1.0
    np.testing.assert_allclose(shifts, 0.5, rtol=0, atol=1e-5)
    # A uniform variable's mean has the variance 1/12 over n, its variance 1/180 over n.
    assert np.abs(errors.mean(axis=0)).max() < 5 * np.sqrt(1 / 12 / num_draws)
    assert np.abs(errors.var(axis=0) - 1 / 12).max() < 5 * np.sqrt(1 / 180 / num_draws)


def test_nearest_rounding_stalls_where_the_random_shift_escapes():
    # f(w) = |w|^2 from (1, -1), of which only what is quantized is kept, in steps of 1. Behind w
    # lie two constants that hold the grid; a gradient step moves w by less than half a step.
    rate, pins = 0.1, np.float32([7, -7])

    def train(rounding, num_steps):
        code = jaxcomp.quantize(4, block=4, rounding=rounding)
        fsdp = jaxcomp.qsdp("replica", code, jaxcomp.identity(), exact=lambda *_: False)
        mesh, shards = sharded(fsdp, np.concatenate([np.float32([1, -1]), pins]), 1)

        def step(shard, count):
            loss = lambda shard: jnp.sum(fsdp.gather(fsdp.local(shard, count))[:2] ** 2)
            w = (shard.data - rate * jax.grad(loss)(shard).data)[0, :2]
            moved = Shard(jnp.concatenate([w, pins])[None], *shard_facts(shard))
            kept = fsdp.gather(fsdp.local(moved, count + num_steps))[:2]
            return Shard(jnp.concatenate([kept, pins])[None], *shard_facts(shard)), kept

        walk = lambda shard, counts: lax.scan(step, shard, counts)[1]
        return np.asarray(on_replicas(walk, mesh)(shards, jnp.arange(num_steps)))

    np.testing.assert_array_equal(train("nearest", 50), [[1, -1]] * 50)
    # Its mean follows gradient descent, w <- 0.8 w: after 50 steps it is within the noise of 0.
    w = train("shift", 2000)[50:]
    assert np.abs(w.mean(axis=0)).max() < 0.1
    # Each step adds 1/12, each keeps 0.64 of what was there: 1/12 / 0.36 in the end.
    assert np.abs(w.var(axis=0) - 1 / 12 / 0.36).max() < 0.05


def shard_facts(shard):
    return shard.shape, shard.weights, shard.gradients


def test_eight_bits_cost_at_most_807_per_parameter_and_gather_and_nothing_else_is_sent():
    num_replicas, numel = 4, 2 * 64 * 1024
    fsdp = jaxcomp.qsdp("replica")
    params = {
        name: {"up": jnp.zeros((64, 1024)), "down": jnp.zeros((1024, 64))} for name in ("a", "b")
    }
    mesh, shards = sharded(fsdp, params, num_replicas)

    def loss(shards, x_and_count):
        x, count = x_and_count
        local = fsdp.local(shards, count)
        for name in ("a", "b"):
            x = fsdp.layer(lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"])(local[name], x)
        return jnp.sum(x**2)

    x = jnp.ones((1, 64)), jnp.int32(0)
    grad = on_replicas(lambda shards, x: jax.grad(loss)(shards, x), mesh)
    compiled = grad.lower(shards, x).compile()
    message = numel // num_replicas * (8 + 2 * 16 / 1024) / 8
    forward, backward = 2, 2
    found = sorted((m.op, m.operand_bytes, m.axes) for m in report.collectives(compiled, mesh))
    assert (
        found
        == [("all-gather", message, ("replica",))] * (forward + backward)
        + [("all-to-all", num_replicas * message, ("replica",))] * backward
    )
    assert 8 * message * num_replicas / numel <= 8.07
    # Each layer: two gathers and a scatter, of which (R - 1) messages leave a replica.
    assert report.sent_bytes(compiled, mesh) == 2 * 3 * (num_replicas - 1) * message
    jaxcomp.assert_no_dense(compiled, mesh, "replica")


def test_one_layer_of_weights_is_held_at_a_time():
    width, hidden = 64, 512
    fsdp = jaxcomp.qsdp("replica")
    num_replicas = 8
    mesh = mesh_of(num_replicas)
    x = jnp.ones((1, width))

    def planned(num_layers, block):
        layers = [
            {"up": jnp.zeros((width, hidden)), "down": jnp.zeros((hidden, width))}
        ] * num_layers

        def loss(shards, x):
            for shard in fsdp.local(shards, x[0, 0].astype(int)):
                x = block(shard, x)
            return jnp.sum(x)

        grad = on_replicas(lambda shards, x: jax.grad(loss)(shards, x), mesh)
        plan = grad.lower(fsdp.shard(layers, mesh), x).compile().memory_analysis()
        return plan.temp_size_in_bytes

    function = lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]
    layer_bytes = 2 * 4 * width * hidden
    more = planned(4, fsdp.layer(function)) - planned(2, fsdp.layer(function))
    # Of two layers more, their shards of the gradient.
    assert more < 1.1 * 2 * layer_bytes / num_replicas
    kept = lambda shard, x: function(fsdp.gather(shard), x)
    assert planned(4, kept) - planned(2, kept) > 1.9 * layer_bytes


def test_vmap_on_one_device_gives_what_shard_map_gives():
    num_replicas = 3
    fsdp = jaxcomp.qsdp("replica", SHIFT)
    params = {"a": odd_tree()["matrix"]}
    mesh, shards = sharded(fsdp, params, num_replicas)

    def grad(shards, x):
        function = lambda p, x: jnp.tanh(x @ p["a"])
        loss = lambda shards: jnp.sum(fsdp.layer(function)(fsdp.local(shards, jnp.int32(2)), x))
        return jax.grad(loss)(shards)

    x = jnp.ones((2, 33)) / 8
    want = on_replicas(grad, mesh)(shards, x)
    got = jax.jit(jax.vmap(functools.partial(grad, x=x), axis_name="replica"))(
        jax.tree.map(np.asarray, shards)
    )
    # The two programs may fuse a multiplication with an addition differently.
    np.testing.assert_allclose(got["a"].data, want["a"].data, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, s: f.shard({"n": jnp.arange(4)}, mesh_of(2)), "'n' has dtype int32"),
        (
            lambda f, s: f.shard({"none": jnp.ones((0, 4))}, mesh_of(2), lambda *_: True),
            r"'none' has shape \(0, 4\), which is no layer",
        ),
        (lambda f, s: jaxcomp.qsdp("nodes").shard(odd_tree(), mesh_of(2)), "no axis 'nodes'"),
        (
            lambda f, s: on_replicas(lambda s, _: f.gather(s), mesh_of(2))(s, 0),
            "give what QSDP.local returns",
        ),
        (
            lambda f, s: on_replicas(lambda s, n: f.layer(len)(f.local(s, n)), mesh_of(2))(
                s, jnp.int32(0)
            ),
            "scan over stacked",
        ),
    ],
)
def test_mistakes_are_told(call, message):
    _, shards = sharded(EXACT, odd_tree(), 2, stacked=stacked)
    with pytest.raises(ValueError, match=message):
        call(EXACT, shards)


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


@pytest.mark.parametrize(
    ("code", "sizes"),
    [*((code, (3,)) for code in NEAREST[:3]), (NEAREST[0], (2, 2))],
    ids=lambda value: getattr(value, "name", None),
)
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
