"""The laws that every method keeps, asked of one compiled step and one run a method."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from jaxcomp.replicas import protocol
from jaxcomp.replicas.resize import reset_residuals
from tests.helpers import replicas
from tests.helpers.every_method import METHODS
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows

WIDTH, BAD = 40, 2  # 1,600 elements are coded; the step of a gradient that is not finite
NAMES = ("drift", "embed")  # as a field of states is called, and an embedding
every_method = pytest.mark.parametrize("method", METHODS)


def start(names=NAMES):
    """Two layers of equal values, each an array of its own; two leaves of each do nothing."""
    kernel = np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32) / 6
    zeros = {"empty": np.zeros((0, 5), "f4"), "idle": np.zeros((8, 8), "f4")}
    zeros["residual"] = np.zeros(WIDTH, "f4")  # a bias
    return {name: {"kernel": kernel.copy()} | jax.tree.map(np.copy, zeros) for name in names}


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["residual"][None])
    harm = jnp.mean(batch["harm"]) * params[NAMES[1]]["kernel"][-1, -1]
    return jnp.mean((x - batch["x"][:, ::-1]) ** 2) + harm


def batch_of(step):
    """Rows of four devices; in step `BAD` one makes one entry of one gradient not finite."""
    x = np.random.default_rng(1 + step).normal(size=(8, WIDTH)).astype(np.float32)
    harm = np.zeros(8, np.float32)
    harm[-1] = np.inf if step == BAD else 0
    return {"x": x, "harm": harm}


class Run(NamedTuple):
    """A compiled step, and what it led to: before the first step and after each one."""

    program: Any
    params: list[Any]
    states: list[Any]
    skipped: list[bool]


def compiled(tx, params, mesh=None, **options):
    """A step on two replicas, its arguments, and the functions that it is of."""
    mesh = mesh_of(2) if mesh is None else mesh
    functions = jaxcomp.train_step(loss_fn, tx, mesh, "replica", **options)
    params = everywhere(mesh, params)
    state = functions.init(params)
    batch = jax.device_put(batch_of(0), NamedSharding(mesh, P(mesh.axis_names)))
    return functions.step.lower(params, state, batch).compile(), params, state


def stepped(program, params, state, steps):
    """Parameters, states and what was skipped; the arguments of the first step stay."""
    seen = [(params, state, False)]
    for number in steps:
        params, state = jax.tree.map(jnp.copy, seen[-1][:2])
        batch = jax.device_put(batch_of(number), NamedSharding(mesh_of(2), P("replica")))
        params, state, metrics = program(params, state, batch)
        seen.append((params, state, bool(one_value(metrics["skipped"]))))
    return [list(column) for column in zip(*seen, strict=True)]


@functools.cache
def run(method):
    """Five steps, of which the third is not finite on one replica."""
    program, params, state = compiled(METHODS[method].tx, start())
    return Run(program, *stepped(program, params, state, range(5)))


def same(found, wanted):
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def changed(params, other):
    return all(np.any(np.asarray(p["kernel"]) != other[n]["kernel"]) for n, p in params.items())


@every_method
def test_replicas_agree_bit_for_bit_and_train(method):
    params, states = run(method).params, run(method).states
    for tree in [*params, *states]:
        for x in jax.tree.leaves(tree):
            if x.is_fully_replicated:
                one_value(x)
    assert changed(params[2], start()) and changed(params[-1], jax.device_get(params[BAD + 1]))
    sent = [x for x in jax.tree.leaves(states[-1]) if not x.is_fully_replicated]
    assert all(x.sharding.spec[0] == "replica" for x in sent)


@every_method
def test_what_is_not_finite_on_one_replica_reaches_no_parameter_and_no_state(method):
    made = run(method)
    for tree in (*made.params, *made.states):
        assert all(np.all(np.isfinite(np.float32(x))) for x in jax.tree.leaves(tree))
    alone = METHODS[method].alone
    assert made.skipped == [step == BAD + 1 and not alone for step in range(6)]
    if alone:
        assert [np.asarray(x).tolist() for x in protocol.skipped(made.states[-1])] == [[0, 1]]
    else:
        same((made.params[BAD + 1], made.states[BAD + 1]), (made.params[BAD], made.states[BAD]))


@every_method
def test_a_run_goes_on_from_its_state_bit_for_bit(method):
    made = run(method)
    saved = jax.device_get((made.params[1], made.states[1]))
    places = jax.tree.map(lambda x: x.sharding, (made.params[1], made.states[1]))
    params, states, _ = stepped(made.program, *jax.device_put(saved, places), range(1, 5))
    same((params[-1], states[-1]), (made.params[-1], made.states[-1]))


@every_method
def test_parameters_and_state_are_donated(method):
    made = run(method)
    given = jax.tree.map(jnp.copy, (made.params[1], made.states[1]))
    made.program(*given, rows(mesh_of(2), batch_of(1)))
    assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.size)


@every_method
def test_nothing_dense_is_sent_and_the_state_counts_each_part(method):
    made, mesh, row = run(method), mesh_of(2), METHODS[method]
    small = [[x for name, x in layer.items() if name != "kernel"] for layer in start().values()]
    by_row = [np.zeros(len(start()["embed"][name])) for name in ("kernel", "idle")]
    parts = dict.fromkeys(row.numbers, start()) | dict.fromkeys(row.by_row, by_row)
    jaxcomp.assert_no_dense(made.program, mesh, "replica", exact=small, parts=parts)
    sent = report.sent_bytes_by_part(made.program, mesh, "replica")
    assert sum(sent.values()) > 0
    counts = {part: int(n) for part, n in protocol.rounds(made.states[-1]).items()}
    total = counts.pop("all", 5 if row.alone else 4)  # the step that all leave out is none
    assert set(sent) - {""} == {part for part, number in counts.items() if number}
    assert max(counts.values(), default=0) <= total <= (5 if row.alone else 4)


@every_method
def test_frozen_parameters_stay_as_they_are_and_send_nothing(method):
    made, mesh = run(method), mesh_of(2)
    mean = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
    groups = {"train": METHODS[method].tx, "freeze": optax.chain(mean, optax.set_to_zero())}
    labels = {name: "train" for name in NAMES} | {"third": "freeze"}
    before = start((*NAMES, "third"))
    program, params, state = compiled(optax.partition(groups, labels), before)
    assert report.sent_bytes(program, mesh) == report.sent_bytes(made.program, mesh)
    params, _, skipped = stepped(program, params, state, range(2))
    same(params[-1]["third"], before["third"])
    assert changed({name: params[-1][name] for name in NAMES}, before) and not any(skipped)


@every_method
def test_devices_of_one_replica_send_together_what_one_would(method):
    mesh, tx = mesh_of(2, 2, second="fast"), METHODS[method].tx
    program, params, state = compiled(tx, start(), mesh, fast_axis="fast")
    sent = 2 * report.sent_bytes(program, mesh, "replica")
    # Shards of a matrix have left factors of their own in Dion.
    most = 1.4 if method == "dion" else 1.05
    one = report.sent_bytes(run(method).program, mesh_of(2), "replica")
    assert 0 < sent <= most * one + 16 * 2 * 8
    losses = []
    batch = jax.device_put(batch_of(0), NamedSharding(mesh, P(mesh.axis_names)))
    for _ in range(3):
        params, state, metrics = program(params, state, batch)
        losses.append(float(np.mean(metrics["loss"])))
        assert not metrics["skipped"]
    assert losses[2] < losses[0]
    for x in jax.tree.leaves(params):
        assert np.all(np.isfinite(one_value(x)))


@every_method
def test_float32_parameters_train_alike_where_64_bits_are_enabled(method):
    with jax.enable_x64(True):
        params, _, skipped = stepped(*compiled(METHODS[method].tx, start()), range(2))
    assert not any(skipped)
    for found, wanted in zip(
        *map(jax.tree.leaves, (params[2], run(method).params[2])), strict=True
    ):
        assert found.dtype == np.float32
        if not found.size:
            continue
        # optax's Adam corrects its bias in float64 here: a rounding may turn a code, by one step.
        apart = np.abs(np.asarray(found) - np.asarray(wanted))
        assert np.quantile(apart, 0.9) < 1e-4 and apart.max() < 1.01e-2


@every_method
def test_a_method_says_that_it_needs_the_parameters_and_refuses_whole_numbers(method):
    tx, grads = METHODS[method].tx, jax.tree.map(lambda x: jnp.stack([x] * 2), start())
    on = lambda function: jax.eval_shape(jax.vmap(function, axis_name="replica"), grads)
    try:
        on(lambda grads: tx.update(grads, tx.init(grads))[0])
    except ValueError as error:
        assert "needs the parameters; write tx.update(" in str(error)
    for other in (jnp.arange(3), jax.random.key(0)):
        with pytest.raises(ValueError, match="dtype (int32|key).*out of the parameters"):
            on(lambda grads, other=other: tx.init(grads | {"other": other}))


def owed(state):
    """Means of drifts and of residuals, and what owners hold: residuals, and their optimizer's."""
    means = lambda trees: [np.mean(np.asarray(x, np.float64), 0) for x in jax.tree.leaves(trees)]
    held = protocol.fields(state, "owner_residual", "owned").values()
    return means(protocol.drifts(state)), means(protocol.residuals(state)), jax.tree.leaves([*held])


