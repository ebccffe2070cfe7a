"""A step that computes while its messages travel: equal results, in the order that hides them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.replicas import protocol
from jaxcomp.steps import interleaved
from jaxcomp.steps import train as plain
from tests.helpers import replicas
from tests.helpers.replicas import everywhere, mesh_of, rows

PARAMS = {"kernel": np.full((40, 20), 0.1, np.float32), "bias": np.zeros(20, np.float32)}
METHOD = functools.partial(jaxcomp.cocktail_sgd, optax.sgd(0.1, momentum=0.9), "replica")
CODE = jaxcomp.quantize(8)


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["kernel"] + params["bias"][None]) - 0.5) ** 2)


def trained(tx, mesh, steps=5, **options):
    """Trains some steps, one of them with an infinite row."""
    draw = lambda number: np.random.default_rng(number).normal(size=(4 * mesh.size, 40))
    batches = [draw(number).astype(np.float32) for number in range(steps)]
    for batch in batches[3:4]:
        batch[1] = np.inf
    return jax.device_get(replicas.trained(loss, tx, mesh, PARAMS, batches, **options))


def placed(mesh, specs=None):
    if specs is None:
        return everywhere(mesh, PARAMS)
    return jax.device_put(PARAMS, {name: NamedSharding(mesh, spec) for name, spec in specs.items()})


SPECS = {"kernel": P(None, "fsdp"), "bias": P()}  # one code's buckets are not all of one type
IN_CHAIN = optax.chain(optax.clip(0.1), METHOD(compressor=CODE))
IN_SHARDS = {"param_specs": SPECS}


@pytest.mark.parametrize(
    ("tx", "sizes", "options", "kind"),
    [
        (METHOD(compressor=CODE), (4,), {}, AxisType.Auto),
        (METHOD(compressor=CODE), (4,), {"accumulate": 4}, AxisType.Auto),
        (METHOD(compressor=jaxcomp.gathered(CODE)), (4,), {"accumulate": 2}, AxisType.Auto),
        (METHOD(compressor=CODE, warmup_steps=2, sync_every=2), (4,), {}, AxisType.Auto),
        (METHOD(compressor=CODE, delayed=False), (4,), {}, AxisType.Auto),
        (IN_CHAIN, (4,), {}, AxisType.Auto),
        (METHOD(compressor=CODE), (2, 2), IN_SHARDS | {"accumulate": 2}, AxisType.Auto),
        (METHOD(compressor=CODE, sync_every=2), (2, 2), IN_SHARDS, AxisType.Explicit),
        (IN_CHAIN, (2, 2, 2), IN_SHARDS | {"fast_axis": "fast"}, AxisType.Auto),
    ],
    ids=["default", "microbatches", "one hop", "in a branch", "not delayed", "in a chain"]
    + [f"shards, {name}" for name in ("microbatches", "in a branch", "in a chain, fast axis")],
)
def test_it_trains_as_a_step_that_does_one_after_the_other(tx, sizes, options, kind, monkeypatch):
    names = ("replica", "fsdp", "fast")[: len(sizes)]
    mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))
    found = trained(tx, mesh, **options)
    monkeypatch.setattr(protocol, "exchanges_ahead", lambda state: False)
    for name in ("interleaved", "interleaved_shards"):
        monkeypatch.setattr(plain, name, None)
    wanted = trained(tx, mesh, **options)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(close, found, wanted)


@pytest.mark.parametrize(("sizes", "specs"), [((2,), None), ((2, 2), SPECS)], ids=["", "shards"])
def test_the_forward_pass_waits_for_the_first_message_and_the_backward_pass_for_the_second(
    sizes, specs
):
    mesh = mesh_of(*sizes)
    tx = METHOD(compressor=CODE)
    init, step = jaxcomp.train_step(loss, tx, mesh, "replica", param_specs=specs)
    params = placed(mesh, specs)
    batch = rows(mesh, np.zeros((8, 40), np.float32))
    text = str(step.trace(params, init(params), batch).jaxpr)
    names = "all_to_all|all_gather_invariant|tanh|dot_general|optimization_barrier"
    found = re.findall(rf"\b({names})\b", text)
    order = [name for name in found if name != "optimization_barrier"]
    first, second = order.index("all_to_all"), order.index("all_gather_invariant")
    # The forward pass has one product, the backward pass one: the inputs have no gradient.
    assert order.count("dot_general") == 2 and order.count("tanh") == 1
    products = [i for i, name in enumerate(order) if name == "dot_general"]
    assert first < products[0] < second < products[1]


def test_a_part_waits_for_the_messages_before_it_and_what_comes_for_the_part():
    def computed(message, value):
        parts = interleaved.Parts(value, jnp.tanh)
        return parts.pace(lambda messages: [jnp.negative(messages[0])], [message]), parts.finished()

    jaxpr = jax.make_jaxpr(computed)(1.0, 2.0).jaxpr
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    before = next(made[eqn.invars[0]] for eqn in jaxpr.eqns if eqn.primitive.name == "tanh")
    assert before.primitive.name == "optimization_barrier"
    assert before.invars == jaxpr.invars
    received, result = (made[var] for var in jaxpr.outvars)
    assert received is result and received.primitive.name == "optimization_barrier"


def around(jaxpr, *collectives):
    """The equations that make the messages of these collectives, and those that use what comes."""
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    used = {var: eqn for eqn in jaxpr.eqns for var in eqn.invars if not hasattr(var, "val")}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in collectives:
            yield made[eqn.invars[0]], used[eqn.outvars[0]]
        for inner in core.jaxprs_in_params(eqn.params):
            yield from around(inner, *collectives)


def test_what_was_coded_is_sent_and_no_view_of_it_so_that_gpus_start_it_at_once():
    mesh = mesh_of(2)
    init, step = jaxcomp.train_step(loss, METHOD(compressor=CODE), mesh, "replica")
    params = everywhere(mesh, PARAMS)
    batch = rows(mesh, np.zeros((8, 40), np.float32))
    jaxpr = step.trace(params, init(params), batch).jaxpr
    pairs = around(jaxpr.jaxpr, "all_to_all", "all_gather_invariant")
    makers, users = zip(*pairs, strict=True)
    # What leaves a barrier of several is taken out of it later, when something else is done.
    assert [maker.primitive.name for maker in makers] == ["optimization_barrier"] * 2
    assert [len(maker.invars) for maker in makers] == [1, 1]
    # The other barrier stands behind the pass that runs meanwhile: a message ends no earlier. On
    # JAX before 0.12 what is equal on all replicas goes around it, see `tied`.
    behind = 2 if jax.__version_info__ >= (0, 12) else 1
    assert [user.primitive.name for user in users][:behind] == ["optimization_barrier"] * behind
    gathers = re.findall(r"all_gather_invariant\[.*?\]", str(jaxpr), re.DOTALL)
    assert gathers and all("tiled=True" in gather for gather in gathers)


def bodies(jaxpr, primitive):
    """The equations of each `shard_map` in a jaxpr that has a collective, but in an inner one."""
    for eqn in jaxpr.eqns:
        inner = [*core.jaxprs_in_params(eqn.params)]
        within = [body for one in inner for body in bodies(one, primitive)]
        yield from within
        if eqn.primitive.name == "shard_map" and not within and primitive in str(inner[0]):
            yield inner[0].eqns


@pytest.mark.parametrize("collective", ["all_to_all", "all_gather_invariant"])
def test_so_it_is_in_shards_where_a_barrier_would_lose_a_view_that_nobody_else_uses(collective):
    mesh = mesh_of(2, 2)
    init, step = jaxcomp.train_step(
        loss, METHOD(compressor=CODE), mesh, "replica", param_specs=SPECS
    )
    params = placed(mesh, SPECS)
    batch = rows(mesh, np.zeros((8, 40), np.float32))
    jaxpr = step.trace(params, init(params), batch).jaxpr
    (hop,) = bodies(jaxpr.jaxpr, collective)
    assert [eqn.params.get("name") for eqn in hop] == [interleaved._HOP]


@pytest.mark.parametrize("method", ["zero_one_adam", "compressed_mean"])
def test_methods_that_need_the_gradient_first_are_not_asked_twice(method):
    mesh, seen = mesh_of(2), []
    make = {
        "zero_one_adam": lambda: jaxcomp.zero_one_adam(0.1, "replica"),
        "compressed_mean": lambda: jaxcomp.compressed_mean(CODE, "replica"),
    }
    tx = make[method]()
    counted = lambda *args, **extra: seen.append(extra) or tx.update(*args, **extra)
    noted = optax.GradientTransformationExtraArgs(tx.init, counted)
    trained(noted, mesh, steps=1)
    assert seen and not any("ahead" in extra for extra in seen)
