"""Many steps in one program, of replicas on one device: what a mesh computes step by step."""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest

import jaxcomp
from benchmarks import methods, scale, scale_sizes
from benchmarks.scale_sizes import METHODS, by_recipe, config_of
from benchmarks.studies import evaluation
from configs import nano_dense
from tests.helpers.replicas import everywhere, mesh_of
from train.config.run import update
from train.examples import Examples
from train.models.decoder import DecoderConfig
from train.placement import build
from train.task import make_task

STEPS, REPLICAS = 23, 2  # of which a tenth does not divide all


def made(kind):
    """i32[4, 9] by number, the same for each."""
    draw = lambda number: np.random.default_rng([kind, number]).integers(0, 256, (4, 9), np.int32)
    return lambda number, rows: draw(number)[rows]


def small(config):
    """The run with a tiny model, on two replicas."""
    return dataclasses.replace(
        config,
        replicas=REPLICAS,
        model=DecoderConfig(layers=1, width=8, heads=1, context=8),
        data=dataclasses.replace(nano_dense.get_config().data, batch=4),
        eval_batches=2,
    )


def test_a_run_is_that_of_a_mesh_to_rounding():
    # Momentum SGD inside: Adam makes steps of gradients that are zero but for rounding.
    local = "diloco(sgd(learning_rate, momentum=0.9), axis_name, every=2)"
    config = small(config_of("pico", methods.Method(local, (0.3,)), 7, STEPS))
    text = Examples({}, made(0), made(1))
    params, curve = scale.train(config, text)

    mesh, loss_fn = mesh_of(REPLICAS), build.loss_of(config)
    init, step = jaxcomp.train_step(loss_fn, update(config), mesh, "replica")
    start = jax.device_get(build.random_params(config))
    wanted = everywhere(mesh, start)
    state = init(wanted)
    for number in range(STEPS):
        wanted, state, _ = step(wanted, state, text.train(number, slice(None)))
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    measure = jax.jit(loss_fn)
    own = jaxcomp.mean_params(wanted, state, mesh, "replica")  # the last step is no outer one
    loss = np.mean([measure(own, made(1)(number, slice(None))) for number in range(2)])
    assert [step for step, _ in curve] == [*range(2, 23, 2), 23]
    np.testing.assert_allclose(curve[-1][1], loss, rtol=1e-5)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), jax.device_get(params), start)
    assert max(jax.tree.leaves(moved)) > 1e-2


def test_shards_are_trained_on_a_mesh():
    exact = METHODS["QSDP, 8 bits"]._replace(qsdp="qsdp(axis_name, identity(), identity())")
    text = Examples({}, made(0), made(1))
    trained = lambda method: scale.train(small(config_of("pico", method, 7, STEPS)), text)
    (_, got), (_, wanted) = trained(exact), trained(METHODS["dense Adam"])
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("size", ("pico", "micro", "micro_b2_95"))
def test_every_row_is_a_transformation(size, monkeypatch):
    monkeypatch.setattr(scale_sizes, "packages", lambda *_: nano_dense.get_config().data)
    for method in METHODS.values():
        made = update(config_of(size, by_recipe(method, size), 1, STEPS))
        assert isinstance(made, optax.GradientTransformationExtraArgs)


def test_a_short_memory_is_that_of_all_methods_with_second_moments():
    for name, method in METHODS.items():
        made = by_recipe(method, "micro_b2_95").update
        without = {"dense SGD", "PowerSGD", "dense Lion", "DeMo", "DeMo, 4 bits"}
        without |= {"DeMo, 4 bits, owners"}
        assert made.count("b2=0.95") == (name not in without), name
        # What differs from the usual recipe is the memory alone.
        named = r", others=(rare_rows\()?adam\(learning_rate\)(, axis_name\))?"
        plain = made.replace(", b2=0.95", "")
        usual = by_recipe(method, "micro").update
        assert re.sub(named, "", plain) == re.sub(named, "", usual), name
        assert "b2" not in usual


def test_replicas_lie_between_a_consensus_that_lags_and_their_mean(monkeypatch):
    text = Examples({}, made(0), made(1))
    task_of = lambda config: make_task(small(config), lambda _: text)
    monkeypatch.setattr(evaluation, "make_task", task_of)
    monkeypatch.setattr(evaluation, "AT", (2, 4))
    row = evaluation.run_row("SLAMB", 1, 4)
    assert list(row["losses"]) == ["2", "4"]
    for found in row["losses"].values():  # nobody has met yet
        assert found["consensus"] == row["losses"]["2"]["consensus"] != found["mean"]
        assert found["mean"] != found["replicas"] != found["consensus"]