@every_method
def test_what_is_owed_may_be_reset(method):
    state = reset_residuals(run(method).states[2])
    held = [protocol.residuals(state), [*protocol.fields(state, "owner_residual").values()]]
    assert not any(np.any(x) for x in jax.tree.leaves(held))


def forms(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@every_method
def test_a_state_of_other_replicas_owes_the_same(method):
    tx, params, mesh = METHODS[method].tx, start(), mesh_of(3)
    state = run(method).states[2]
    like = jax.eval_shape(jaxcomp.train_step(loss_fn, tx, mesh, "replica").init, params)
    assert forms(jaxcomp.state_shapes(tx, params, 3, mesh_of(2), "replica")) == forms(like)
    resized = jaxcomp.resize(jax.device_get(state), like)
    assert forms(resized) == forms(like)
    *found, owners = owed(resized)
    *wanted, before = owed(state)
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4 * 2.0**-24 * np.abs(y).max(initial=1))
    for x, y in zip(*map(jax.tree.leaves, (resized, state)), strict=True):
        if y.is_fully_replicated and y.size:
            same(x, y)
    for x, y in zip(owners, before, strict=True):
        flat, numel = np.ravel(x), min(x.size, y.size)
        np.testing.assert_array_equal(flat[:numel], np.ravel(y)[:numel])
        assert not flat[numel:].any() and not np.ravel(y)[numel:].any()


