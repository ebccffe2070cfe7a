"""Weights gathered once a step: what it computes with microbatches, and what it sends and holds."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from jaxcomp import report
from tests.helpers.layered import (
    EXACT,
    ROUNDING,
    assert_close,
    make_batch,
    odd_tree,
    on,
    stacked,
    start,
    train,
)
from tests.helpers.replicas import everywhere, mesh_of

EIGHT = jaxcomp.quantize(8, block=64, range="minmax")


def once(fsdp, **changes):
    return dataclasses.replace(fsdp, gather_once=True, **changes)


def test_microbatches_see_the_weights_that_gathers_of_their_own_would_give():
    """To nearest, and with exact gradients, the two ways differ by the order of sums alone."""
    each = jaxcomp.qsdp("replica", EIGHT, jaxcomp.identity())
    want, _, _ = train(each, optax.sgd(0.1), 4, accumulate=3, num_steps=1)
    got, _, _ = train(once(each), optax.sgd(0.1), 4, accumulate=3, num_steps=1)
    assert_close(got, want, ROUNDING)


def compiled(fsdp, accumulate):
    mesh, train_step, shards, state = start(fsdp, optax.adam(1e-3), 4, accumulate=accumulate)
    return mesh, train_step.step.lower(shards, state, on(mesh, make_batch())).compile()


def test_a_step_sends_two_messages_however_many_microbatches_it_has():
    fsdp = jaxcomp.qsdp("replica", EIGHT, EIGHT, exact=lambda *_: False)
    mesh, program = compiled(once(fsdp), 6)
    ops = sorted(m.op for m in report.collectives(program, mesh))
    assert ops == ["all-gather", "all-reduce", "all-to-all"]  # the all-reduce: 4 bytes, finite?
    sent = report.sent_bytes(program, mesh, "replica")
    assert sent == report.sent_bytes(compiled(once(fsdp), 1)[1], mesh, "replica")
    in_turn = report.sent_bytes(compiled(fsdp, 6)[1], mesh, "replica")
    assert in_turn > 8 * sent  # 18 passes for 2, but that `first` has no second gather


def test_stacked_parameters_are_gathered_layer_after_layer():
    fsdp = once(jaxcomp.qsdp("replica", EIGHT, EIGHT, exact=lambda *_: False))
    mesh = mesh_of(3)
    params = odd_tree()
    shards = fsdp.shard(everywhere(mesh, params), mesh, stacked)
    squares = lambda tree, batch: sum(((x - batch[0]) ** 2).sum() for x in jax.tree.leaves(tree))
    made = jaxcomp.qsdp_train_step(squares, optax.sgd(0.25), mesh, fsdp, accumulate=2)
    batch = on(mesh, np.full(6, 0.5, np.float32))
    state = made.init(shards)
    program = made.step.lower(shards, state, batch).compile()
    gathers = [m for m in report.collectives(program, mesh) if m.op == "all-gather"]
    assert sorted(m.count for m in gathers) == [1, 2]  # two layers in turn, and all else at once
    shards, _, _ = made.step(shards, state, batch)
    want = jax.tree.map(lambda x: (x + 0.5) / 2, params)
    # Eight bits of a range of about 6 in the weight's code and again in its gradient's.
    assert_close(fsdp.unshard(shards, mesh), want, 0.05)


def test_levels_are_learned_of_the_gradient_that_is_sent():
    code = jaxcomp.learned_levels(3, block=64, rounding="stochastic")
    fsdp = once(jaxcomp.qsdp("replica", EIGHT, code, exact=lambda *_: False))
    mesh, made, shards, state = start(fsdp, optax.sgd(0.1), 4, accumulate=3)
    first = jax.tree.map(np.asarray, state.levels)
    _, state, _ = made.step(shards, state, on(mesh, make_batch()))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.levels, first)
    assert all(change > 1e-3 for change in jax.tree.leaves(moved))


def test_secondary_shards_are_refused():
    with pytest.raises(ValueError, match="write one of the two"):
        jaxcomp.qsdp("replica", secondary=True, gather_once=True)


def test_a_layer_of_gathered_weights_is_computed_again_for_its_gradient():
    layer = EXACT.layer(lambda w, x: jax.numpy.tanh(x @ w))
    loss = lambda w, x: layer(w, x).sum()
    passes = str(jax.make_jaxpr(jax.grad(loss))(np.ones((4, 4), "f4"), np.ones((2, 4), "f4")))
    assert passes.count("tanh") == 2
