"""The one way through which all methods send: means, what is kept, what fails, and parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.compressors.base import Key
from jaxcomp.exchange import averaging, buckets
from jaxcomp.exchange.wire import transport_of as transport_over
from tests.helpers.replicas import mesh_of, random_tree, rows

SHAPES = {"bias": (6,), "kernel": (8, 16)}
AXIS = "replica"


def transport_of(code, exact="bias", **changes):
    """Sends leaves of this name as they are, and all others by the code."""
    policy = lambda path, leaf: averaging.EXACT if path == exact else code
    return transport_over(jaxcomp.two_shot(policy, **{"bucket_numel": 2**10} | changes), AXIS)


def averager(transport, mesh, **options):
    """Jits `(rows of trees, residuals, count, bad) -> Averaged`, all of it in rows."""

    def own(tree, kept, count, bad):
        tree, kept, bad = jax.tree.map(lambda x: x[0], (tree, kept, bad))
        got = averaging.average(transport, tree, count, "part", bad=bad, **kept, **options)
        return jax.tree.map(lambda x: averaging.to_varying(x, AXIS)[None], got)

    specs = P(AXIS), P(AXIS), P(), P(AXIS)
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P(AXIS)))


def nothing_kept(transport, mesh, tree):
    def own(tree):
        residual, owned = averaging.nothing_sent(transport, jax.tree.map(lambda x: x[0], tree))
        kept = {"residual": residual, "owner_residual": owned}
        return jax.tree.map(lambda x: x[None], kept)

    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))(tree)


def test_without_a_code_it_is_numpys_mean_and_nothing_is_lost():
    mesh, values = mesh_of(2), random_tree(0, 2, shapes=SHAPES)
    transport = averaging.exact(transport_of(jaxcomp.sign()))
    got = averager(transport, mesh)(rows(mesh, values), {}, 0, None)
    assert got.residual is None and got.failed is None and not jax.tree.leaves(got.owner_residual)
    for name, x in values.items():
        np.testing.assert_array_equal(got.mean[name], np.broadcast_to(x.mean(0), x.shape))
        np.testing.assert_array_equal(got.sent[name], x)


def test_with_both_residuals_the_means_add_up():
    mesh, transport = mesh_of(2), transport_of(jaxcomp.sign(block=16))
    trees = [random_tree(seed, 2, shapes=SHAPES) for seed in range(3)]
    kept = nothing_kept(transport, mesh, rows(mesh, trees[0]))
    assert kept["residual"]["bias"] is None
    send, total = averager(transport, mesh), 0
    for count, tree in enumerate(trees):
        got = send(rows(mesh, tree), kept, count, None)
        kept, total = averaging.feedback(got), total + np.asarray(got.mean["kernel"])[0]
    left = np.asarray(kept["residual"]["kernel"]).mean(0)
    # The owners hold a half each of the bucket of `kernel`, the second of two.
    owned = np.concatenate(np.asarray(kept["owner_residual"][1])).reshape(8, 16)
    want = sum(tree["kernel"].mean(0) for tree in trees)
    np.testing.assert_allclose(total + left + owned, want, rtol=0, atol=1e-5)
    assert np.abs(left).max() > 0.01 and np.abs(owned).max() > 0.01


@pytest.mark.parametrize(("exact", "carrier"), [("bias", "bias"), ("none", "kernel")])
def test_one_replica_that_fails_makes_one_bucket_of_the_mean_fail_for_all(exact, carrier):
    mesh, tree = mesh_of(2), rows(mesh_of(2), random_tree(0, 2, shapes=SHAPES))
    # The last of two buckets alike, or the exact one.
    transport = transport_of(jaxcomp.sign(block=8), exact, bucket_numel=64)
    send = averager(transport, mesh)
    fine, bad = (rows(mesh, np.array([False, last])) for last in (False, True))
    assert np.asarray(send(tree, {}, 0, fine).failed).tolist() == [False, False]
    got = send(tree, {}, 0, bad)
    assert np.asarray(got.failed).tolist() == [True, True]
    failing = {name: np.isnan(np.asarray(x)).reshape(2, -1) for name, x in got.mean.items()}
    assert [name for name, x in failing.items() if x.any()] == [carrier]
    assert failing[carrier][:, -6:].all() and failing["kernel"][:, :58].sum() == 0
    sent = jaxcomp.report.collectives(send.lower(tree, {}, 0, bad).compile(), mesh)
    assert sum(row.operand_bytes for row in sent if row.op == "all-reduce") % 6 == 0
    assert {row.part for row in sent} <= {"part", ""} and "part" in {row.part for row in sent}


@pytest.mark.parametrize("holds", [True, False])
def test_another_code_takes_the_place_of_lossy_ones_alone(holds):
    mesh, values = mesh_of(2), random_tree(0, 2, shapes=SHAPES)
    transport = transport_of(jaxcomp.sign())
    instead = averaging.Instead(jnp.bool_(holds), jaxcomp.quantize(8), "other")
    send = averager(transport, mesh, instead=instead)
    got = send(rows(mesh, values), {}, 0, None)
    np.testing.assert_array_equal(got.sent["bias"], values["bias"])
    lost = np.abs(np.asarray(got.sent["kernel"]) - values["kernel"])
    # A step of 1 bit is as large as the values.
    assert 0 < lost.max() < 0.03 if holds else lost.max() > 1


@pytest.mark.parametrize("code", [jaxcomp.sign(block=16), jaxcomp.random_k(0.25)])
def test_nothing_travels_and_all_is_kept_while_nothing_is_due(code):
    mesh, transport = mesh_of(2), transport_of(code)
    tree = rows(mesh, random_tree(0, 2, shapes=SHAPES))
    kept = nothing_kept(transport, mesh, tree)
    instead = averaging.Instead(jnp.bool_(True))
    got = averager(transport, mesh, instead=instead)(tree, kept, 0, None)
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves((got.mean, got.sent)))
    np.testing.assert_array_equal(got.residual["kernel"], tree["kernel"])


@pytest.mark.parametrize("code", [jaxcomp.sign(block=16), jaxcomp.random_k(0.25)])
def test_a_branch_changes_nothing_about_what_is_due(code):
    mesh, transport = mesh_of(2), transport_of(code)
    tree = rows(mesh, random_tree(0, 2, shapes=SHAPES))
    kept = nothing_kept(transport, mesh, tree)
    instead = averaging.Instead(jnp.bool_(False))
    got = averager(transport, mesh, instead=instead)(tree, kept, 0, None)
    jax.tree.map(np.testing.assert_array_equal, got, averager(transport, mesh)(tree, kept, 0, None))


@pytest.mark.parametrize("instead", [None, averaging.Instead(jnp.bool_(False))])
def test_zeroed_leaves_are_sent_as_zeros(instead):
    mesh, values = mesh_of(2), random_tree(0, 2, shapes=SHAPES)
    values["kernel"] = np.full_like(values["kernel"], np.nan)
    zeroed = {"bias": jnp.bool_(False), "kernel": jnp.bool_(True)}
    transport = averaging.exact(transport_of(jaxcomp.sign()))
    send = averager(transport, mesh, zeroed=zeroed, instead=instead)
    got = send(rows(mesh, values), {}, 0, None)
    assert not np.any(np.asarray(got.mean["kernel"]))
    np.testing.assert_array_equal(got.sent["bias"], values["bias"])


def test_many_buckets_alike_draw_numbers_of_their_own():
    mesh, ones = mesh_of(2), np.ones((2, 40, 16), "f4")
    code = jaxcomp.quantize(2, block=16, rounding="stochastic")
    of = functools.partial(transport_of, code)
    halves = {"kernel": rows(mesh, ones * np.where(np.arange(16) == 0, 1, 0.4).astype("f4"))}
    send = averager(of(bucket_numel=32), mesh)
    got = send(halves, {}, 0, None)
    pieces = np.asarray(got.sent["kernel"])[0].reshape(20, 32)
    assert len(np.unique(pieces, axis=0)) > 10
    later = send(halves, {}, 1, None)
    assert not np.array_equal(pieces, np.asarray(later.sent["kernel"])[0].reshape(20, 32))


def test_what_rounding_of_a_narrow_parameter_takes_is_what_is_left():
    param, change = jnp.array([1.0, 256.0], jnp.bfloat16), jnp.array([0.003, 0.25], jnp.float32)
    left = averaging.rounded_off(param, change)
    moved = (param + change).astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(moved + left, param.astype(jnp.float32) + change)
    assert left.dtype == jnp.float32 and left[1] == 0.25


def test_every_bucket_and_step_has_a_key_of_its_own():
    plan = buckets.make_plan({"x": jnp.zeros(100)}, lambda path, leaf: 0, 1, bucket_numel=10)
    of_step = lambda count: Key(jnp.int32(count), jnp.uint32(7))
    seed = lambda key, bucket: int(key.seed)
    seeds = [averaging.map_buckets(seed, plan, of_step(count)) for count in range(3)]
    assert len({*seeds[0], *seeds[1], *seeds[2]}) == 30


def test_sums_of_shards_and_of_whole_leaves_keep_their_types():
    mesh = jax.make_mesh((2, 2), (AXIS, "shards"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    transport = transport_over(jaxcomp.identity(), AXIS)

    def mean(tree):
        own = {"shard": tree["shard"][0], "whole": tree["whole"][0]}
        return averaging.average(transport, own, jnp.int32(0), "").mean

    given = {"shard": P(AXIS, "shards"), "whole": P(AXIS)}
    # The types say that the mean of a whole leaf is equal on all shards.
    kept = {"shard": P("shards"), "whole": P()}
    program = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=(given,), out_specs=kept))
    tree = {"shard": jnp.arange(16.0).reshape(2, 8), "whole": jnp.arange(6.0).reshape(2, 3)}
    found = program(tree)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(lambda x: x.mean(0), tree))
