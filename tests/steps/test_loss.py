"""The loss: a replica's own where it is differentiated, the mean of all for optimizers that ask."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from jaxcomp import report
from tests.helpers.layered import EXACT, assert_close, loss_of, make_batch, make_params, on
from tests.helpers.replicas import everywhere, mesh_of, one_value, rows, state_of

MEAN = jaxcomp.compressed_mean(jaxcomp.identity(), "replica")
SGD = optax.sgd(0.5)
DENSE = optax.chain(MEAN, SGD)
COCKTAIL = jaxcomp.cocktail_sgd(SGD, "replica")
GATHER_ONCE = jaxcomp.qsdp("replica", jaxcomp.identity(), jaxcomp.identity(), gather_once=True)
HYBRID = jaxcomp.qsdp("replica", jaxcomp.identity(), jaxcomp.identity(), fast_axis="fast")
FIRST_SHARDED = {"first": P("fsdp"), "layers": P()}


class Steps(NamedTuple):
    """A step of one kind, and what it starts from."""

    step: jaxcomp.TrainStep
    params: Any
    place: Callable  # what puts a batch where the step wants it
    whole: Callable = lambda params: params


def on_a_mesh(loss_fn, tx=DENSE, make=jaxcomp.train_step, param_specs=None, **options):
    mesh = mesh_of(2, 2) if param_specs else mesh_of(2)
    specs = param_specs or P()
    options |= {"param_specs": param_specs} if param_specs else {}
    made = make(loss_fn, tx, mesh, "replica", **options)
    place = lambda spec, branch: jax.device_put(branch, NamedSharding(mesh, spec))
    is_spec = lambda x: isinstance(x, P)
    params = jax.tree.map(place, specs, make_params(), is_leaf=is_spec)
    return Steps(made, params, functools.partial(rows, mesh))


def simulated(loss_fn, tx=DENSE, **options):
    made = jaxcomp.simulated_train_step(loss_fn, tx, 2, "replica", **options)
    return Steps(made, jax.tree.map(jnp.asarray, make_params()), lambda batch: batch)


def in_shards(loss_fn, tx=SGD, fsdp=EXACT, sizes=(2,), **options):
    mesh = mesh_of(*sizes, second="fast")
    made = jaxcomp.qsdp_train_step(loss_fn, tx, mesh, fsdp, **options)
    shards = fsdp.shard(everywhere(mesh, make_params()), mesh)
    whole = lambda shards: fsdp.unshard(shards, mesh)
    return Steps(made, shards, functools.partial(on, mesh), whole)


def trained(steps, num_steps=1):
    params, state = steps.params, steps.step.init(steps.params)
    for number in range(num_steps):
        params, state, _ = steps.step.step(params, state, steps.place(make_batch(number)))
    return steps.whole(params), state


whole_loss = loss_of(None)
overlapped = functools.partial(on_a_mesh, tx=COCKTAIL, make=jaxcomp.overlapped_train_step)
hybrid = functools.partial(in_shards, fsdp=HYBRID, sizes=(2, 2))
STEPS = {
    "train_step": (on_a_mesh, whole_loss),
    "in microbatches": (functools.partial(on_a_mesh, accumulate=2), whole_loss),
    "with an fsdp axis": (functools.partial(on_a_mesh, param_specs=FIRST_SHARDED), whole_loss),
    "overlapped": (overlapped, whole_loss),
    "simulated": (simulated, whole_loss),
    "simulated in microbatches": (functools.partial(simulated, accumulate=2), whole_loss),
    "qsdp": (in_shards, loss_of(EXACT)),
    "qsdp gathered once": (functools.partial(in_shards, fsdp=GATHER_ONCE), loss_of(GATHER_ONCE)),
    "qsdp over two axes": (hybrid, loss_of(HYBRID)),
}
REFUSED = r"loss is equal on all replicas over .*Return the mean loss of the local batch: the step"


@pytest.mark.parametrize("kind", [kind for kind in STEPS if "simulated" not in kind])
def test_a_loss_that_is_averaged_already_is_refused(kind):
    make, loss_fn = STEPS[kind]
    axes = ("replica", "fast") if kind == "qsdp over two axes" else "replica"
    averaged = lambda params, batch: lax.pmean(loss_fn(params, batch), axes)
    with pytest.raises(ValueError, match=REFUSED):
        trained(make(averaged))
    constant = lambda params, batch: jnp.float32(1)
    with pytest.raises(ValueError, match=REFUSED):
        trained(make(constant))


@pytest.mark.parametrize("axis", ["replica", "fast"])
def test_a_loss_of_shards_has_to_differ_over_both_axes(axis):
    averaged = lambda params, batch: lax.pmean(loss_of(HYBRID)(params, batch), axis)
    with pytest.raises(ValueError, match=REFUSED):
        trained(hybrid(averaged))


def test_a_loss_that_is_averaged_already_is_right_where_replicas_are_simulated():
    averaged = lambda params, batch: lax.pmean(whole_loss(params, batch), "replica")
    found, want = (trained(simulated(loss))[0] for loss in (averaged, whole_loss))
    assert_close(found, want, 1e-6)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("make", [on_a_mesh, simulated])
def test_a_loss_may_use_what_the_other_replicas_have(make, whole):
    def contrastive(params, batch, gather):
        left, right = (jnp.tanh(batch[name] @ params["first"]) for name in "xy")
        scores = (gather(left) if whole else left) @ gather(right).T
        return jnp.mean(jax.nn.logsumexp(scores, axis=1))

    gather = functools.partial(lax.all_gather, axis_name="replica", tiled=True)
    params, _ = trained(make(functools.partial(contrastive, gather=gather)))
    grads = jax.grad(contrastive)(make_params(), make_batch(), gather=lambda x: x)
    want = jax.tree.map(lambda p, g: p - 0.5 * g, make_params(), grads)
    assert np.abs(grads["first"]).max() > 0.1
    assert_close(params, want, 1e-6)


# No step is ever twice as good as the best one: the rate is halved every second step.
PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=2, rtol=0.5)


@pytest.mark.parametrize("kind", [kind for kind in STEPS if kind != "overlapped"])
def test_a_rate_is_reduced_on_a_plateau_of_the_mean_loss(kind):
    make, loss_fn = STEPS[kind]
    mean = optax.identity() if "qsdp" in kind else MEAN
    tx = optax.chain(mean, optax.sgd(0.05), PLATEAU)
    params, state = trained(make(loss_fn, tx=tx), num_steps=6)
    wanted, [_, want] = on_one_device()
    assert float(one_value(state_of(state, "scale"))) == float(want.scale) == 0.25
    np.testing.assert_allclose(one_value(state_of(state, "best_value")), want.best_value, rtol=1e-6)
    assert_close(params, wanted, 1e-6)


@functools.cache
def on_one_device():
    """Parameters and state after the same steps on the whole batch."""
    tx, params = optax.chain(optax.sgd(0.05), PLATEAU), make_params()
    state, value_and_grad = tx.init(params), jax.jit(jax.value_and_grad(whole_loss))
    for number in range(6):
        value, grads = value_and_grad(params, make_batch(number))
        updates, state = tx.update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
    return params, state


class Seen(NamedTuple):
    """State of `seeing`."""

    value: jax.Array  # f32[], the last one


def seeing():
    """Keeps the `value` that an optimizer gets."""
    init = lambda params: Seen(jnp.zeros([]))
    update = lambda updates, state, params=None, *, value, **_: (updates, Seen(value + 0.0))
    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("make", [jaxcomp.train_step, jaxcomp.overlapped_train_step])
def test_optimizers_of_replicas_get_the_mean_loss_of_all(make):
    inner = optax.chain(optax.sgd(0.05), seeing())
    tx = optax.chain(PLATEAU, jaxcomp.cocktail_sgd(inner, "replica"))
    (init, step), params, place, _ = on_a_mesh(whole_loss, tx, make)
    state = init(params)
    for number in range(3):
        params, state, metrics = step(params, state, place(make_batch(number)))
        mean = metrics["loss"].mean()
        assert metrics["loss"][0] != metrics["loss"][1]
        np.testing.assert_allclose(state_of(state, "value"), [mean, mean], rtol=1e-6)
    assert float(one_value(state_of(state, "scale"))) == 0.5


def test_the_mean_loss_is_sent_only_where_something_uses_it():
    def messages(*chain):
        (init, step), params, place, _ = on_a_mesh(whole_loss, optax.chain(*chain))
        program = step.lower(params, init(params), place(make_batch())).compile()
        return report.collectives(program, mesh_of(2))

    [gradient] = messages(MEAN, optax.sgd(0.05))
    assert gradient.op == "all-reduce" and "[]" not in gradient.shape
    both = messages(MEAN, optax.sgd(0.05), PLATEAU)
    assert sum(message.operand_bytes for message in both) == gradient.operand_bytes + 4


def test_several_gradients_may_add_up_before_a_plateau():
    steps = optax.MultiSteps(optax.chain(MEAN, optax.sgd(0.05), PLATEAU), 2)
    tx = optax.GradientTransformationExtraArgs(steps.init, steps.update)
    _, state = trained(on_a_mesh(whole_loss, tx), num_steps=6)
    assert float(one_value(state_of(state, "scale"))) == 0.5
