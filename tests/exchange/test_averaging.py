"""The one way through which all methods send: means, what is kept, flags and parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp.compressors.base import Key
from jaxcomp.exchange import averaging, buckets
from tests.helpers.replicas import mesh_of, random_tree, rows

SHAPES = {"bias": (6,), "kernel": (8, 16)}
AXIS = "replica"


def transport_of(code, exact="bias", **changes):
    """Sends leaves of this name as they are, and all others by the code."""
    policy = lambda path, leaf: averaging.EXACT if path == exact else code
    made = averaging.Transport(policy, jaxcomp.two_shot, AXIS, 2**10, 0)
    return made._replace(**changes)


def averager(transport, mesh, **options):
    """Jits `(rows of trees, residuals, count, flags) -> Averaged`, all of it in rows."""

    def own(tree, kept, count, flags):
        tree, kept, flag = jax.tree.map(lambda x: x[0], (tree, kept, flags))
        got = averaging.average(transport, tree, count, "part", flag=flag, **kept, **options)
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
    assert got.residual is None and got.flag is None and not jax.tree.leaves(got.owner_residual)
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


@pytest.mark.parametrize(("exact", "numbers"), [("bias", 6 + 1), ("none", 1)])
def test_a_flag_rides_behind_what_travels_exact(exact, numbers):
    mesh, tree = mesh_of(2), rows(mesh_of(2), random_tree(0, 2, shapes=SHAPES))
    flags, transport = rows(mesh, np.array([0.0, 1.0], "f4")), transport_of(jaxcomp.sign(), exact)
    send = averager(transport, mesh)
    plain, flagged = (send(tree, {}, 0, of) for of in (None, flags))
    assert np.asarray(flagged.flag).tolist() == [0.5, 0.5]
    for name in SHAPES:
        np.testing.assert_array_equal(plain.mean[name], flagged.mean[name])
        np.testing.assert_array_equal(plain.sent[name], flagged.sent[name])
    sent = jaxcomp.report.collectives(send.lower(tree, {}, 0, flags).compile(), mesh)
    sums = [row for row in sent if row.op == "all-reduce"]
    assert [row.operand_bytes for row in sums] == [4 * numbers]
    assert {row.part for row in sent} <= {"part", ""} and "part" in {row.part for row in sent}


def test_another_code_takes_the_place_of_lossy_ones_alone():
    mesh, values = mesh_of(2), random_tree(0, 2, shapes=SHAPES)
    transport = transport_of(jaxcomp.sign())
    got = averager(transport, mesh, code=jaxcomp.quantize(8))(rows(mesh, values), {}, 0, None)
    np.testing.assert_array_equal(got.sent["bias"], values["bias"])
    lost = np.abs(np.asarray(got.sent["kernel"]) - values["kernel"])
    assert 0 < lost.max() < 0.03  # a step of 1 bit would be as large as the values


def test_many_buckets_alike_draw_numbers_of_their_own():
    mesh, ones = mesh_of(2), np.ones((2, 40, 16), "f4")
    code = jaxcomp.quantize(2, block=16, rounding="stochastic")
    of = functools.partial(transport_of, code)
    halves = {"kernel": rows(mesh, ones * np.where(np.arange(16) == 0, 1, 0.4).astype("f4"))}
    got = averager(of(bucket_numel=32), mesh)(halves, {}, 0, None)
    pieces = np.asarray(got.sent["kernel"])[0].reshape(20, 32)
    assert len(np.unique(pieces, axis=0)) > 10
    later = averager(of(bucket_numel=32), mesh)(halves, {}, 1, None)
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