@every_method
@pytest.mark.filterwarnings("ignore:parameters are")
def test_wide_gradients_of_narrow_parameters_change_no_type_of_a_state(method):
    row = METHODS[method]
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start())
    txs = {None: row.tx}
    if row.momentum:
        txs["compact"] = jaxcomp.compact(row.tx, 16, fields=(row.momentum,))
    for kept, tx in txs.items():
        init, step = jaxcomp.train_step(loss_fn, tx, mesh_of(2), "replica", accumulate=2)
        state = jax.eval_shape(init, narrow)
        params, after, _ = jax.eval_shape(step, narrow, state, batch_of(0))
        assert forms(params) == forms(narrow) and forms(after) == forms(state)
        assert kept is None or any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state))


@pytest.mark.parametrize("method", ["demo", "sharded_optimizer", "slamb"])
def test_two_leaves_may_have_one_path(method):
    tx = {
        "demo": jaxcomp.demo(1e-2, "replica", top=1, tile=4),
        "sharded_optimizer": jaxcomp.sharded_optimizer(
            optax.sgd(1.0), "replica", exact=lambda path, leaf: leaf.shape == (6, 3)
        ),
        "slamb": jaxcomp.slamb(1e-2, "replica", sync_every=1, exact_numel=1),
    }[method]
    shapes = {"a": (6, 3), "b": (8, 8)}
    params = replicas.random_tree(0, shapes=shapes)
    grads = replicas.random_tree(1, 2, shapes=shapes)
    alike = lambda tree: {"a": {"b": tree["a"]}, "a/b": tree["b"]}
    wanted, found = replicas.Run(tx, params, 2), replicas.Run(tx, alike(params), 2)
    wanted.step(grads)
    found.step(alike(grads))
    same(found.params, alike(wanted.params))


BIN_MEANS = jaxcomp.compressed_mean(jaxcomp.bin_means(2), "replica")
# Without those around optax's Adam and Muon, which mix types themselves.
OWN_TYPES = {name: METHODS[name].tx for name in ("one_bit_adam", "slamb", "zero_one_adam")} | {
    "bin_means": optax.chain(BIN_MEANS, optax.sgd(0.1)),
    "loss_scale": jaxcomp.loss_scale(optax.chain(BIN_MEANS, optax.sgd(0.1)), "replica"),
    "one_bit_lamb": jaxcomp.one_bit_lamb(1e-2, "replica", freeze_step=2, deviations=None),
}


@pytest.mark.parametrize("name", OWN_TYPES)
def test_methods_mix_no_types(name):
    with jax.numpy_dtype_promotion("strict"):
        functions = jaxcomp.train_step(loss_fn, OWN_TYPES[name], mesh_of(2), "replica")
        params = start()
        functions.step.lower(params, functions.init(params), batch_of(0))
