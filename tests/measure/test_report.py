"""The byte report of real programs against numbers computed by hand."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomp
from jaxcomp import report
from jaxcomp.replicas.types import vary_over
from tests.helpers.hlo import BOTH, mesh_of_shape


def compile_step(function, mesh, shape=(8, 4), dtype=jnp.float32, out=None):
    """Compiles `function` of one local f32[8, 4], say, and a step counter equal everywhere."""
    spec = PartitionSpec(mesh.axis_names)
    out = spec if out is None else out
    step = jax.shard_map(function, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=out)
    x = jax.ShapeDtypeStruct((shape[0] * mesh.size, *shape[1:]), dtype)
    return jax.jit(step).lower(x, jax.ShapeDtypeStruct((), jnp.int32)).compile()


def vary(value, axes):
    return lax.pcast(value, axes, to="varying")


def data(x):
    """The mean over one axis, as of a step that goes on with it."""
    return vary(lax.pmean(x, "data"), "data")


def fsdp(x):
    return vary(lax.pmean(x, "fsdp"), "fsdp")


def ring(size):
    return [(i, (i + 1) % size) for i in range(size)]


D, F, DF = ("data",), ("fsdp",), BOTH
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
# (mesh, function, op, axes, bytes sent of the 128 of a local f32[8, 4])
ROWS = [
    ((8,), lambda x: lax.psum(x, "data"), "all-reduce", D, 2 * 128 * 7 / 8),
    ((2, 4), lambda x: lax.pmean(x, "data"), "all-reduce", D, 2 * 128 * 1 / 2),
    ((2, 4), lambda x: lax.pmean(x, "fsdp"), "all-reduce", F, 2 * 128 * 3 / 4),
    ((4, 2), lambda x: lax.pmean(x, "data"), "all-reduce", D, 2 * 128 * 3 / 4),
    ((2, 4), lambda x: lax.pmean(x, BOTH), "all-reduce", DF, 2 * 128 * 7 / 8),
    ((4, 2), lambda x: lax.pmean(x, BOTH[::-1]), "all-reduce", DF, 2 * 128 * 7 / 8),
    ((2, 4), lambda x: lax.all_gather(x, "fsdp").sum(0), "all-gather", F, 128 * 3),
    ((8,), lambda x: lax.all_gather(x, "data", to="invarying").sum(0), "all-gather", D, 128 * 7),
    ((2, 4), lambda x: lax.all_to_all(x, "fsdp", 0, 0, tiled=True), "all-to-all", F, 128 * 3 / 4),
    ((4, 2), lambda x: lax.psum_scatter(x, "data"), "reduce-scatter", D, 128 * 3 / 4),
    ((2, 4), lambda x: lax.ppermute(x, "fsdp", ring(4)), "collective-permute", F, 128),
    ((2, 4), lambda x: lax.ppermute(x, BOTH, ring(8)), "collective-permute", DF, 128),
    (
        (8,),
        lambda x: lax.all_gather(x, "data", axis_index_groups=PAIRS).sum(0),
        "all-gather",
        ("?",),
        128,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[2]} {'+'.join(row[3])} of {row[0]}")
def test_each_collective_is_reported_with_its_axes_and_bytes(row):
    sizes, function, op, axes, sent = row
    mesh = mesh_of_shape(*sizes)
    shape = (sizes[0], 32 // sizes[0]) if op == "reduce-scatter" else (8, 4)

    def step(x, count):
        return jnp.sum(x) + vary_over(function(x), mesh.axis_names)

    program = compile_step(step, mesh, shape)
    [found] = report.collectives(program, mesh)
    assert found == (op, axes, 128, sent, found.shape, 1, (), "", found.origin)
    assert report.sent_bytes(program, mesh) == sent
    for axis in mesh.axis_names:
        crosses = axis in axes or axes == ("?",)
        assert report.sent_bytes(program, mesh, axis) == (sent if crosses else 0)


def test_uint8_payloads_count_one_byte_a_value():
    mesh = mesh_of_shape(8)
    program = compile_step(
        lambda x, i: lax.all_to_all(x, "data", 0, 0, tiled=True), mesh, (8, 5), jnp.uint8
    )
    [found] = report.collectives(program, mesh)
    assert (found.operand_bytes, found.sent_bytes) == (40, 35)
    assert set(found.shape.split(", ")) == {"u8[1,5]"}
    assert "  8 x u8[1,5]" in report.table(program, mesh)


def test_the_width_is_that_of_the_compiled_operand():
    mesh = mesh_of_shape(8)
    program = compile_step(
        lambda x, i: lax.all_gather(x, "data", tiled=True), mesh, dtype=jnp.bfloat16
    )
    [found] = report.collectives(program, mesh)
    # XLA:CPU widens bfloat16; where some version does not, both numbers halve.
    assert (found.shape.split("[")[0], found.operand_bytes) in [("f32", 128), ("bf16", 64)]


def test_combined_collectives_count_every_operand():
    mesh = mesh_of_shape(2, 4)
    program = compile_step(
        lambda x, i: lax.psum((x, jnp.sin(x), x[:, 0]), "data"), mesh, out=PartitionSpec("fsdp")
    )
    # 128 + 128 + 32 bytes, in one all-reduce or in several: that is XLA's choice.
    assert sum(row.operand_bytes for row in report.collectives(program, mesh)) == 288
    assert report.sent_bytes(program, mesh, "data") == 288


def test_nested_scans_multiply():
    mesh = mesh_of_shape(2, 4)

    def outer(x, _):
        x = lax.scan(lambda x, _: (data(jnp.sin(x)), None), x, None, length=5)[0]
        return fsdp(jnp.cos(x)), None

    program = compile_step(lambda x, i: lax.scan(outer, x, None, length=7)[0], mesh)
    assert {(row.axes, row.count) for row in report.collectives(program, mesh)} == {
        (("data",), 35),
        (("fsdp",), 7),
    }
    assert report.sent_bytes(program, mesh, "data") == 35 * 128
    assert report.sent_bytes(program, mesh) == 35 * 128 + 7 * 192


def test_a_loop_of_unknown_length_is_never_counted_once():
    mesh = mesh_of_shape(2, 4)
    body = lambda _, x: data(jnp.sin(x))
    program = compile_step(lambda x, i: lax.fori_loop(0, i, body, x), mesh)
    [found] = report.collectives(program, mesh)
    assert found.count is None
    with pytest.raises(ValueError, match="unknown length"):
        report.sent_bytes(program, mesh)
    assert report.sent_bytes(program, mesh, "fsdp") == 0
    assert "unknown" in report.table(program, mesh)
    assert "at least" in report.table(program, mesh)


def cond_step(x, count):
    """A dense mean every fifth step, a gather of bytes else, a psum of 32 bytes always."""

    def bytes_only(x):
        code = lax.all_gather(jnp.sign(x).astype(jnp.uint8), "fsdp")
        return code.sum(0).astype(jnp.float32)

    x = lax.cond(count % 5 == 0, data, bytes_only, x)
    return x + lax.pmean(x[:, :1], "fsdp")


def test_of_two_branches_the_one_that_sends_most_counts():
    mesh = mesh_of_shape(2, 4)
    program = compile_step(cond_step, mesh)
    by_op = {(row.op, len(row.branch)): row for row in report.collectives(program, mesh)}
    assert len(by_op) == 3
    assert by_op["all-reduce", 0].sent_bytes == 48  # 2 * 32 * 3/4
    assert by_op["all-reduce", 1].sent_bytes == 128  # 2 * 128 * 1/2
    assert by_op["all-gather", 1].sent_bytes == 96  # 32 * 3
    # Branch 1 of lax.cond is the true one.
    assert by_op["all-reduce", 1].branch[0].endswith(" branch 1")
    assert by_op["all-gather", 1].branch[0].endswith(" branch 0")
    assert report.sent_bytes(program, mesh) == 48 + 128
    assert report.sent_bytes(program, mesh, "fsdp") == 48 + 96
    assert report.sent_bytes(program, mesh, "data") == 128


def test_conditionals_nest_in_loops_and_in_each_other():
    mesh = mesh_of_shape(2, 4)

    def inner(x, count):
        return lax.switch(count % 3, [data, lambda x: fsdp(jnp.sin(x)) * 2, jnp.sin], x)

    def body(carry, _):
        x, count = carry
        x = lax.cond(count % 5 == 0, lambda x: inner(data(x), count), fsdp, x)
        return (x, count + 1), None

    program = compile_step(lambda x, i: lax.scan(body, (x, i), None, length=7)[0][0], mesh)
    # Each of 7: data 128 and then the costlier of data 128 and fsdp 192; or fsdp 192 alone.
    assert report.sent_bytes(program, mesh) == 7 * (128 + 192)
    assert report.sent_bytes(program, mesh, "data") == 7 * (128 + 128)
    assert {len(row.branch) for row in report.collectives(program, mesh)} == {1, 2}


@pytest.mark.parametrize("local", [True, False])
def test_the_implicit_sum_of_a_gradient_is_seen(local):
    mesh = mesh_of_shape(8)

    def step(x, count):
        weights = jnp.ones((4, 16)) * count
        weights = vary(weights, "data") if local else weights
        grads = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(weights)
        return grads if local else vary(grads, "data")

    program = compile_step(step, mesh)
    found = [row[:4] + (row.count,) for row in report.collectives(program, mesh)]
    # The dense f32[4, 16] gradient: 256 bytes, 2 * 256 * 7/8 sent.
    assert found == ([] if local else [("all-reduce", ("data",), 256, 448, 1)])


def test_axes_of_size_one_send_nothing():
    mesh = mesh_of_shape(8, 1)
    program = compile_step(lambda x, i: x + lax.psum(lax.psum(x, "fsdp"), "data"), mesh)
    assert report.sent_bytes(program, mesh, "fsdp") == 0
    assert report.sent_bytes(program, mesh, "data") == 224
    assert report.sent_bytes(program, mesh) == 224


def test_positions_are_those_of_the_device_assignment():
    plain = mesh_of_shape(2, 4)
    turned = Mesh(plain.devices.reshape(4, 2).T, BOTH)  # device ids 0 2 4 6, 1 3 5 7
    sharding = NamedSharding(turned, PartitionSpec("fsdp", "data"))
    whole = NamedSharding(turned, PartitionSpec(None, "data"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = jax.jit(lambda x: x.sum(0, keepdims=True), in_shardings=sharding, out_shardings=whole)
    program = step.lower(x).compile()
    [found] = report.collectives(program, turned)
    assert (found.axes, found.sent_bytes) == (("fsdp",), 24)  # f32[1, 4], 2 * 16 * 3/4
    # The same devices under other names: "fsdp" of `turned` is "rows" here.
    renamed = Mesh(plain.devices.reshape(4, 2), ("rows", "columns"))
    [found] = report.collectives(program, renamed)
    assert found.axes == ("rows",)


def test_of_each_conditional_the_costliest_branch_counts():
    row = lambda sent, *branch, count=1: SimpleNamespace(
        sent_bytes=sent, count=count, branch=branch
    )
    rows = [
        row(1, count=3),
        row(10, "if branch 0"),
        row(20, "if branch 0"),
        row(5, "if branch 1"),
        row(100, "if branch 1", "inner branch 0"),
        row(50, "if branch 1", "inner branch 1"),
        row(1000, "other branch 1"),
    ]
    assert report.step_bytes(rows) == 3 + 105 + 1000
    assert report.step_bytes([]) == 0


def test_the_table_lists_branches_and_totals():
    mesh = mesh_of_shape(2, 4)
    lines = report.table(compile_step(cond_step, mesh), mesh).splitlines()
    cells = [line.split() for line in lines]
    assert cells[0][:2] == ["axes", "collective"]
    assert cells[1] == ["fsdp", "all-reduce", "1", "32", "48", "f32[8,1]"]
    assert cells[2][:4] == ["fsdp", "all-gather", "1", "32"]
    assert cells[2][-2:] == ["branch", "0"]
    assert cells[3][:5] == ["data", "all-reduce", "1", "128", "128"]
    assert cells[3][-2:] == ["branch", "1"]
    assert cells[4:] == [
        ["total,", "data", "128"],
        ["total,", "fsdp", "144"],
        ["total,", "all", "176"],
    ]


def test_axes_and_devices_that_the_program_lacks_raise():
    upper = Mesh(np.array(jax.devices()[4:]).reshape(2, 2), BOTH)
    program = compile_step(lambda x, i: x + lax.psum(x, "data"), upper)
    assert report.sent_bytes(program, upper) == 128
    with pytest.raises(ValueError, match="other devices"):
        report.collectives(program, mesh_of_shape(2, 2))
    with pytest.raises(ValueError, match="axis 'model'"):
        report.sent_bytes(program, upper, "model")


PARAMS = {
    "bias": np.zeros(6, np.float32),
    "block": {"down": np.zeros((4, 8), np.float32), "head": np.zeros((8, 4), np.float32)},
    "nothing": (),
}


def exact_leaves(tx):
    state = jaxcomp.state_shapes(tx, PARAMS, 2, mesh_of_shape(2), "data")
    return report.exact_leaves(PARAMS, state)


@pytest.mark.parametrize("error_feedback", [True, False])
def test_exact_leaves_are_named_with_error_feedback_and_without(error_feedback):
    mean = functools.partial(jaxcomp.compressed_mean, axis_name="data")
    mean = functools.partial(mean, error_feedback=error_feedback)
    policy = jaxcomp.by_path(("head", jaxcomp.identity()), (".*", jaxcomp.quantize(4)))
    some = mean(policy, exact=lambda path, leaf: leaf.ndim == 1)
    labels = {"bias": "frozen", "block": "trained", "nothing": ()}
    found = {
        "some": some,
        "all": mean(policy, exact=lambda path, leaf: True),
        "none": mean(jaxcomp.sign(), exact=lambda path, leaf: False),
        "frozen": optax.partition({"trained": some, "frozen": optax.set_to_zero()}, labels),
    }
    if error_feedback:
        found["compact"] = jaxcomp.compact(some)
    for name, tx in found.items():
        found[name] = exact_leaves(optax.chain(tx, optax.adam(1e-3)))
    named = ["bias", "block/head"]
    every = ["bias", "block/down", "block/head"]
    wanted = {"some": named, "all": every, "none": [], "frozen": ["block/head"]}
    assert found == wanted | ({"compact": named} if error_feedback else {})


def test_exact_leaves_of_several_means_and_of_none():
    mean = lambda code: jaxcomp.compressed_mean(
        code, "data", error_feedback=False, exact=lambda path, leaf: path == "bias"
    )
    first = {"bias": True, "block": {"down": True, "head": False}, "nothing": ()}
    second = jax.tree.map(lambda chosen: not chosen, first)
    tx = optax.chain(
        optax.masked(mean(jaxcomp.sign()), first), optax.masked(mean(jaxcomp.identity()), second)
    )
    assert exact_leaves(tx) == ["bias", "block/head"]
    assert exact_leaves(optax.sgd(0.1)) is None


def test_what_is_no_program_is_told():
    mesh = mesh_of_shape(2)
    tx = jaxcomp.cocktail_sgd(optax.sgd(0.1), "data")
    loss_fn = lambda params, batch: jnp.mean(batch @ params)
    plain = jaxcomp.train_step(loss_fn, tx, mesh, "data").step
    for wrong in (plain, jaxcomp.overlapped_train_step(loss_fn, tx, mesh, "data").step):
        with pytest.raises(ValueError, match=r"where a compiled program belongs; .*\.programs"):
            report.table(wrong, mesh)
