"""The functions of a run: its steps, what losses cost to look at, what its update sees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcomp
from tests.helpers import tiny_runs
from tests.helpers.replicas import mesh_of, one_value, rows
from tests.helpers.tiny_runs import TINY, tiny_config
from train.config import expression
from train.config import run as configs
from train.config.optimizer import schedule
from train.models.decoder import Decoder
from train.models.losses import cross_entropy
from train.models.modules import PathRngs, split
from train.placement import build
from train.placement.resolve import resolve
from train.task import gather_losses, make_task

# Adam divides by |g| + eps: of gradients that are zero but for rounding only eps keeps it.
EXACT_ADAM = "chain(compressed_mean(identity(), axis_name), adam(learning_rate, eps=1e-4))"


def test_losses_of_many_steps_come_to_all_in_one_message():
    mesh, steps = mesh_of(4), 10
    loss = jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(mesh, P("replica")))
    text = gather_losses(mesh).lower([loss] * steps).compile().as_text()
    collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    found = {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in collectives}
    assert found == {"all-gather": 1, "all-reduce": 0, "all-to-all": 0, "collective-permute": 0}


def test_every_replicas_loss_of_every_step_is_there():
    mesh = mesh_of(4)
    losses = [np.arange(4, dtype=np.float32) + 10 * step for step in range(3)]
    got = gather_losses(mesh)([rows(mesh, loss) for loss in losses])
    assert got.is_fully_replicated
    np.testing.assert_array_equal(got, np.stack(losses, axis=1))


def test_the_update_of_a_scanned_model_sees_its_layers_one_by_one():
    # Biases of 384 are exact, and known by having no mask; stacked they would be a matrix.
    update = "slamb(learning_rate, axis_name, exact_numel=256)"
    args = ["--model.scan", "--optimizer.update", update]
    for apart in (True, False):
        more = [] if apart else ["--no-per-layer"]
        config = configs.load("configs/nano_slamb.py", [*args, *more])
        tx, params = resolve(config).tx, build.param_shapes(config)
        stale = jaxcomp.state_shapes(tx, params, 2, mesh_of(2), "replica").stale["blocks"]
        assert (stale["qkv"]["bias"] is None) == apart
        assert stale["qkv"]["kernel"].shape[0] == config.model.layers


@pytest.mark.parametrize("name", ["nano_4bit", "nano_qsdp"])
def test_the_expressions_of_a_config_are_evaluated_once(name, monkeypatch):
    texts, evaluate = [], expression.evaluate

    def noted(text, bindings):
        texts.append(text)
        return evaluate(text, bindings)

    monkeypatch.setattr(expression, "evaluate", noted)
    config = configs.load(f"configs/{name}.py")
    placement = resolve(config)
    for num_replicas in (4, 2):
        functions = placement.functions(mesh_of(num_replicas))
        _, state = jax.eval_shape(functions.init, build.param_shapes(config))
        placement.rounds(state)
    assert texts == [text for text in (config.qsdp, config.optimizer.update) if text is not None]


# The mathematics of a step.


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """Makes the configs of tiny runs at a constant rate."""
    folder = tmp_path_factory.mktemp("runs")
    return functools.partial(tiny_config, folder, schedule="constant")


compiled = functools.lru_cache(maxsize=8)(make_task)


def first_params(config):
    """The initial parameters of a config, on one device."""
    return jax.tree.map(one_value, compiled(config).init()[0])


def all_params(params):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def trained(config):
    """The parameters after a few steps, compared over the replicas."""
    return jax.tree.map(one_value, tiny_runs.trained(compiled(config), 3)[0])


def test_identity_is_adam_on_the_gradient_of_the_whole_batch(config_of):
    config = config_of(EXACT_ADAM, replicas=4)
    params = first_params(config)
    optimizer = optax.adam(schedule(config.optimizer, config.steps), eps=1e-4)
    apply, _ = split(nnx.eval_shape(lambda: Decoder(TINY, rngs=PathRngs(0))))
    loss_fn = lambda params, x: cross_entropy(apply(params, x[:, :-1]), x[:, 1:])
    grad_fn, state = jax.jit(jax.grad(loss_fn)), optimizer.init(params)
    for step in range(3):
        tokens = jnp.asarray(np.asarray(compiled(config).batch(step)))
        updates, state = optimizer.update(grad_fn(params, tokens), state)
        params = optax.apply_updates(params, updates)
    moved = np.abs(all_params(params) - all_params(first_params(config))).max()
    assert moved > 5e-3
    # Gradients differ by 1e-8, a few float32 roundings of 0.1; over eps, times the rate.
    np.testing.assert_allclose(
        all_params(trained(config)), all_params(params), rtol=0, atol=3 * 1e-8 / 1e-4 * 1e-2
    )


@pytest.mark.parametrize(
    ("changes", "size"), [({"replicas": 4, "accumulate": 2}, 4), ({"replicas": 0}, 8)]
)
def test_division_of_the_batch_changes_nothing_but_rounding(config_of, changes, size):
    make = functools.partial(config_of, rate=0.5)
    one, other = trained(make(replicas=1)), trained(make(**changes))
    assert compiled(make(**changes)).mesh.size == size
    moved = np.abs(all_params(one) - all_params(first_params(make(replicas=1)))).max()
    assert moved > 1e-2
    # Means over 128 tokens in another order: a few float32 roundings of the largest update.
    np.testing.assert_allclose(
        all_params(other), all_params(one), rtol=0, atol=8 * 2**-24 * max(moved, 1.0)
    )


def test_bfloat16_computes_in_16_bits_and_keeps_float32_parameters(config_of):
    full = config_of(rate=0.5, replicas=1)
    half = dataclasses.replace(full, model=dataclasses.replace(TINY, dtype="bfloat16"))
    full_loss, half_loss = (
        compiled(config).evaluate(trained(config))["loss"] for config in (full, half)
    )
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(trained(half)))
    # bfloat16 keeps 8 bits of each activation; errors of many average out in the loss.
    assert 0 < abs(half_loss - full_loss) < 2**-8 * full_loss
