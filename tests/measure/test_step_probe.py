"""What a step costs without its messages, on two devices of one process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import planner, report
from jaxcomp.measure import step_probe
from tests.helpers.replicas import everywhere, mesh_of, on, rows
from train.placement import counts as rounds_of

AXIS = "replica"
PARAMS = {"kernel": jax.ShapeDtypeStruct((64, 40), jnp.float32)}
DENSE = optax.chain(jaxcomp.compressed_mean(jaxcomp.identity(), AXIS), optax.adam(1e-2))
FOUR_BITS = optax.chain(jaxcomp.compressed_mean(jaxcomp.quantize(4), AXIS), optax.adam(1e-2))
STEPS = 8


def zero_one_adam():
    return jaxcomp.zero_one_adam(
        1e-2,
        AXIS,
        sync_at=jaxcomp.schedules.every(4, STEPS, after=2),
        variance_at=jaxcomp.schedules.until(2),
    )


@pytest.mark.parametrize(
    "make",
    [lambda: DENSE, lambda: FOUR_BITS, zero_one_adam],
    ids=["dense", "4 bits", "0/1 Adam"],
)
def test_messages_are_those_of_the_report(make):
    mesh = mesh_of(2)
    program = step_probe.update_program(make(), PARAMS, mesh, AXIS).step
    counts = rounds_of.rounds(make(), STEPS)
    shares = {part: count / STEPS for part, count in counts.items()}
    found = step_probe.messages(program, mesh, shares)
    sent = report.sent_bytes_by_part(program, mesh, AXIS)
    expected = rounds_of.total_bytes(sent, counts, STEPS) / STEPS
    assert sum(m.times * m.sent_bytes for m in found) == pytest.approx(expected)
    assert expected > 0
    state_and_gradient = 4 * 4 * 64 * 40  # parameters, two moments, a gradient
    assert step_probe.held_bytes(program) >= state_and_gradient


def test_a_message_in_a_loop_is_sent_as_often_as_it_runs():
    mesh = mesh_of(2)
    body = lambda x, _: (lax.pcast(lax.pmean(jnp.sin(x), AXIS), AXIS, to="varying"), None)
    step = on(mesh, lambda x: lax.scan(body, x, length=5)[0], P(AXIS), P(AXIS))
    program = step.lower(jax.ShapeDtypeStruct((2, 8), jnp.float32)).compile()
    assert step_probe.messages(program, mesh, {}) == (planner.Message("all-reduce", 32.0, 5.0),)


def test_an_update_is_what_the_step_does_after_the_gradient():
    mesh = mesh_of(2)
    made = step_probe.update_program(FOUR_BITS, PARAMS, mesh, AXIS)
    params = {"kernel": np.ones((64, 40), np.float32)}
    grads = {"kernel": np.random.default_rng(0).normal(size=(2, 64, 40)).astype(np.float32)}
    loss_fn = lambda params, batch: jnp.vdot(params["kernel"], batch["kernel"][0])
    init, step = jaxcomp.train_step(loss_fn, FOUR_BITS, mesh, AXIS)
    copies = [everywhere(mesh, params) for _ in range(2)]
    wanted, _, _ = step(copies[0], init(copies[0]), rows(mesh, grads))
    got, _ = made.step(copies[1], made.init(copies[1]), rows(mesh, grads))
    np.testing.assert_array_equal(got["kernel"], wanted["kernel"])


def test_alone_nothing_is_sent_and_every_device_works():
    mesh = step_probe.alone(mesh_of(2), AXIS)
    made = step_probe.update_program(FOUR_BITS, PARAMS, mesh, AXIS)
    assert step_probe.messages(made.step, mesh, {}) == ()
    assert len(made.step.input_shardings[0][0]["kernel"].device_set) == 2
    time = step_probe.update_timer(made, PARAMS, mesh, AXIS)
    assert time(1, None) > 0


def test_every_call_is_of_the_step_that_is_asked_for(monkeypatch):
    mesh = step_probe.alone(mesh_of(2), AXIS)
    made = step_probe.update_program(zero_one_adam(), PARAMS, mesh, AXIS)
    counted = []

    def seconds_of(call, repeats):
        for _ in range(repeats):
            _, state = call()
            counted.append(int(optax.tree_utils.tree_get(state, "rounds")["synchronize"]))

    monkeypatch.setattr(step_probe, "seconds_of", seconds_of)
    time = step_probe.update_timer(made, PARAMS, mesh, AXIS)
    time(2, 3)  # the fourth step exchanges, however often it is repeated
    time(2, 4)  # the fifth does not
    assert counted == [1, 2, 2, 2]


def test_kinds_of_steps_are_counted_once_each():
    assert rounds_of.kinds_of_steps(DENSE, STEPS) == {None: 1.0}
    # 0 and 1 learn the variance too, 3 and 7 exchange, 2, 4, 5 and 6 do nothing.
    assert rounds_of.kinds_of_steps(zero_one_adam(), STEPS) == {0: 0.25, 3: 0.25, 2: 0.5}


def test_gradients_are_timed_where_replicas_are():
    shape = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    loss_fn = lambda params, batch: jnp.mean((batch @ params["kernel"]) ** 2)
    time = step_probe.gradient_timer(loss_fn, PARAMS, shape, mesh_of(2), AXIS, accumulate=2)
    assert time(1) > 0
    with pytest.raises(ValueError, match="must be divisible by 6"):
        step_probe.gradient_timer(loss_fn, PARAMS, shape, mesh_of(2), AXIS, accumulate=3)


@pytest.mark.parametrize(("replicas", "ratio"), [(1, 1.0), (2, 5 / 6), (4, 4.5 / 6)])
def test_a_codec_works_less_where_chunks_are_shared_out(replicas, ratio):
    both = planner.Message("all-to-all", 1.0), planner.Message("all-gather", 1.0)
    assert step_probe.passes(both, replicas) == pytest.approx(ratio)


def test_a_gathered_mean_decodes_what_everyone_sends():
    assert step_probe.passes([planner.Message("all-gather", 1.0)], 4) == 2.0
    assert step_probe.passes([planner.Message("all-reduce", 1.0)], 4) == 1.0
