"""The functions of a run: what losses cost to look at, and what its transformation sees."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.helpers.replicas import mesh_of, rows
from train.config import expression
from train.config import run as configs
from train.placement import build
from train.placement.resolve import resolve
from train.task import gather_losses


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
        init = resolve(config).tx.init
        replicas = jax.vmap(init, in_axes=None, axis_name=configs.AXIS_NAME, axis_size=2)
        stale = jax.eval_shape(replicas, build.param_shapes(config)).stale["blocks"]
        assert (stale["qkv"]["bias"] is None) == apart
        assert stale["qkv"]["kernel"].shape[:2] == (2, config.model.layers)


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
